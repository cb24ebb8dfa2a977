"""Sends prompts to the worker that holds a backbone: one POST to the address in its row, with its token.

`POST {address}/generate` takes {model_blob, base, messages or prompt (a text or token ids), max_tokens, temperature,
top_p, seed, stop, stream} and answers {"text", "done", "prompt_tokens", "completion_tokens"} as JSON, or as a stream of
such events.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from weft.serve.api.errors import ApiError, invalid, unavailable
from weft.serve.records.rows import DbRow

TIMEOUT_S = 300.0
NO_WORKER_RETRY_S = 5
_CHUNK = "data:"


@dataclass(frozen=True)
class AnswerPiece:
    """A piece of an answer's text, with the token counts once they are known."""

    text: str
    done: bool = True
    prompt_tokens: int = 0
    completion_tokens: int = 0
    finish_reason: str | None = None


def choose_worker(workers: list[DbRow], base: str, blob: str | None) -> DbRow:
    """Chooses a live worker of this backbone that answers prompts, if possible one that is not stopping.

    An adapter, known by its archive `blob`, is asked where it is loaded. Where it is not, its name decides, so that all
    API processes send its prompts to one worker and it is loaded once.
    """
    able = [w for w in workers if w["base_model"] == base and w["address"]]
    able = [w for w in able if not w["is_draining"]] or able
    if not able:
        raise unavailable(f"No worker has the model '{base}' loaded at the moment.", "no_worker", NO_WORKER_RETRY_S)
    if blob is None:
        return random.choice(able)
    loaded = [worker for worker in able if blob in worker["info"].get("adapters", ())]
    return max(loaded or able, key=lambda worker: hashlib.sha256(f"{blob} {worker['id']}".encode()).digest())


class PendingAnswer:
    """A prompt that has been sent to a worker; its answer is read later, so that several can be under way."""

    def __init__(self, worker: DbRow, prompt: dict[str, Any]) -> None:
        place = urlsplit(worker["address"])
        kind = http.client.HTTPSConnection if place.scheme == "https" else http.client.HTTPConnection
        self._connection = kind(place.hostname or "", place.port, timeout=TIMEOUT_S)
        self._answer: http.client.HTTPResponse | None = None
        self._is_stream = bool(prompt["stream"])
        headers = {"content-type": "application/json", "x-weft-token": worker["token"] or ""}
        try:
            self._connection.request("POST", place.path.rstrip("/") + "/generate", json.dumps(prompt), headers)
        except (OSError, http.client.HTTPException):
            self.close()
            raise _broken() from None

    def close(self) -> None:
        """Hangs up; a worker that still writes the answer then stops."""
        if self._answer is not None:
            # It holds the socket, whatever becomes of the connection.
            self._answer.close()
        self._connection.close()

    def pieces(self) -> Iterator[AnswerPiece]:
        """Yields the answer piece by piece; without streaming it is one piece."""
        try:
            answer = self._response()
            if not self._is_stream:
                yield _piece(json.loads(answer.read()))
                return
            while line := answer.readline():
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


def ask_all(worker: DbRow, prompts: Sequence[dict[str, Any]]) -> list[PendingAnswer]:
    """Sends all prompts to a worker before the first answer is read; it answers them together."""
    asked: list[PendingAnswer] = []
    try:
        for prompt in prompts:
            asked.append(PendingAnswer(worker, prompt))
    except ApiError:
        for answer in asked:
            answer.close()
        raise
    return asked


def _refused(status: int, body: bytes, retry_after: str | None) -> ApiError:
    """Passes a worker's 400 about the prompt to the user; any other answer means that it cannot answer now."""
    try:
        error = json.loads(body)["error"]
        message, param = str(error["message"]), error.get("param")
    except (ValueError, LookupError, TypeError, AttributeError):
        message, param = "", None
    if status == 400 and message:
        return invalid(message, param, "invalid_prompt")
    wait_s = int(retry_after) if retry_after and retry_after.isdecimal() else NO_WORKER_RETRY_S
    return unavailable("The worker cannot answer at the moment.", "worker_unavailable", wait_s)


def _broken() -> ApiError:
    return unavailable("The worker went away before the answer was complete.", "worker_lost", NO_WORKER_RETRY_S)


def _piece(value: Any) -> AnswerPiece:
    if not isinstance(value, dict) or "error" in value:
        raise ValueError("not an answer")
    counts = {name: int(value.get(name) or 0) for name in ("prompt_tokens", "completion_tokens")}
    return AnswerPiece(
        str(value.get("text", "")), bool(value.get("done", True)), **counts, finish_reason=value.get("finish_reason")
    )
