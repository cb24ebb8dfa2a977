"""What a prompt brings to a worker: its body, its adapter, and its tokens."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import shutil
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

from fastapi import Request
from pydantic import BaseModel, Field

from weft.data.chat_template import Tokenizer
from weft.data.chats import Rendered
from weft.data.load import prompt_of_chat
from weft.data.tokenise import tokenise_prompt
from weft.engine.inference.adapter_slots import SlotAdapter
from weft.engine.inference.attach import StoredAdapter, read_stored
from weft.errors import AdapterFileError, DataError
from weft.process_memory import memory_bytes
from weft.serve.adapter_folders import adapter_at, fetch_adapter, is_url
from weft.serve.blobs import Blobs, unpack
from weft.serve.db.adapters import folder_of, short_name
from weft.serve.errors import Busy, Damaged
from weft.serve.worker.prompt_scheduler import PromptRequest, RunningJob
from weft.spec.sampling import COLDEST, MOST_BIASES, MOST_STOPS, Decoding
from weft.store.atomic import storage_errors
from weft.store.peft_files import CONFIG_FILE, TEMPLATE_FILE, TENSORS_FILE, read_adapter, read_chat_template

KEPT_SHARE = 1 / 8
"""Part of the host's memory in which adapters are kept; the least recently used one goes first."""
ADAPTER_FILES = (CONFIG_FILE, TENSORS_FILE, TEMPLATE_FILE)


class AdapterCache:
    """Adapters by the names of their archives. Several threads may use it."""

    def __init__(
        self,
        blobs: Blobs,
        directory: Path,
        prepare: Callable[[StoredAdapter], SlotAdapter],
        most_bytes: int | None = None,
    ) -> None:
        """`prepare` raises AdapterFileError for an adapter that does not fit the backbone."""
        self._blobs, self._prepare = blobs, prepare
        self._directory = directory
        self._most_bytes = int(memory_bytes() * KEPT_SHARE) if most_bytes is None else most_bytes
        self._kept: OrderedDict[str, SlotAdapter] = OrderedDict()
        self._lock = threading.Lock()
        self._reading: dict[str, threading.Lock] = {}
        self.names: tuple[str, ...] = ()
        """Short names of the archives in memory; reading this never waits for one that is being fetched."""

    def get(self, blob: str) -> SlotAdapter:
        """Returns the adapter in an archive or a folder. Raises NotFound without an archive, Damaged for a broken one,
        AdapterFileError for a broken folder."""
        with self._lock:
            reading = self._reading.setdefault(blob, threading.Lock())
        # Each archive is read once, and one that takes long holds up only its own prompts.
        with reading:
            try:
                adapter = self._kept.get(blob) or self._prepare(self._read(blob))
            finally:
                with self._lock:
                    self._reading.pop(blob, None)
            with self._lock:
                self._kept[blob] = adapter
                self._kept.move_to_end(blob)
                held = sum(each.num_bytes for each in self._kept.values())
                while held > self._most_bytes and len(self._kept) > 1:
                    held -= self._kept.popitem(last=False)[1].num_bytes
                self.names = tuple(map(short_name, self._kept))
            return adapter

    def _read(self, blob: str) -> StoredAdapter:
        own = folder_of(blob)
        if own is not None and not is_url(own[1]):
            return _read_folder(blob, *own, Path(own[1]))
        with storage_errors(self._directory):
            self._directory.mkdir(exist_ok=True)
            folder = Path(tempfile.mkdtemp(dir=self._directory))
        try:
            if own is not None:
                fetch_adapter(own[1], folder)
                return _read_folder(blob, *own, folder)
            archive = folder / "archive"
            self._blobs.fetch(blob, archive)
            unpack(archive, folder, ADAPTER_FILES)
            try:
                spec, tensors, config = read_adapter(folder)
            except AdapterFileError as error:
                raise Damaged(f"the stored adapter cannot be read ({error.message})") from None
            base = config.get("base_model_name_or_path")
            return StoredAdapter(
                blob, folder, spec, tensors, base if isinstance(base, str) else None, read_chat_template(folder)
            )
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _read_folder(source: str, version: str, path: str, folder: Path) -> StoredAdapter:
    """The adapter at a path that has this version once its files, or copies of them, are read in a folder."""
    stored: StoredAdapter | AdapterFileError
    try:
        stored = replace(read_stored(folder), name=source)
    except AdapterFileError as error:
        stored = error
    now = adapter_at("", path)
    if now is None or now.version != version:
        raise Busy("the adapter's files have changed; try again.")
    if isinstance(stored, AdapterFileError):
        raise stored
    if stored.spec.new_tokens:
        raise AdapterFileError("has new tokens, and the service answers with the base model's own.")
    return stored


LONG_CHARS = 2**15
"""A prompt of more characters is tokenised apart from the others."""
MAX_LONG = 8
"""How many long prompts may wait to be tokenised; more are refused."""
WATCH_S = 0.2
"""How often the server looks whether the client has gone."""
TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class PromptMessage(BaseModel):
    """One turn of a chat."""

    role: str
    content: str
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    name: str | None = None


