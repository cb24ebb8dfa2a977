"""/v1/chat/completions and /v1/completions: prompts for trained models, answered while others are trained."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.types import Receive, Scope, Send

from weft.data.chats import ROLES
from weft.serve.api.auth import Caller, ChatUser
from weft.serve.api.bodies.json_body import body_of, documented
from weft.serve.api.bodies.requests import CreateChat, CreateCompletion, Message
from weft.serve.api.errors import ApiError, invalid
from weft.serve.api.model_lookup import resolve_model
from weft.serve.api.responses import event_stream
from weft.serve.api.service import ApiService, service_of
from weft.serve.api.worker_client import AnswerPiece, PendingAnswer, ask_all, choose_worker
from weft.serve.records.rows import new_id
from weft.serve.records.usage import add_usage
from weft.serve.records.workers import live_workers

router = APIRouter(prefix="/v1", tags=["Chat"])
DEFAULT_MAX_TOKENS = 256


@dataclass(frozen=True)
class _CompletionKind:
    """How the answers of the two routes differ."""

    prefix: str
    object: str
    chunk_object: str
    choice: Callable[[int, str, str | None, bool], dict[str, Any]]
    """Makes one choice: its index, its text, why it ended, and whether it is a piece of a stream."""


def _chat_choice(index: int, text: str, reason: str | None, is_chunk: bool) -> dict[str, Any]:
    said = {"delta": {"content": text} if text else {}} if is_chunk else {"message": _message(text)}
    return {"index": index, **said, "logprobs": None, "finish_reason": reason}


def _text_choice(index: int, text: str, reason: str | None, is_chunk: bool) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}


CHAT = _CompletionKind("chatcmpl-", "chat.completion", "chat.completion.chunk", _chat_choice)
TEXT = _CompletionKind("cmpl-", "text_completion", "text_completion", _text_choice)


@router.post("/chat/completions", openapi_extra=documented(CreateChat), response_model=None)
async def chat(request: Request, user: ChatUser, body: Annotated[CreateChat, Depends(body_of(CreateChat))]) -> Response:
    """Answers a chat with a backbone, a fine-tuned model or a checkpoint."""
    prompt = _prompt_of(request, body, body.max_completion_tokens or body.max_tokens)
    # As in training files, `developer` is the newer name of the system prompt.
    prompt["messages"] = [_turn(message, place) for place, message in enumerate(body.messages)]
    return await _answer(request, user, body, [prompt], CHAT)


@router.post("/completions", openapi_extra=documented(CreateCompletion), response_model=None)
async def complete(
    request: Request, user: ChatUser, body: Annotated[CreateCompletion, Depends(body_of(CreateCompletion))]
) -> Response:
    """Goes on with a text, given as text or as the ids of its tokens, or with each of a list of them."""
    given = body.prompt
    is_one = isinstance(given, str) or isinstance(given[0], int)
    texts: list[Any] = [given] if is_one else list(given)
    prompts = [{**_prompt_of(request, body, body.max_tokens), "prompt": text} for text in texts]
    return await _answer(request, user, body, prompts, TEXT)


def _turn(message: Message, index: int) -> dict[str, Any]:
    """A message as the worker takes it; what a tool was asked may stand in place of a text."""
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
    }


async def _answer(
    request: Request,
    user: Caller,
    body: CreateChat | CreateCompletion,
    prompts: list[dict[str, Any]],
    kind: _CompletionKind,
) -> Response:
    service = service_of(request)
    asked = await run_in_threadpool(_ask, service, user.tenant, body.model, prompts)
    reply = _CompletionReply(service, user, body.model, kind, asked)
    if not body.stream:
        return JSONResponse(await run_in_threadpool(reply.whole))
    # The first piece is awaited before the answer begins, so that an error until then is still a proper error.
    await run_in_threadpool(reply.begin)
    with_usage = bool(body.stream_options and body.stream_options.include_usage)
    return _ReplyStream(reply, with_usage)


def _ask(service: ApiService, tenant: str, model: str, prompts: list[dict[str, Any]]) -> list[PendingAnswer]:
    """Sends the prompts to a worker that holds the model's backbone."""
    with service.database.read() as tx:
        found = resolve_model(tx, service, tenant, model)
        worker = choose_worker(live_workers(tx, found.base), found.base, found.blob)
    return ask_all(worker, [{**prompt, "base": found.base, "model_blob": found.blob} for prompt in prompts])


class _CompletionReply:
    """The answers to a request's prompts as OpenAI's objects; their tokens are counted once."""

    def __init__(
        self, service: ApiService, user: Caller, model: str, kind: _CompletionKind, asked: list[PendingAnswer]
    ) -> None:
        self._service, self._user, self._kind, self._asked = service, user, kind, asked
        self._answers = [answer.pieces() for answer in asked]
        self._first: AnswerPiece | None = None
        self._same = {"id": new_id(kind.prefix), "created": int(time.time()), "model": model}

    def whole(self) -> dict[str, Any]:
        """Waits for all answers."""
        try:
            pieces = [next(answer) for answer in self._answers]
        finally:
            self.close()
        choices = [
            self._kind.choice(place, piece.text, piece.finish_reason or "stop", False)
            for place, piece in enumerate(pieces)
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
        if self._kind is CHAT:
            opening = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            yield self._chunk([opening])
        last: list[AnswerPiece] = []
        try:
            for place, answer in enumerate(self._answers):
                piece = self._first if place == 0 and self._first is not None else next(answer)
                while True:
                    if piece.text:
                        yield self._chunk([self._kind.choice(place, piece.text, None, True)])
                    if piece.done:
                        break
                    piece = next(answer)
                yield self._chunk([self._kind.choice(place, "", piece.finish_reason or "stop", True)])
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
        """Hangs up on the worker, which stops if it still writes."""
        for answer in self._asked:
            answer.close()

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return event_stream(json.dumps({"object": self._kind.chunk_object, **self._same, "choices": choices, **more}))

    def _count(self, pieces: list[AnswerPiece]) -> dict[str, int]:
        asked, said = sum(piece.prompt_tokens for piece in pieces), sum(piece.completion_tokens for piece in pieces)
        with self._service.database.begin() as tx:
            for name, tokens in (("prompt", asked), ("completion", said)):
                add_usage(
                    tx,
                    self._user.tenant,
                    self._user.request,
                    kind=name,
                    tokens=tokens,
                    model=str(self._same["model"]),
                )
        return {"prompt_tokens": asked, "completion_tokens": said, "total_tokens": asked + said}


class _ReplyStream(StreamingResponse):
    """Streams a reply, and hangs up on its worker however the stream ends.

    A reader that goes away leaves the chunks half read: only here is that known, and no background task would run.
    """

    def __init__(self, reply: _CompletionReply, with_usage: bool) -> None:
        chunks = reply.stream(with_usage)
        super().__init__(chunks, media_type="text/event-stream", headers={"cache-control": "no-store"})
        self._reply = reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._reply.close()


def _message(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text, "refusal": None}
