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

from weft.data.chats import ROLES
from weft.serve.api.auth import Caller, ChatUser
from weft.serve.api.bodies.json_body import body_of, documented
from weft.serve.api.bodies.requests import CreateChat, CreateCompletion, Message
from weft.serve.api.errors import ApiError, invalid
from weft.serve.api.model_lookup import resolve_model
from weft.serve.api.responses import event_stream
from weft.serve.api.service import ApiService, service_of
from weft.serve.api.worker_client import AnswerPiece, choose_worker, generate
from weft.serve.records.rows import DbRow, new_id
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
    choice: Callable[[str, str | None, bool], dict[str, Any]]


def _chat_choice(text: str, reason: str | None, is_chunk: bool) -> dict[str, Any]:
    said = {"delta": {"content": text} if text else {}} if is_chunk else {"message": _message(text)}
    return {"index": 0, **said, "logprobs": None, "finish_reason": reason}


def _text_choice(text: str, reason: str | None, is_chunk: bool) -> dict[str, Any]:
    return {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}


CHAT = _CompletionKind("chatcmpl-", "chat.completion", "chat.completion.chunk", _chat_choice)
TEXT = _CompletionKind("cmpl-", "text_completion", "text_completion", _text_choice)


@router.post("/chat/completions", openapi_extra=documented(CreateChat), response_model=None)
async def chat(request: Request, user: ChatUser, body: Annotated[CreateChat, Depends(body_of(CreateChat))]) -> Response:
    """Answers a chat with a backbone, a fine-tuned model or a checkpoint."""
    prompt = _prompt_of(request, body, body.max_completion_tokens or body.max_tokens)
    # As in training files, `developer` is the newer name of the system prompt.
    prompt["messages"] = [{"role": ROLES[m.role], "content": _text(m, i)} for i, m in enumerate(body.messages)]
    return await _answer(request, user, body, prompt, CHAT)


@router.post("/completions", openapi_extra=documented(CreateCompletion), response_model=None)
async def complete(
    request: Request, user: ChatUser, body: Annotated[CreateCompletion, Depends(body_of(CreateCompletion))]
) -> Response:
    """Goes on with a text."""
    prompt = _prompt_of(request, body, body.max_tokens)
    prompt["prompt"] = body.prompt
    return await _answer(request, user, body, prompt, TEXT)


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
    request: Request, user: Caller, body: CreateChat | CreateCompletion, prompt: dict[str, Any], kind: _CompletionKind
) -> Response:
    service = service_of(request)
    worker = await run_in_threadpool(_choose_worker, service, user.tenant, body.model, prompt)
    reply = _CompletionReply(service, user, body.model, kind)
    pieces = generate(worker, prompt)
    # The first piece is awaited before the answer begins, so that an error until then is still a proper error.
    first = await run_in_threadpool(next, pieces)
    if not prompt["stream"]:
        return JSONResponse(await run_in_threadpool(reply.whole, first))
    with_usage = bool(body.stream_options and body.stream_options.include_usage)
    chunks = reply.stream(first, pieces, with_usage)
    return StreamingResponse(chunks, media_type="text/event-stream", headers={"cache-control": "no-store"})


def _choose_worker(service: ApiService, tenant: str, model: str, prompt: dict[str, Any]) -> DbRow:
    with service.database.read() as tx:
        found = resolve_model(tx, service, tenant, model)
        worker = choose_worker(live_workers(tx, found.base), found.base)
    prompt |= {"base": found.base, "model_blob": found.blob}
    return worker


class _CompletionReply:
    """One answer as OpenAI's objects; its tokens are counted once."""

    def __init__(self, service: ApiService, user: Caller, model: str, kind: _CompletionKind) -> None:
        self._service, self._user, self._kind = service, user, kind
        self._same = {"id": new_id(kind.prefix), "created": int(time.time()), "model": model}

    def whole(self, piece: AnswerPiece) -> dict[str, Any]:
        usage = self._count(piece)
        choice = self._kind.choice(piece.text, piece.finish_reason or "stop", False)
        return {"object": self._kind.object, **self._same, "choices": [choice], "usage": usage}

    def stream(self, first: AnswerPiece, rest: Iterator[AnswerPiece], with_usage: bool) -> Iterator[bytes]:
        """Yields chunks until the answer is complete; an answer that breaks off ends with an error and no [DONE]."""
        if self._kind is CHAT:
            opening = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            yield self._chunk([opening])
        piece = first
        try:
            while True:
                if piece.text:
                    yield self._chunk([self._kind.choice(piece.text, None, True)])
                if piece.done:
                    break
                piece = next(rest)
        except ApiError as error:
            yield event_stream(json.dumps(error.body))
            return
        finally:
            rest.close()  # type: ignore[attr-defined]
        yield self._chunk([self._kind.choice("", piece.finish_reason or "stop", True)])
        usage = self._count(piece)
        if with_usage:
            yield self._chunk([], usage=usage)
        yield event_stream("[DONE]")

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return event_stream(json.dumps({"object": self._kind.chunk_object, **self._same, "choices": choices, **more}))

    def _count(self, piece: AnswerPiece) -> dict[str, int]:
        asked, said = piece.prompt_tokens, piece.completion_tokens
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


def _message(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text, "refusal": None}
