"""Prompts that were sent to a worker, whose answers are read piece by piece; and which worker gets a prompt."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import random
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, urlsplit

from weft.errors import AdapterFileError
from weft.serve.api.errors import ApiError, as_api_error, invalid, unavailable
from weft.serve.db.adapters import short_name
from weft.serve.db.engine import DbRow
from weft.serve.db.workers import is_hung
from weft.serve.errors import Damaged

TIMEOUT_S = 300.0
SEND_S = 10.0
"""How long connecting to a worker and sending it a prompt may take."""
PROBE_S = 3.0
"""How long a live worker may take to answer `/alive`."""
CHECK_S = 60.0
"""How long a worker may take to read an adapter."""
BROKEN_ADAPTER = AdapterFileError.code
WORKER_LOST, WORKER_BUSY = "worker_lost", "worker_unavailable"
NO_WORKER_RETRY_S = 5
_CHUNK = "data:"


def is_alive(worker: DbRow) -> bool:
    """True if the worker's server answers at all."""
    url = urlsplit(worker["address"])
    connection = _connection_to(url, PROBE_S)
    try:
        connection.request("GET", url.path.rstrip("/") + "/alive")
        connection.getresponse()
        return True
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _connection_to(url: SplitResult, timeout_s: float) -> http.client.HTTPConnection:
    kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
    return kind(url.hostname or "", url.port, timeout=timeout_s)


@dataclass(frozen=True)
class AnswerPiece:
    """A piece of an answer's text, with the token counts once they are known, and with the log-probabilities of the
    tokens that begin in it, if they are wanted."""

    text: str
    done: bool = True
    prompt_tokens: int = 0
    completion_tokens: int = 0
    finish_reason: str | None = None
    logprobs: Sequence[dict[str, Any]] = ()


def choose_worker(workers: list[DbRow], base: str, blob: str | None) -> DbRow:
    """Chooses a worker of this backbone that answers prompts and does not hang, if possible one that is not stopping.
    Prompts for an adapter, known by its archive `blob`, go to a worker that has it loaded. If none has, its name
    decides, so that all API processes send its prompts to one worker and it is loaded once."""
    able = [w for w in workers if w["base_model"] == base and w["address"]]
    if not able:
        raise unavailable(f"No worker has the model '{base}' loaded at the moment.", "no_worker", NO_WORKER_RETRY_S)
    able = [w for w in able if not is_hung(w)]
    if not able:
        message = f"Training keeps the workers of the model '{base}' from prompts at the moment."
        raise unavailable(message, WORKER_BUSY, NO_WORKER_RETRY_S)
    able = [w for w in able if not w["is_draining"]] or able
    if blob is None:
        return random.choice(able)
    loaded = [worker for worker in able if short_name(blob) in worker["info"].get("adapters", ())]
    return max(loaded or able, key=lambda worker: hashlib.sha256(f"{blob} {worker['id']}".encode()).digest())


def check_adapter(worker: DbRow, source: str) -> str | None:
    """Has a worker read an adapter; returns what is wrong with it. ApiError if the worker cannot do so now."""
    url = urlsplit(worker["address"])
    connection = _connection_to(url, CHECK_S)
    headers = {"content-type": "application/json", "x-weft-token": worker["token"] or ""}
    try:
        connection.request("POST", url.path.rstrip("/") + "/check", json.dumps({"model_blob": source}), headers)
        answer = connection.getresponse()
        body = answer.read(65_536)
    except (OSError, http.client.HTTPException):
        raise _broken() from None
    finally:
        connection.close()
    if answer.status == 204:
        return None
    code, message, _ = _error_in(body)
    if answer.status == 400 and code == BROKEN_ADAPTER:
        return message
    raise _refused(answer.status, body, None)


