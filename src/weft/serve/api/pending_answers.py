"""Prompts that were sent to a worker, whose answers are read piece by piece; and which worker gets a prompt."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import random
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
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
"""How long connecting and sending a request may take."""
PROBE_S = 3.0
"""How long a live worker may take to answer `/alive`."""
CHECK_S = 60.0
"""How long a worker may take to read an adapter."""
BROKEN_ADAPTER = AdapterFileError.code
WORKER_LOST, WORKER_BUSY = "worker_lost", "worker_unavailable"
NO_WORKER_RETRY_S = 5
_CHUNK = "data:"
NO_ANSWER = (OSError, http.client.HTTPException)


def is_alive(worker: DbRow) -> bool:
    """True if the worker's server answers at all."""
    url = urlsplit(worker["address"])
    connection = _connection_to(url, PROBE_S)
    try:
        connection.request("GET", url.path.rstrip("/") + "/alive")
        connection.getresponse()
        return True
    except NO_ANSWER:
        return False
    finally:
        connection.close()


def _connection_to(url: SplitResult, timeout_s: float) -> http.client.HTTPConnection:
    kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
    return kind(url.hostname or "", url.port, timeout=timeout_s)


class SentRequest:
    """A JSON request, sent; its answer is read by one thread, and any other may hang up. Raises one of NO_ANSWER."""

    def __init__(self, url: str, path: str, body: Any, headers: Mapping[str, str], timeout_s: float) -> None:
        """`timeout_s`: how long the next piece of the answer may take. Without a body it is a GET."""
        at = urlsplit(url)
        self._connection = _connection_to(at, SEND_S)
        self._answer: http.client.HTTPResponse | None = None
        data = None if body is None else json.dumps(body)
        headers = {"content-type": "application/json", **headers}
        try:
            self._connection.request("GET" if body is None else "POST", at.path.rstrip("/") + path, data, headers)
            self._socket: socket.socket = self._connection.sock
            self._socket.settimeout(timeout_s)
        except NO_ANSWER:
            self.close()
            raise

    def close(self) -> None:
        if self._answer is not None:
            # It holds the socket, whatever becomes of the connection.
            self._answer.close()
        self._connection.close()

    def hang_up(self) -> None:
        """Ends the connection at once; a thread that waits for the answer finds it broken."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def begun(self) -> http.client.HTTPResponse:
        """Waits for the begin of the answer."""
        self._answer = self._connection.getresponse()
        return self._answer


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


def _token_header(worker: DbRow) -> dict[str, str]:
    return {"x-weft-token": worker["token"] or ""}


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
    try:
        call = SentRequest(worker["address"], "/check", {"model_blob": source}, _token_header(worker), CHECK_S)
        with contextlib.closing(call):
            answer = call.begun()
            body = answer.read(65_536)
    except NO_ANSWER:
        raise _broken() from None
    if answer.status == 204:
        return None
    code, message, _ = _error_in(body)
    if answer.status == 400 and code == BROKEN_ADAPTER:
        return message
    raise _refused(answer.status, body, None)


class PendingAnswer(SentRequest):
    """A prompt that has been sent to a worker; its answer is read later, so that several can be under way."""

    def __init__(self, worker: DbRow, prompt: dict[str, Any]) -> None:
        self.seen_at = time.monotonic()
        self._is_stream = bool(prompt["stream"])
        try:
            super().__init__(worker["address"], "/generate", prompt, _token_header(worker), TIMEOUT_S)
        except NO_ANSWER:
            raise _broken() from None

    def pieces(self) -> Iterator[AnswerPiece]:
        """Yields the answer piece by piece; without streaming it is one piece."""
        try:
            answer = self.begun()
            if answer.status != 200:
                raise _refused(answer.status, answer.read(65_536), answer.getheader("retry-after"))
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
        except (*NO_ANSWER, ValueError):
            raise _broken() from None
        finally:
            self.close()


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
