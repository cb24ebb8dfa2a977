"""Prompts answered by a vLLM or SGLang server (`--sampler`), which gets adapters when they are first used.

    POST {sampler}/v1/load_lora_adapter {lora_name, lora_path}    (SGLang: /load_lora_adapter)
    POST {sampler}/v1/chat/completions, /v1/completions           as the client sent it, with the adapter's name there

Every version of an adapter has a name of its own there, so a changed one is loaded again. Archives are unpacked, and
adapters at URLs copied, below the data directory, which the sampler must see. The least recently used adapters are
unloaded.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from weft.data.chats import ROLES
from weft.serve.adapter_folders import CONFIG_FILE, TENSORS_FILE, fetch_adapter, is_url
from weft.serve.api.errors import ApiError, invalid, unavailable
from weft.serve.api.pending_answers import NO_ANSWER, SEND_S, SentRequest
from weft.serve.api.requests import DEFAULT_MAX_TOKENS, UNUSED, CreateChat, CreateCompletion
from weft.serve.api.responses import WATCH_S, EventStream, event_stream, watched
from weft.serve.api.service import ApiService, Caller, ResolvedModel, resolve_prompted, service_of
from weft.serve.blobs import Blobs, unpack
from weft.serve.db.adapters import folder_of, short_name
from weft.serve.db.usage import add_answer
from weft.store.atomic import TEMP_PREFIX, storage_errors

LOAD_S, ANSWER_S = 120.0, 300.0
"""How long loading an adapter and the next piece of an answer may take."""
MOST_LOADED = 256
"""Adapters that are loaded at the sampler; more make the least recently used one go."""
MOST_BYTES = 2**26
"""Most bytes of an answer, or of a piece of one."""
KEY_VARIABLE = "WEFT_SAMPLER_KEY"
RETRY_S = 5
Json = dict[str, Any]


class SamplerCall(SentRequest):
    """A request to the sampler."""

    def __init__(self, url: str, path: str, body: Json | None, timeout_s: float) -> None:
        key = os.environ.get(KEY_VARIABLE)
        try:
            super().__init__(url, path, body, {"authorization": f"Bearer {key}"} if key else {}, timeout_s)
        except NO_ANSWER:
            raise _silent() from None

    def status(self) -> int:
        """Waits for the begin of the answer."""
        try:
            return self.begun().status
        except NO_ANSWER:
            self.close()
            raise _silent() from None

    def end(self) -> None:
        self.hang_up()
        self.close()

    def read(self) -> Any:
        """The whole answer; None if it is not JSON."""
        assert self._answer is not None
        try:
            data = self._answer.read(MOST_BYTES)
        except NO_ANSWER:
            raise _silent() from None
        finally:
            self.close()
        try:
            return json.loads(data)
        except ValueError:
            return None

    def chunks(self) -> Iterator[Json]:
        """The events of a stream up to its end; ApiError if it breaks off."""
        assert self._answer is not None
        try:
            while line := self._answer.readline(MOST_BYTES):
                kind, _, data = line.decode().strip().partition(":")
                if kind != "data":
                    continue
                if data.strip() == "[DONE]":
                    return
                chunk = json.loads(data)
                if not isinstance(chunk, dict) or "error" in chunk:
                    break
                yield chunk
        except (*NO_ANSWER, ValueError):
            pass
        finally:
            self.close()
        raise unavailable("The sampling server broke off before the answer was complete.", "sampler_lost", RETRY_S)


def _silent() -> ApiError:
    return unavailable("The sampling server does not answer; try again later.", "sampler_unavailable", RETRY_S)


def _message(answer: Any) -> str:
    """The sentence in an error of the sampler; empty if it has none."""
    if not isinstance(answer, dict):
        return ""
    error = answer.get("error")
    found = error.get("message") if isinstance(error, dict) else answer.get("message") or answer.get("error_message")
    return str(found or "")


def _refusal(status: int, answer: Any) -> ApiError:
    message = _message(answer)
    if status in (400, 422):
        return invalid(message or "The sampling server refuses this request.", code="invalid_prompt")
    if status in (429, 503):
        return unavailable("The sampling server is busy; try again.", "sampler_busy", RETRY_S)
    found = "refuses the service's key" if status in (401, 403) else f"failed with the status {status}"
    return ApiError(502, f"The sampling server {found}.", code="sampler_failed", type="server_error")


class Sampler:
    """A server with the same backbones, and what is loaded there as far as is known. Any thread may use it."""

    def __init__(self, url: str, directory: Path, blobs: Blobs) -> None:
        self._url, self._directory, self._blobs = url, directory, blobs
        self._lock = threading.Lock()
        self._loading: dict[str, threading.Lock] = {}
        self._loaded: OrderedDict[str, None] = OrderedDict()
        self._bases: dict[str, str] = {}
        self._is_sglang = False

    def send(
        self, path: str, body: Json, base: tuple[str, str], source: str | None, calls: list[SamplerCall]
    ) -> SamplerCall:
        """Sends a prompt for a backbone, by name and path, with the adapter of a source; returns the call once its
        answer has begun. It is in `calls` before that."""
        for has_retried in (False, True):
            name = self._base_name(*base) if source is None else self._adapter_name(base, source)
            call = SamplerCall(self._url, path, {**body, "model": name}, ANSWER_S)
            calls.append(call)
            status = call.status()
            if status == 200:
                return call
            answer = call.read()
            if status != 404 or has_retried:
                break
            # It has been restarted and no longer has what was loaded.
            with self._lock:
                self._loaded.clear()
                self._bases.clear()
        raise _refusal(status, answer)

    def forget(self, source: str) -> None:
        """Has nothing more of an adapter that was deleted."""
        self._unload(short_name(source))

    def _call(self, path: str, body: Json | None, timeout_s: float) -> tuple[int, Any]:
        call = SamplerCall(self._url, path, body, timeout_s)
        return call.status(), call.read()

    def _base_name(self, name: str, path: str) -> str:
        if name not in self._bases:
            status, answer = self._call("/v1/models", None, SEND_S)
            if status != 200:
                raise _refusal(status, answer)
            data = answer.get("data") if isinstance(answer, dict) else None
            models = [each for each in data or () if isinstance(each, dict) and not each.get("parent")]
            ids = [str(each.get("id")) for each in models]
            found = next((known for known in (name, path) if known in ids), ids[0] if len(ids) == 1 else None)
            if found is None:
                message = f"The sampling server does not have the model '{name}'; it has {', '.join(ids) or 'none'}."
                raise ApiError(502, message, code="sampler_failed", type="server_error")
            self._bases[name] = found
        return self._bases[name]

    def _adapter_name(self, base: tuple[str, str], source: str) -> str:
        short = short_name(source)
        with self._lock:
            loading = self._loading.setdefault(short, threading.Lock())
        with loading:
            try:
                if short not in self._loaded:
                    self._load(f"weft-{short}", self._folder(source))
            finally:
                with self._lock:
                    self._loading.pop(short, None)
            with self._lock:
                self._loaded[short] = None
                self._loaded.move_to_end(short)
                extra = next(iter(self._loaded)) if len(self._loaded) > MOST_LOADED else None
        if extra is not None:
            self._unload(extra)
        return f"{self._base_name(*base)}:weft-{short}" if self._is_sglang else f"weft-{short}"

    def _folder(self, source: str) -> Path:
        """The directory of an adapter; an archive is unpacked, and what is at a URL copied."""
        own = folder_of(source)
        if own is not None and not is_url(own[1]):
            return Path(own[1])
        folder = self._directory / short_name(source)
        if not folder.is_dir():
            with storage_errors(folder):
                self._directory.mkdir(parents=True, exist_ok=True)
                made = Path(tempfile.mkdtemp(dir=self._directory, prefix=TEMP_PREFIX))
                try:
                    if own is not None:
                        fetch_adapter(own[1], made)
                    else:
                        self._blobs.fetch(source, made / "archive")
                        unpack(made / "archive", made, (CONFIG_FILE, TENSORS_FILE))
                        (made / "archive").unlink()
                    # Another process may have unpacked it meanwhile.
                    with contextlib.suppress(OSError):
                        made.rename(folder)
                finally:
                    shutil.rmtree(made, ignore_errors=True)
        return folder

    def _load(self, name: str, folder: Path) -> None:
        body = {"lora_name": name, "lora_path": str(folder)}
        status, answer = self._call(f"{self._prefix}/load_lora_adapter", body, LOAD_S)
        if status == 404 and not _message(answer) and not self._is_sglang:
            self._is_sglang = True
            status, answer = self._call("/load_lora_adapter", body, LOAD_S)
            self._is_sglang = status != 404
        message = _message(answer)
        if status == 200 or "already" in message:
            return
        if status == 404 and not message:
            message = (
                "The sampling server loads no adapters; start vLLM with --enable-lora and "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True, or SGLang with --enable-lora."
            )
            raise ApiError(502, message, code="sampler_failed", type="server_error")
        if status in (400, 404, 422):
            message = message.replace(str(folder), "its directory").replace(name, "it")
            raise invalid(f"The sampling server cannot load the adapter: {message}", "model", "broken_adapter")
        raise _refusal(status, answer)

    def _unload(self, short: str) -> None:
        with self._lock:
            was_loaded = short in self._loaded
            self._loaded.pop(short, None)
        if was_loaded:
            with contextlib.suppress(ApiError):
                self._call(f"{self._prefix}/unload_lora_adapter", {"lora_name": f"weft-{short}"}, SEND_S)
        shutil.rmtree(self._directory / short, ignore_errors=True)

    @property
    def _prefix(self) -> str:
        return "" if self._is_sglang else "/v1"


async def answer_by_sampler(
    sampler: Sampler, request: Request, user: Caller, body: CreateChat | CreateCompletion, path: str
) -> Response:
    """Passes a checked request on, and what comes back, with the client's name of the model; counts the tokens."""
    service = service_of(request)
    found = await run_in_threadpool(_resolve, service, user.tenant, body.model)
    base = (found.base, service.settings.base_models[found.base])
    sent = _passed_on(body, service.settings.limits.max_tokens)

    def count(usage: Any) -> None:
        used = usage if isinstance(usage, dict) else {}
        prompt, completion = (int(used.get(f"{name}_tokens") or 0) for name in ("prompt", "completion"))
        with service.database.begin() as tx:
            add_answer(tx, user.tenant, user.request, model=body.model, prompt=prompt, completion=completion)

    calls: list[SamplerCall] = []
    async with watched(partial(_hang_up, request, calls)):
        try:
            call = await run_in_threadpool(sampler.send, path, sent, base, found.blob, calls)
            if body.stream:
                with_usage = bool(body.stream_options and body.stream_options.include_usage)
                chunks = _renamed_chunks(call, body.model, with_usage, count)
                return EventStream(chunks, call.end, contextlib.nullcontext())
            answer = await run_in_threadpool(call.read)
        except ApiError:
            if await request.is_disconnected():
                raise ClientDisconnect from None
            raise
    if not isinstance(answer, dict):
        raise ApiError(502, "The sampling server sent no JSON.", code="sampler_failed", type="server_error")
    await run_in_threadpool(count, answer.get("usage"))
    return JSONResponse({**answer, "model": body.model})