class CheckBody(BaseModel):
    """Request to check that an adapter can be read."""

    model_blob: str


class PromptBody(BaseModel):
    """Request to answer a prompt, given as one of `messages` and `prompt`. Without `model_blob` the backbone
    answers."""

    model_blob: str | None = None
    base: str | None = None
    messages: list[PromptMessage] | None = None
    prompt: str | list[TokenId] | None = None
    max_tokens: int = Field(256, ge=1, lt=2**31)
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[TokenId, float] = Field(default_factory=dict, max_length=MOST_BIASES)
    seed: int = Field(0, ge=0, lt=2**32)
    stop: list[str] = Field(default_factory=list, max_length=MOST_STOPS)
    stop_token_ids: list[TokenId] = Field(default_factory=list, max_length=MOST_STOPS)
    logprobs: int | None = None
    """How many likeliest tokens come with the log-probability of each token; None is no log-probabilities."""
    echo: bool = False
    """True: the prompt comes before the answer."""
    json_schema: dict[str, Any] | None = None
    """The schema of the answer, which is JSON then."""
    is_strict: bool = False
    """True: objects of the answer have only the properties that the schema lists."""
    stream: bool = False

    def decoding(self, longest: int, vocabulary: int) -> Decoding:
        """Raises ConfigError or DataError for a wrong value."""
        if self.logit_bias:
            _known(list(self.logit_bias), vocabulary, "logit_bias")
        names = [each.name for each in fields(Decoding) if each.name in type(self).model_fields]
        own: dict[str, Any] = {name: getattr(self, name) for name in names}
        own |= {"stop": tuple(self.stop), "stop_token_ids": tuple(self.stop_token_ids)}
        # Lower temperatures are taken as 0.
        own["temperature"] = 0.0 if self.temperature < COLDEST else self.temperature
        return Decoding(longest, **own, prompt_logprobs=self.logprobs if self.echo else None)


@dataclass(eq=False)
class PromptClient:
    """The client of one prompt, who may hang up at any moment."""

    has_gone: bool = False
    request: PromptRequest | None = None

    def leave(self) -> None:
        self.has_gone = True
        if self.request is not None:
            self.request.is_cancelled = True
            self.request.answer.put(client_gone())

    def check(self) -> None:
        if self.has_gone:
            raise client_gone()

    async def watch(self, request: Request) -> None:
        """Notes when the connection is closed."""
        while not await request.is_disconnected():
            await asyncio.sleep(WATCH_S)
        self.leave()


def client_gone() -> Busy:
    return Busy("the client has gone.")


class Tokenizers:
    """Copies of a tokenizer, because threads must not share one: for short prompts, for long ones and for answers."""

    def __init__(self, tokenizer: Any) -> None:
        self._short, self._long, self._answers = ((copy.deepcopy(tokenizer), threading.Lock()) for _ in range(3))
        self._num_long, self._counting = 0, threading.Lock()
        self.longest = max(map(len, tokenizer.get_vocab()), default=1)

    @contextlib.contextmanager
    def for_prompt(self, num_chars: int, client: PromptClient) -> Iterator[Tokenizer]:
        """Waits for its turn; raises Busy if too many long prompts wait, or once the client has gone."""
        is_long = num_chars > LONG_CHARS
        with self._counting:
            if is_long and self._num_long >= MAX_LONG:
                raise Busy(f"{MAX_LONG} long prompts are being tokenised; try again.")
            self._num_long += is_long
        tokenizer, lock = self._long if is_long else self._short
        try:
            while not lock.acquire(timeout=WATCH_S):
                client.check()
            try:
                client.check()
                yield tokenizer
            finally:
                lock.release()
        finally:
            with self._counting:
                self._num_long -= is_long

    def text(self, tokens: Sequence[int]) -> str:
        return self._decode(tokens, skip_special_tokens=True)

    def spelling(self, tokens: Sequence[int]) -> str:
        """The text with special tokens."""
        return self._decode(tokens, skip_special_tokens=False)

    def _decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        tokenizer, lock = self._answers
        with lock:
            return str(tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens))


def _known(tokens: list[int], vocabulary: int, where: str) -> list[int]:
    if not tokens:
        raise DataError("is empty.", where=where)
    if max(tokens) >= vocabulary:
        raise DataError(f"has the token {max(tokens)}; the model knows 0 to {vocabulary - 1}.", where=where)
    return tokens


def tokens_of(
    body: PromptBody, tokenizer: Tokenizer, adapter: SlotAdapter | RunningJob | None, vocabulary: int
) -> list[int]:
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
        return _known(body.prompt, vocabulary, "prompt")
    tokens = tokenise_prompt(Rendered(body.prompt or "", (), True, "prompt"), tokenizer)
    if not len(tokens):
        raise DataError("is empty.", where="prompt")
    return list(map(int, tokens))
