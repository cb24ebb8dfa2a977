"""A worker's own small HTTP server, through which the API sends it prompts; every request needs its token.

    GET  /alive      answers 204 as long as the process runs
    POST /generate   {model_blob, messages | prompt, max_tokens, temperature, top_p, …, stop, logprobs, echo, stream}
                     as in `PromptBody`; header X-Weft-Token
    POST /check      {model_blob}: reads an adapter and answers 204 if it can be used
    answers          {"text", "done", "finish_reason", "logprobs", "prompt_tokens", "completion_tokens"}, one object;
                     with `stream` a text/event-stream of them, each with the text and log-probabilities since the last
    logprobs         [{"token", "logprob", "top": [[token, logprob], …], "offset"}, …], with characters before the token
    errors           {"error": {"message", "code", "param"}} with 400, 401, 404, 500 or 503

The server's threads turn tokens into text and look for stop sequences, so that the thread that trains need not. A
prompt that is too long is refused by its characters before it is tokenised. Long prompts are tokenised one after
another, apart from short ones, so that they hold up only each other.
"""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import queue
import secrets
import socket
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import anyio.to_thread
import uvicorn
from fastapi import Depends, FastAPI, Header, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.concurrency import run_in_threadpool

from weft.engine.inference.adapter_slots import SlotAdapter
from weft.engine.inference.answer_text import AnswerText, TokenTexts, before_stop, safe_length
from weft.engine.inference.grammar import Constraint, Grammars
from weft.engine.inference.sampling import TokenLogprobs
from weft.errors import AdapterFileError, DataError, StorageError, WeftError
from weft.serve.blobs import Blobs
from weft.serve.db.adapters import job_of
from weft.serve.errors import Busy, Damaged, NotFound
from weft.serve.settings import WorkerOptions
from weft.serve.worker.prompt_inputs import AdapterCache, CheckBody, PromptBody, PromptClient, Tokenizers, tokens_of
from weft.serve.worker.prompt_scheduler import AnswerEnd, PromptRequest, PromptScheduler, RunningJob, ScoredPrompt
from weft.spec.sampling import MOST_NEW_TOKENS

LOG = logging.getLogger("weft.serve.worker")
SILENCE_S = 300.0
"""How long a token may take before an answer is given up."""
NUM_THREADS = 300
"""How many prompts are worked on at once; most of their time they wait for tokens."""


class PromptServer:
    def __init__(self, scheduler: PromptScheduler, blobs: Blobs, directory: Path, options: WorkerOptions) -> None:
        self._scheduler = scheduler
        self._adapters = AdapterCache(blobs, directory, scheduler.prepare)
        self._max_positions = scheduler.max_positions
        self._tokenizers = Tokenizers(scheduler.tokenizer)
        self._grammars: Grammars | None = None
        self._compiling = threading.Lock()
        """Held while a schema is compiled, so that this takes one core at most."""
        self.token = secrets.token_hex(32)
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
        return list(self._adapters.names)

    def start(self) -> None:
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

        @app.get("/alive")
        async def alive() -> Response:
            return Response(status_code=204)

        @app.exception_handler(WeftError)
        def refused(_: Request, error: WeftError) -> Response:
            return _refused(error)

        def check_token(x_weft_token: str = Header("")) -> None:
            if not secrets.compare_digest(x_weft_token.encode(), self.token.encode()):
                raise HTTPException(401)

        @app.post("/check", dependencies=[Depends(check_token)])
        def check(body: CheckBody) -> Response:
            self._adapters.get(body.model_blob)
            return Response(status_code=204)

        @app.post("/generate", dependencies=[Depends(check_token)])
        async def generate(request: Request, body: PromptBody) -> Response:
            anyio.to_thread.current_default_thread_limiter().total_tokens = NUM_THREADS
            client = PromptClient()
            watch = asyncio.create_task(client.watch(request))
            pieces = self._answer(body, client)
            try:
                if body.stream:
                    # The first piece decides whether it is an answer or an error.
                    first = await run_in_threadpool(next, pieces)
                    return StreamingResponse(_stream(first, pieces), media_type="text/event-stream")
                parts = await run_in_threadpool(list, pieces)
                text = "".join(part["text"] for part in parts)
                logprobs = [record for part in parts for record in part["logprobs"]]
                return JSONResponse({**parts[-1], "text": text, "logprobs": logprobs})
            finally:
                watch.cancel()

        return app

    def _answer(self, body: PromptBody, client: PromptClient) -> Iterator[dict[str, Any]]:
        """Yields the answer piece by piece; closing the iterator ends the answer."""
        num_chars = self._check_chars(body)
        adapter: SlotAdapter | RunningJob | None = None
        if body.model_blob is not None:
            job = job_of(body.model_blob)
            adapter = self._adapters.get(body.model_blob) if job is None else RunningJob(job)
        with self._tokenizers.for_prompt(num_chars, client) as tokenizer:
            tokens = tokens_of(body, tokenizer, adapter, self._scheduler.vocabulary)
        room = self._max_positions - len(tokens)
        if room < 1:
            raise DataError(
                f"the prompt has {len(tokens):,} tokens; the model has {self._max_positions:,} positions, the answer "
                "included.",
                where="messages" if body.messages is not None else "prompt",
            )
        decoding = body.decoding(min(body.max_tokens, room, MOST_NEW_TOKENS), self._scheduler.vocabulary)
        request = PromptRequest(tokens, adapter, decoding, self._constraint(body))
        client.request = request
        client.check()
        self._scheduler.submit(request)
        try:
            yield from self._pieces(request, body.stop, body.echo)
        finally:
            request.is_cancelled = True

    def _constraint(self, body: PromptBody) -> Constraint | None:
        if body.json_schema is None:
            return None
        with self._compiling:
            if self._grammars is None:
                scheduler = self._scheduler
                self._grammars = Grammars(copy.deepcopy(scheduler.tokenizer), scheduler.vocabulary, scheduler.ends)
            return self._grammars.constraint(body.json_schema, is_strict=body.is_strict)

    def _pieces(self, request: PromptRequest, stops: list[str], echo: bool) -> Iterator[dict[str, Any]]:
        answer, text = AnswerText(self._tokenizers.text), ""
        prompt = self._tokenizers.text(request.tokens) if echo else ""
        records = TokenRecords(TokenTexts(self._tokenizers.spelling))
        sent = 0
        reason: str | None = None
        while reason is None:
            got = _next(request)
            is_cut = False
            if isinstance(got, ScoredPrompt):
                records.add_prompt(request.tokens, got.logprobs, len(prompt))
                continue
            if isinstance(got, AnswerEnd):
                reason, text = got.reason, answer.whole()
            else:
                if isinstance(got, TokenLogprobs):
                    records.add(got, len(prompt) + len(text))
                text = answer.add(got.token if isinstance(got, TokenLogprobs) else got)
            if (before := before_stop(text, stops)) is not None:
                text, reason, is_cut = before, "stop", True
            end = len(prompt) + (len(text) if reason is not None else safe_length(text, stops))
            if end > sent or reason is not None:
                yield {
                    "text": (prompt + text)[sent:end],
                    "done": reason is not None,
                    "finish_reason": reason,
                    "logprobs": records.take(None if reason is not None and not is_cut else end),
                    "prompt_tokens": len(request.tokens),
                    "completion_tokens": len(answer.tokens),
                }
                sent = max(sent, end)

    def _check_chars(self, body: PromptBody) -> int:
        """Returns the characters of the prompt; raises DataError if they are more than the model's positions hold."""
        if isinstance(body.prompt, list):
            return 0
        num_chars = len(body.prompt or "") + sum(len(message.content) for message in body.messages or ())
        most = self._max_positions * self._tokenizers.longest
        if num_chars > most:
            raise DataError(
                f"the prompt has {num_chars:,} characters; the model has {self._max_positions:,} positions, which hold "
                f"at most {most:,}.",
                where="messages" if body.messages is not None else "prompt",
            )
        return num_chars


