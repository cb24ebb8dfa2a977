"""A worker's own small HTTP server, through which the API sends it prompts; it asks for a token and uses loopback.

    POST /generate   {model_blob, messages | prompt, max_tokens, temperature, top_p, seed, stop, stream}
                     header X-Weft-Token
    answers          {"text", "done", "finish_reason", "prompt_tokens", "completion_tokens"}, one object;
                     with `stream` a text/event-stream of them, each with the text since the last
    errors           {"error": {"message", "code", "param"}} with 400, 401, 404 or 503

The server's threads turn tokens into text and look for stop sequences, so that the thread that trains need not.
"""

from __future__ import annotations

import copy
import json
import queue
import secrets
import shutil
import socket
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import uvicorn
from fastapi import FastAPI, Header, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, Field

from weft.data.chat.chat_template import Tokenizer
from weft.data.conversation import Rendered
from weft.data.prompts import prompt_of_chat
from weft.data.tokens.tokenise import tokenise_prompt
from weft.engine.inference.attach import StoredAdapter
from weft.engine.inference.generate import Decoding
from weft.errors import DataError, StorageError, WeftError
from weft.serve.archives import unpack
from weft.serve.blobs import Blobs
from weft.serve.errors import Busy, NotFound
from weft.serve.worker.options import WorkerOptions
from weft.serve.worker.prompts.prompt_scheduler import AnswerEnd, PromptRequest, PromptScheduler
from weft.store.atomic import storage_errors
from weft.store.peft_files import CONFIG_FILE, TEMPLATE_FILE, TENSORS_FILE, read_adapter, read_chat_template

KEPT = 32
"""How many adapters are kept in memory; the least recently used one goes first."""
ADAPTER_FILES = (CONFIG_FILE, TENSORS_FILE, TEMPLATE_FILE)


class AdapterCache:
    """Adapters by the names of their archives. Several threads may use it."""

    def __init__(self, blobs: Blobs, directory: Path) -> None:
        self._blobs = blobs
        self._directory = directory
        self._kept: OrderedDict[str, StoredAdapter] = OrderedDict()
        self._lock = threading.Lock()
        self.names: tuple[str, ...] = ()
        """The archives whose adapters are in memory; reading this never waits for one that is being fetched."""

    def get(self, blob: str) -> StoredAdapter:
        """Returns the adapter in an archive; raises NotFound without one, AdapterFileError if it is broken."""
        with self._lock:
            if blob not in self._kept:
                self._kept[blob] = self._read(blob)
                while len(self._kept) > KEPT:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(blob)
            self.names = tuple(self._kept)
            return self._kept[blob]

    def _read(self, blob: str) -> StoredAdapter:
        with storage_errors(self._directory):
            self._directory.mkdir(exist_ok=True)
            place = Path(tempfile.mkdtemp(dir=self._directory))
        try:
            archive = place / "archive"
            self._blobs.fetch(blob, archive)
            unpack(archive, place, ADAPTER_FILES)
            spec, tensors, config = read_adapter(place)
            base = config.get("base_model_name_or_path")
            return StoredAdapter(
                blob, place, spec, tensors, base if isinstance(base, str) else None, read_chat_template(place)
            )
        finally:
            shutil.rmtree(place, ignore_errors=True)


COLDEST = 0.001
"""The lowest temperature that is not taken as 0; logits divided by a lower one leave the range of float32."""
SILENCE_S = 300.0
"""How long a token may take before an answer is given up."""


TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class PromptMessage(BaseModel):
    """One turn of a chat."""

    role: str
    content: str
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class PromptBody(BaseModel):
    """The body of a request to a worker."""

    model_blob: str | None = None
    base: str | None = None
    messages: list[PromptMessage] | None = None
    prompt: str | list[TokenId] | None = None
    """A text, or the ids of its tokens."""
    max_tokens: int = Field(256, ge=1, lt=2**31)
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, gt=0, le=1)
    seed: int = Field(0, ge=0, lt=2**32)
    stop: list[str] = Field(default_factory=list, max_length=16)
    stream: bool = False