class PendingAnswer:
    """A prompt that has been sent to a worker; its answer is read later, so that several can be under way."""

    def __init__(self, worker: DbRow, prompt: dict[str, Any]) -> None:
        url = urlsplit(worker["address"])
        self._connection = _connection_to(url, SEND_S)
        self.seen_at = time.monotonic()
        self._answer: http.client.HTTPResponse | None = None
        self._is_stream = bool(prompt["stream"])
        headers = {"content-type": "application/json", "x-weft-token": worker["token"] or ""}
        try:
            self._connection.request("POST", url.path.rstrip("/") + "/generate", json.dumps(prompt), headers)
            self._socket: socket.socket = self._connection.sock
            self._socket.settimeout(TIMEOUT_S)
        except (OSError, http.client.HTTPException):
            self.close()
            raise _broken() from None

    def close(self) -> None:
        if self._answer is not None:
            # It holds the socket, whatever becomes of the connection.
            self._answer.close()
        self._connection.close()

    def hang_up(self) -> None:
        """Ends the connection at once; a thread that waits for the answer finds it broken."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def pieces(self) -> Iterator[AnswerPiece]:
        """Yields the answer piece by piece; without streaming it is one piece."""
        try:
            answer = self._response()
            if not self._is_stream:
                yield _piece(json.loads(answer.read()))
                return
            while line := answer.readline():
                self.seen_at = time.monotonic()
                text = line.decode().strip()
                if not text.startswith(_CHUNK) or text == "data: [DONE]":
                    continue
                piece = _piece(json.loads(text.removeprefix(_CHUNK)))
                yield piece
                if piece.done:
                    return
            raise _broken()
        except (OSError, http.client.HTTPException, ValueError):
            raise _broken() from None
        finally:
            self.close()

    def _response(self) -> http.client.HTTPResponse:
        answer = self._answer = self._connection.getresponse()
        if answer.status != 200:
            raise _refused(answer.status, answer.read(65_536), answer.getheader("retry-after"))
        return answer


def send_all(worker: DbRow, prompts: Sequence[dict[str, Any]]) -> list[PendingAnswer]:
    """Sends all prompts to a worker before the first answer is read; it answers them together."""
    pending: list[PendingAnswer] = []
    try:
        for prompt in prompts:
            pending.append(PendingAnswer(worker, prompt))
    except ApiError:
        for answer in pending:
            answer.close()
        raise
    return pending


def _refused(status: int, body: bytes, retry_after: str | None) -> ApiError:
    """Passes a worker's 400 about the prompt to the user; any other answer means that it cannot answer now."""
    code, message, param = _error_in(body)
    if status == 400 and code == BROKEN_ADAPTER:
        return invalid(f"The adapter cannot be used: {message}", "model", "broken_adapter")
    if status == 400 and message:
        return invalid(message, param, "invalid_prompt")
    if status == 500:
        return as_api_error(Damaged(f"a worker cannot use an adapter: {message}"))
    wait_s = int(retry_after) if retry_after and retry_after.isdecimal() else NO_WORKER_RETRY_S
    return unavailable("The worker cannot answer at the moment.", WORKER_BUSY, wait_s)


def _error_in(body: bytes) -> tuple[str, str, str | None]:
    """The code, the message and the parameter of a worker's error; empty if it is none."""
    try:
        error = json.loads(body)["error"]
        return str(error.get("code")), str(error["message"]), error.get("param")
    except (ValueError, LookupError, TypeError, AttributeError):
        return "", "", None


def _broken() -> ApiError:
    return unavailable("The worker went away before the answer was complete.", WORKER_LOST, NO_WORKER_RETRY_S)


def _piece(value: Any) -> AnswerPiece:
    if not isinstance(value, dict) or "error" in value:
        raise ValueError("not an answer")
    counts = {name: int(value.get(name) or 0) for name in ("prompt_tokens", "completion_tokens")}
    reason, logprobs = value.get("finish_reason"), value.get("logprobs") or ()
    text, is_done = str(value.get("text", "")), bool(value.get("done", True))
    return AnswerPiece(text, is_done, **counts, finish_reason=reason, logprobs=logprobs)