class TokenRecords:
    """Log-probabilities of an answer's tokens as JSON, each from the text in which its token begins."""

    LEAST = -9999.0
    """Stands for the logarithm of 0, which JSON does not have."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._waiting: deque[dict[str, Any]] = deque()

    def add(self, logprobs: TokenLogprobs, offset: int) -> None:
        top = [[self._texts[token], max(value, self.LEAST)] for token, value in logprobs.top]
        value = max(logprobs.logprob, self.LEAST)
        self._waiting.append({"token": self._texts[logprobs.token], "logprob": value, "top": top, "offset": offset})

    def add_prompt(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs | None], num_chars: int) -> None:
        """Adds the tokens of a prompt of `num_chars` characters. Special tokens may have a text that is not among
        these."""
        offset = 0
        for token, own in zip(tokens, logprobs, strict=True):
            text = self._texts[token]
            if own is None:
                self._waiting.append({"token": text, "logprob": None, "top": [], "offset": offset})
            else:
                self.add(own, offset)
            offset = min(offset + len(text), num_chars)

    def take(self, end: int | None) -> list[dict[str, Any]]:
        """Those that begin before `end`; None takes all."""
        taken = []
        while self._waiting and (end is None or self._waiting[0]["offset"] < end):
            taken.append(self._waiting.popleft())
        return taken


def _next(request: PromptRequest) -> int | TokenLogprobs | ScoredPrompt | AnswerEnd:
    try:
        got = request.answer.get(timeout=SILENCE_S)
    except queue.Empty:
        raise Busy("the worker does not get to the prompt; try again.") from None
    if isinstance(got, WeftError):
        raise got
    if isinstance(got, Exception):
        raise Busy("the prompt could not be answered.") from got
    return got


def _stream(first: dict[str, Any], rest: Iterator[dict[str, Any]]) -> Iterator[str]:
    yield f"data: {json.dumps(first)}\n\n"
    try:
        for piece in rest:
            yield f"data: {json.dumps(piece)}\n\n"
    except WeftError as error:
        yield f"data: {json.dumps({'error': {'message': str(error), 'code': error.code, 'param': None}})}\n\n"


def _refused(error: WeftError) -> Response:
    status = {Busy: 503, StorageError: 503, NotFound: 404, Damaged: 500}.get(type(error), 400)
    if isinstance(error, AdapterFileError | StorageError | Damaged):
        # It may name a path of the server.
        LOG.error("a request could not be answered: %s", error)
        return _error(status, error.message, error.code, None)
    return _error(status, str(error), error.code, error.where)


def _error(status: int, message: str, code: str, param: str | None) -> Response:
    headers = {"Retry-After": "1"} if status == 503 else {}
    return JSONResponse({"error": {"message": message, "code": code, "param": param}}, status, headers)