class PromptServer:
    """The server, which runs in a thread of the worker."""

    def __init__(self, scheduler: PromptScheduler, blobs: Blobs, directory: Path, options: WorkerOptions) -> None:
        self._scheduler = scheduler
        self._adapters = AdapterCache(blobs, directory)
        self._max_positions = scheduler.max_positions
        # Threads must not share a tokenizer.
        self._tokenizer = copy.deepcopy(scheduler.tokenizer)
        self._tokenizer_lock = threading.Lock()
        self.token = secrets.token_hex(32)
        """The secret that every request must bring."""
        self._socket = socket.create_server((options.host, 0))
        port = self._socket.getsockname()[1]
        self.address = f"http://{options.host}:{port}"
        config = uvicorn.Config(
            self._app(), log_level="warning", ws="none", lifespan="off", access_log=False, timeout_graceful_shutdown=5
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._socket]}, name="weft-prompts", daemon=True
        )

    @property
    def adapters(self) -> list[str]:
        """The archives whose adapters are loaded here."""
        return list(self._adapters.names)

    def start(self) -> None:
        """Starts to answer prompts."""
        self._thread.start()

    def close(self) -> None:
        """Stops the server; prompts without an answer get the error that the worker stops."""
        self._scheduler.close()
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join(10)
        self._socket.close()

    def _app(self) -> FastAPI:
        app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

        @app.exception_handler(RequestValidationError)
        def invalid(_: Request, error: RequestValidationError) -> Response:
            first = error.errors()[0]
            return _error(400, str(first["msg"]), "invalid_request", ".".join(map(str, first["loc"][1:])))

        @app.post("/generate")
        def generate(body: PromptBody, x_weft_token: str = Header("")) -> Response:
            if not secrets.compare_digest(x_weft_token.encode(), self.token.encode()):
                return _error(401, "the token is wrong.", "invalid_token", None)
            try:
                pieces = self._answer(body)
                if body.stream:
                    # The first piece decides whether it is an answer or an error.
                    return StreamingResponse(_stream(next(pieces), pieces), media_type="text/event-stream")
                return JSONResponse(_joined(list(pieces)))
            except WeftError as error:
                status = {Busy: 503, StorageError: 503, NotFound: 404}.get(type(error), 400)
                return _error(status, str(error), error.code, error.where)

        return app

    def _answer(self, body: PromptBody) -> Iterator[dict[str, Any]]:
        """Yields the answer piece by piece; closing the iterator ends the answer."""
        adapter = self._adapters.get(body.model_blob) if body.model_blob else None
        with self._tokenizer_lock:
            tokens = _tokens(body, self._tokenizer, adapter, self._scheduler.vocabulary)
        room = self._max_positions - len(tokens)
        if room < 1:
            raise DataError(
                f"the prompt has {len(tokens):,} tokens; the model has {self._max_positions:,} positions, the answer "
                "included.",
                where="messages" if body.messages is not None else "prompt",
            )
        temperature = 0.0 if body.temperature < COLDEST else body.temperature
        longest = min(body.max_tokens, room)
        request = PromptRequest(tokens, adapter, Decoding(longest, temperature, body.top_p, body.seed))
        self._scheduler.submit(request)
        try:
            yield from self._pieces(request, body.stop)
        finally:
            request.is_cancelled = True

    def _pieces(self, request: PromptRequest, stops: list[str]) -> Iterator[dict[str, Any]]:
        tokens: list[int] = []
        said = 0
        reason: str | None = None
        while reason is None:
            got = _next(request)
            if isinstance(got, AnswerEnd):
                reason = got.reason
            else:
                tokens.append(got)
            text = self._text(tokens)
            at = min((text.find(stop) for stop in stops if stop and stop in text), default=-1)
            if at >= 0:
                text, reason = text[:at], "stop"
            end = len(text) if reason is not None else _safe_length(text, stops)
            if end > said or reason is not None:
                yield {
                    "text": text[said:end],
                    "done": reason is not None,
                    "finish_reason": reason,
                    "prompt_tokens": len(request.tokens),
                    "completion_tokens": len(tokens),
                }
                said = max(said, end)

    def _text(self, tokens: list[int]) -> str:
        with self._tokenizer_lock:
            return str(self._tokenizer.decode(tokens, skip_special_tokens=True))


def _known(tokens: list[int], vocabulary: int) -> list[int]:
    if not tokens:
        raise DataError("is empty.", where="prompt")
    if max(tokens) >= vocabulary:
        raise DataError(f"has the token {max(tokens)}; the model knows 0 to {vocabulary - 1}.", where="prompt")
    return tokens


def _tokens(body: PromptBody, tokenizer: Tokenizer, adapter: StoredAdapter | None, vocabulary: int) -> list[int]:
    """Returns the tokens of the prompt: a chat goes through its template, a text is taken as it is."""
    template = adapter.chat_template if adapter else None
    if (body.messages is None) == (body.prompt is None):
        raise DataError("give messages or prompt, and not both.", where="messages")
    if body.messages is not None:
        if not body.messages:
            raise DataError("is empty.", where="messages")
        turns = [message.model_dump(exclude_none=True) for message in body.messages]
        return list(map(int, prompt_of_chat(turns, tokenizer, chat_template=template).tokens))
    if isinstance(body.prompt, list):
        return _known(body.prompt, vocabulary)
    tokens = tokenise_prompt(Rendered(body.prompt or "", (), True, "prompt"), tokenizer)
    if not len(tokens):
        raise DataError("is empty.", where="prompt")
    return list(map(int, tokens))


def _next(request: PromptRequest) -> int | AnswerEnd:
    try:
        got = request.answer.get(timeout=SILENCE_S)
    except queue.Empty:
        raise Busy("the worker does not get to the prompt; try again.") from None
    if isinstance(got, WeftError):
        raise got
    if isinstance(got, Exception):
        raise Busy("the prompt could not be answered.") from got
    return got


def _safe_length(text: str, stops: list[str]) -> int:
    """How much of a text may be sent: not an end that may begin a stop sequence or be part of a character."""
    end = len(text.rstrip("\N{REPLACEMENT CHARACTER}"))
    for stop in stops:
        for length in range(min(len(stop) - 1, end), 0, -1):
            if text[:end].endswith(stop[:length]):
                end -= length
                break
    return end


def _joined(pieces: list[dict[str, Any]]) -> dict[str, Any]:
    return {**pieces[-1], "text": "".join(piece["text"] for piece in pieces)}


def _stream(first: dict[str, Any], rest: Iterator[dict[str, Any]]) -> Iterator[str]:
    yield f"data: {json.dumps(first)}\n\n"
    try:
        for piece in rest:
            yield f"data: {json.dumps(piece)}\n\n"
    except WeftError as error:
        yield f"data: {json.dumps({'error': {'message': str(error), 'code': error.code, 'param': None}})}\n\n"


def _error(status: int, message: str, code: str, param: str | None) -> Response:
    headers = {"Retry-After": "1"} if status == 503 else {}
    return JSONResponse({"error": {"message": message, "code": code, "param": param}}, status, headers)