def _resolve(service: ApiService, tenant: str, model: str) -> ResolvedModel:
    with service.database.read() as tx:
        found = resolve_prompted(tx, service, tenant, model)
    if found.worker is not None:
        message = "A running job has no files that the sampling server could read; use one of its checkpoints."
        raise invalid(message, "model", "invalid_state")
    return found


def _passed_on(body: CreateChat | CreateCompletion, most_tokens: int) -> Json:
    """The fields that the client set, without those that have no effect here."""
    idle = {name for name, field in type(body).model_fields.items() if field.description == UNUSED}
    sent = body.model_dump(exclude_unset=True, exclude_none=True, by_alias=True, exclude=idle)
    if not {"max_tokens", "max_completion_tokens"} & sent.keys():
        sent["max_tokens"] = min(most_tokens, DEFAULT_MAX_TOKENS)
    if sent.get("stream"):
        sent["stream_options"] = {"include_usage": True}
    for message in sent.get("messages", ()):
        message["role"] = ROLES[message["role"]]
    return sent


def _renamed_chunks(call: SamplerCall, model: str, with_usage: bool, count: Callable[[Any], None]) -> Iterator[bytes]:
    usage: Any = None
    try:
        for chunk in call.chunks():
            usage = chunk.get("usage") or usage
            if not with_usage:
                chunk.pop("usage", None)
                if not chunk.get("choices"):
                    continue
            yield event_stream(json.dumps({**chunk, "model": model}))
    except ApiError as error:
        yield event_stream(json.dumps(error.body))
        return
    finally:
        call.close()
    count(usage)
    yield event_stream("[DONE]")


async def _hang_up(request: Request, calls: Sequence[SamplerCall]) -> None:
    """Hangs up on the calls when the client has gone meanwhile."""
    while not await request.is_disconnected():
        await asyncio.sleep(WATCH_S)
    for call in calls:
        call.hang_up()
