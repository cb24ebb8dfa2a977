"""/v1/chat/completions and /v1/completions: prompts for trained models, answered while others are trained.

A prompt goes to the worker that holds the backbone: one POST to the address in its row, with its token.
`POST {address}/generate` takes {model_blob, base, messages or prompt (a text or token ids), max_tokens, temperature, …,
stream} and answers {"text", "done", "logprobs", "prompt_tokens", "completion_tokens"} as JSON, or as a stream of such
events. Each of several answers to a prompt is a request of its own to the worker.

A worker may be silent for long, because it trains or others' prompts come first; one that is frozen or gone does not
answer `GET {address}/alive` either, and one whose training hangs has that in its row. As long as nothing has been sent
to the client, such a prompt goes to another worker. A client that hangs up ends its prompts at the worker.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from weft import __version__
from weft.data.chats import ROLES
from weft.serve.api.errors import ApiError, invalid
from weft.serve.api.pending_answers import (
    WORKER_BUSY,
    WORKER_LOST,
    AnswerPiece,
    PendingAnswer,
    choose_worker,
    is_alive,
    send_all,
)
from weft.serve.api.requests import (
    DEFAULT_MAX_TOKENS,
    MAX_ANSWERS,
    CreateChat,
    CreateCompletion,
    Message,
    ResponseFormat,
    body_of,
    documented,
)
from weft.serve.api.responses import WATCH_S, EventStream, event_stream, watched
from weft.serve.api.sampler import answer_by_sampler
from weft.serve.api.service import ApiService, Caller, ChatUser, ResolvedModel, resolve_prompted, service_of
from weft.serve.db.engine import DbRow, new_id
from weft.serve.db.usage import add_answer
from weft.serve.db.workers import find_worker, is_hung, live_workers
from weft.serve.errors import Busy

_PASSED_ON = (
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "stop_token_ids",
)
"""Fields that the worker takes as they are."""
chat_router = APIRouter(prefix="/v1", tags=["Chat"])
SILENT_S = 2.0
"""After so long without a word from a worker the API looks whether it is alive."""
AVOID_S = 10.0
"""How long a worker that did not answer gets no prompts if there are others."""


@dataclass(frozen=True)
class _CompletionKind:
    """How the answers of the two routes differ."""

    path: str
    prefix: str
    object: str
    chunk_object: str
    choice: Callable[[int, AnswerPiece, str | None, bool], dict[str, Any]]
    """Makes one choice: its index, its text, why it ended, and whether it is a piece of a stream."""
    logprobs: Callable[[Sequence[dict[str, Any]]], dict[str, Any]]


def _chat_choice(index: int, piece: AnswerPiece, reason: str | None, is_chunk: bool) -> dict[str, Any]:
    if is_chunk:
        content: dict[str, Any] = {"delta": {"content": piece.text} if piece.text or piece.logprobs else {}}
    else:
        content = {"message": {"role": "assistant", "content": piece.text, "refusal": None}}
    return {"index": index, **content, "logprobs": None, "finish_reason": reason}


def _text_choice(index: int, piece: AnswerPiece, reason: str | None, is_chunk: bool) -> dict[str, Any]:
    return {"index": index, "text": piece.text, "logprobs": None, "finish_reason": reason}


def _chat_logprobs(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    def token(text: str, logprob: float) -> dict[str, Any]:
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    content = [
        {**token(each["token"], each["logprob"]), "top_logprobs": [token(*top) for top in each["top"]]}
        for each in records
    ]
    return {"content": content, "refusal": None}


def _text_logprobs(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    tops = [
        # The token itself is there too, whether or not it is one of the likeliest.
        None if each["logprob"] is None else {**dict(each["top"]), each["token"]: each["logprob"]}
        for each in records
    ]
    columns = {"tokens": "token", "token_logprobs": "logprob", "text_offset": "offset"}
    return {name: [each[key] for each in records] for name, key in columns.items()} | {"top_logprobs": tops}


CHAT = _CompletionKind(
    "/v1/chat/completions", "chatcmpl-", "chat.completion", "chat.completion.chunk", _chat_choice, _chat_logprobs
)
TEXT = _CompletionKind("/v1/completions", "cmpl-", "text_completion", "text_completion", _text_choice, _text_logprobs)


@chat_router.post("/chat/completions", openapi_extra=documented(CreateChat), response_model=None)
async def chat(request: Request, user: ChatUser, body: Annotated[CreateChat, Depends(body_of(CreateChat))]) -> Response:
    """Answers a chat with a backbone, a fine-tuned model or a checkpoint."""
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("Invalid value for 'top_logprobs': needs 'logprobs' to be true.", "top_logprobs", "invalid_value")
    prompt = _prompt_of(request, body, body.max_completion_tokens or body.max_tokens)
    prompt |= _schema_of(body.response_format)
    prompt["logprobs"] = (body.top_logprobs or 0) if body.logprobs else None
    # As in training files, `developer` is the newer name of the system prompt.
    prompt["messages"] = [_turn(message, index) for index, message in enumerate(body.messages)]
    return await _answer(request, user, body, [prompt], CHAT)


@chat_router.post("/completions", openapi_extra=documented(CreateCompletion), response_model=None)
async def complete(
    request: Request, user: ChatUser, body: Annotated[CreateCompletion, Depends(body_of(CreateCompletion))]
) -> Response:
    """Goes on with a text, given as text or as the ids of its tokens, or with each of a list of them."""
    given = body.prompt
    is_one = isinstance(given, str) or isinstance(given[0], int)
    texts: list[Any] = [given] if is_one else list(given)
    num_answers = len(texts) * (body.n or 1)
    if num_answers > MAX_ANSWERS:
        message = f"{len(texts)} prompts with {body.n} answers each are {num_answers}; use at most {MAX_ANSWERS}."
        raise invalid(f"Invalid value for 'n': {message}", "n", "invalid_value")
    options = {**_prompt_of(request, body, body.max_tokens), "logprobs": body.logprobs, "echo": bool(body.echo)}
    prompts = [{**options, "prompt": text} for text in texts]
    return await _answer(request, user, body, prompts, TEXT)


def _schema_of(wanted: ResponseFormat | None) -> dict[str, Any]:
    if wanted is None or wanted.type == "text":
        return {}
    if wanted.type == "json_object":
        return {"json_schema": {"type": "object"}}
    if wanted.json_schema is None:
        param = "response_format.json_schema"
        raise invalid(f"Missing required parameter: '{param}'.", param, "missing_required_parameter")
    return {"json_schema": wanted.json_schema.schema_, "is_strict": bool(wanted.json_schema.strict)}


def _turn(message: Message, index: int) -> dict[str, Any]:
    """A message as the worker takes it; tool calls may replace the text."""
    tools = message.model_dump(include={"name", "tool_calls", "tool_call_id"}, exclude_none=True)
    text = "" if message.content is None and message.tool_calls else _text(message, index)
    return {"role": ROLES[message.role], "content": text, **tools}


def _text(message: Message, index: int) -> str:
    if message.content is None:
        param = f"messages.{index}.content"
        raise invalid(f"Missing required parameter: '{param}'.", param, "missing_required_parameter")
    return message.content if isinstance(message.content, str) else "".join(p.text for p in message.content)


def _prompt_of(request: Request, body: CreateChat | CreateCompletion, max_tokens: int | None) -> dict[str, Any]:
    most = service_of(request).settings.limits.max_tokens
    if max_tokens is not None and max_tokens > most:
        param = "max_tokens" if body.max_tokens == max_tokens else "max_completion_tokens"
        raise invalid(f"Invalid value for '{param}': got {max_tokens}; use at most {most:,}.", param, "invalid_value")
    stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
    return {
        "max_tokens": min(most, DEFAULT_MAX_TOKENS) if max_tokens is None else max_tokens,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "seed": secrets.randbits(32) if body.seed is None else body.seed % 2**32,
        "stop": [text for text in stop if text],
        "stream": bool(body.stream),
        "top_k": max(body.top_k or 0, 0),
        **{name: value for name in _PASSED_ON if (value := getattr(body, name)) is not None},
    }


def _seeds(seed: int, number: int) -> list[int]:
    """Seeds of the answers to a prompt; the first is that of a single answer."""
    return [(seed + index * 0x9E3779B1) % 2**32 for index in range(number)]


async def _answer(
    request: Request,
    user: Caller,
    body: CreateChat | CreateCompletion,
    prompts: list[dict[str, Any]],
    kind: _CompletionKind,
) -> Response:
    service, n = service_of(request), body.n or 1
    if service.sampler is not None:
        return await answer_by_sampler(service.sampler, request, user, body, kind.path)
    tried: dict[str, ApiError] = {}
    while True:
        found, worker = await run_in_threadpool(_find_worker, service, user.tenant, body.model, tried)
        try:
            model = {"base": found.base, "model_blob": found.blob}
            sent = [{**prompt, **model, "seed": seed} for prompt in prompts for seed in _seeds(prompt["seed"], n)]
            pending = await run_in_threadpool(send_all, worker, sent)
            reply = _CompletionReply(service, user, body, kind, pending, _fingerprint(found))
            async with watched(partial(_watch, service, reply, worker, request)):
                if not body.stream:
                    return JSONResponse(await run_in_threadpool(reply.whole))
                # Until the first piece an error is still a proper error.
                await run_in_threadpool(reply.begin)
            with_usage = bool(body.stream_options and body.stream_options.include_usage)
            watch = partial(_watch, service, reply, worker)
            return EventStream(reply.stream(with_usage), reply.close, watched(watch))
        except ApiError as error:
            if await request.is_disconnected():
                raise ClientDisconnect from None
            if error.code not in (WORKER_LOST, WORKER_BUSY):
                raise
            tried[worker["id"]] = error
            if error.code == WORKER_LOST:
                service.silent_workers[worker["id"]] = time.monotonic()


def _fingerprint(model: ResolvedModel) -> str:
    """Changes with the backbone, the adapter and the version of Weft, on which an answer with a seed depends."""
    text = json.dumps([__version__, model.base, model.blob])
    return f"fp_{hashlib.sha256(text.encode()).hexdigest()[:10]}"


def _find_worker(
    service: ApiService, tenant: str, model: str, tried: Mapping[str, ApiError]
) -> tuple[ResolvedModel, DbRow]:
    """Resolves the model and chooses a worker that is not in `tried`; raises the last error if there is none."""
    after = time.monotonic() - AVOID_S
    silent = {id for id, at in list(service.silent_workers.items()) if at > after}
    with service.database.read() as tx:
        found = resolve_prompted(tx, service, tenant, model)
        workers = [worker for worker in live_workers(tx, found.base) if worker["id"] not in tried]
    if found.worker is not None:
        workers = [worker for worker in workers if worker["id"] == found.worker]
    if tried and not workers:
        raise list(tried.values())[-1]
    answering = [worker for worker in workers if worker["id"] not in silent]
    return found, choose_worker(answering or workers, found.base, found.blob)


def _may_answer(service: ApiService, worker: DbRow) -> bool:
    """Whether a silent worker lives and, as far as is known, does not hang."""
    if not is_alive(worker):
        return False
    try:
        with service.database.read() as tx:
            row = find_worker(tx, worker["id"])
    except Busy:
        return True
    return row is None or not is_hung(row)


class _CompletionReply:
    """The answers to a request's prompts as OpenAI's objects; their tokens are counted once."""

    def __init__(
        self,
        service: ApiService,
        user: Caller,
        body: CreateChat | CreateCompletion,
        kind: _CompletionKind,
        pending: list[PendingAnswer],
        fingerprint: str,
    ) -> None:
        self._service, self._user, self._kind, self._pending = service, user, kind, pending
        self._answers = [answer.pieces() for answer in pending]
        self._first: AnswerPiece | None = None
        self._num_each = body.n or 1
        # In chats true or false, in completions a number or null.
        self._has_logprobs = body.logprobs is not None and body.logprobs is not False
        self._same = {"id": new_id(kind.prefix), "created": int(time.time()), "model": body.model}
        self._same["system_fingerprint"] = fingerprint

    def whole(self) -> dict[str, Any]:
        """Waits for all answers."""
        try:
            pieces = [next(answer) for answer in self._answers]
        finally:
            self.close()
        choices = [
            self._choice(index, piece, piece.finish_reason or "stop", False) for index, piece in enumerate(pieces)
        ]
        return {"object": self._kind.object, **self._same, "choices": choices, "usage": self._count(pieces)}

    def begin(self) -> None:
        """Waits for the first piece."""
        try:
            self._first = next(self._answers[0])
        except BaseException:
            self.close()
            raise

    def stream(self, with_usage: bool) -> Iterator[bytes]:
        """Yields chunks until every answer is complete; one that breaks off ends with an error and no [DONE]."""
        last: list[AnswerPiece] = []
        # With usage every chunk has the field, and the last one has the figures.
        chunk = partial(self._chunk, usage=None) if with_usage else self._chunk
        opening = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        try:
            for index, answer in enumerate(self._answers):
                if self._kind is CHAT:
                    yield chunk([{"index": index, **opening}])
                piece = self._first if index == 0 and self._first is not None else next(answer)
                while True:
                    if piece.text or piece.logprobs:
                        yield chunk([self._choice(index, piece, None, True)])
                    if piece.done:
                        break
                    piece = next(answer)
                yield chunk([self._choice(index, AnswerPiece(""), piece.finish_reason or "stop", True)])
                last.append(piece)
        except ApiError as error:
            yield event_stream(json.dumps(error.body))
            return
        finally:
            self.close()
        usage = self._count(last)
        if with_usage:
            yield self._chunk([], usage=usage)
        yield event_stream("[DONE]")

    def close(self) -> None:
        for answer in self._pending:
            answer.close()

    def hang_up(self) -> None:
        """Ends the connections, also for a thread that waits for an answer."""
        for answer in self._pending:
            answer.hang_up()

    @property
    def silent_s(self) -> float:
        """How long the worker has sent nothing."""
        return time.monotonic() - max(answer.seen_at for answer in self._pending)

    def _choice(self, index: int, piece: AnswerPiece, reason: str | None, is_chunk: bool) -> dict[str, Any]:
        choice = self._kind.choice(index, piece, reason, is_chunk)
        if self._has_logprobs and (piece.logprobs or not is_chunk):
            choice["logprobs"] = self._kind.logprobs(piece.logprobs)
        return choice

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return event_stream(json.dumps({"object": self._kind.chunk_object, **self._same, "choices": choices, **more}))

    def _count(self, pieces: list[AnswerPiece]) -> dict[str, int]:
        # A prompt counts once, however many answers it has.
        prompt = sum(piece.prompt_tokens for piece in pieces[:: self._num_each])
        completion = sum(piece.completion_tokens for piece in pieces)
        with self._service.database.begin() as tx:
            names = (self._user.tenant, self._user.request)
            add_answer(tx, *names, model=str(self._same["model"]), prompt=prompt, completion=completion)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


async def _watch(service: ApiService, reply: _CompletionReply, worker: DbRow, request: Request | None = None) -> None:
    """Hangs up on a worker that does not live, or when the client has gone; without `request` the caller sees that."""
    alive_at = time.monotonic()
    while request is None or not await request.is_disconnected():
        await asyncio.sleep(WATCH_S)
        if min(reply.silent_s, time.monotonic() - alive_at) > SILENT_S:
            if not await run_in_threadpool(_may_answer, service, worker):
                break
            alive_at = time.monotonic()
    reply.hang_up()
