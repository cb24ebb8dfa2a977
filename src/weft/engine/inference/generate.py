"""Batched decoding: several sequences, each with its own adapter, on one shared backbone; answers to prompts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from weft.data.load import Prompt
from weft.data.samples import Sample
from weft.engine.inference.sampling import Sampler, check
from weft.errors import DataError, JobError
from weft.kernels.dropout import mix
from weft.model.backbone import Backbone
from weft.model.packed import PackedBatch, SlotSample, pack_samples
from weft.spec.sampling import Decoding, Sampling

BATCH = 64


@dataclass(frozen=True)
class Request:
    """A prompt's tokens and the slot whose adapter continues them."""

    tokens: Sequence[int]
    slot: int | None = None
    seed: int = 0
    """Decides its draws, together with the decoding's seed."""


@dataclass(eq=False)
class Continuation:
    request: Request
    decoding: Decoding
    tokens: list[int] = field(default_factory=list)
    is_over: bool = False
    """True after an end token or at the longest length."""
    error: Exception | None = None
    """Error of `advance` for this continuation alone; then it is over."""

    def __post_init__(self) -> None:
        self.sampling: Sampling = replace(self.decoding, seed=mix(self.decoding.seed, self.request.seed))
        self.cache: dict[Any, Any] = {}
        """Keys and values by layer, and states of mixers."""
        self.new: list[int] = list(self.request.tokens)
        """Tokens that the model has not read: first the whole request, then the last token."""
        self.num_read = 0

    def forget_read(self) -> None:
        """Has the model read everything again, in the next pass: the request and what has been written."""
        self.cache = {}
        self.new = [*self.request.tokens, *self.tokens]
        self.num_read = 0

    @property
    def prompt(self) -> Sequence[int]:
        return self.request.tokens

    def write(self, token: int, ends: Collection[int], longest: int, num_leading: int) -> int | None:
        """Adds the chosen token; None if it ends the answer instead. `longest`: positions that the model has;
        `num_leading`: rows in front of the request that an adapter fills. JobError if none could be chosen."""
        check(token)
        if token in ends:
            self.is_over = True
            return None
        self.tokens.append(token)
        self.num_read += len(self.new)
        self.new = [token]
        length = num_leading + len(self.request.tokens) + len(self.tokens)
        self.is_over = len(self.tokens) >= self.decoding.max_new_tokens or length >= longest
        return token


def generate(
    backbone: Backbone,
    requests: Sequence[Request],
    decoding: Decoding,
    *,
    on_token: Callable[[int, int], None] | None = None,
) -> list[list[int]]:
    """New tokens of every request, without the end token; `on_token(index, token)` gets each at once. A sequence's
    draws depend on its own seed and the decoding's, not on the others or its index."""
    ends, sampler = end_tokens(backbone), Sampler()
    results: list[list[int]] = []
    for start in range(0, len(requests), BATCH):
        group = [Continuation(request, decoding) for request in requests[start : start + BATCH]]
        while going := [(which, item) for which, item in enumerate(group) if not item.is_over]:
            written = advance(backbone, [item for _, item in going], ends, sampler)
            for (which, _), token in zip(going, written, strict=True):
                if token is not None and on_token is not None:
                    on_token(start + which, token)
            for _, item in going:
                if item.error is not None:
                    raise item.error
        results.extend(item.tokens for item in group)
    return results


def advance(
    backbone: Backbone, going: Sequence[Continuation], ends: Collection[int], sampler: Sampler
) -> list[int | None]:
    """Writes the next token of each, in one pass of the backbone; None where an end token or an error came instead. A
    continuation's token does not depend on the others in the pass."""
    leading = [backbone.leading_rows(item.request.slot) for item in going]
    batch = pack_new(going, leading, backbone.device)
    logits = backbone.logits(batch, last_rows(batch), [item.cache for item in going])
    tokens, _ = sampler.choose(logits, going).to_host()
    written: list[int | None] = []
    for item, token, num_leading in zip(going, tokens, leading, strict=True):
        try:
            written.append(item.write(token, ends, backbone.max_positions, num_leading))
        except JobError as error:
            item.error, item.is_over = error, True
            written.append(None)
    return written


def read_ahead(backbone: Backbone, item: Continuation, num_tokens: int) -> None:
    """Reads the first of the new tokens and writes nothing, for requests of several passes; one must be left for
    `advance`."""
    assert 0 < num_tokens < len(item.new)
    rest, item.new = item.new[num_tokens:], item.new[:num_tokens]
    batch = pack_new([item], [backbone.leading_rows(item.request.slot)], backbone.device)
    backbone.logits(batch, last_rows(batch), [item.cache])
    item.new, item.num_read = rest, item.num_read + num_tokens


def end_tokens(backbone: Backbone) -> set[int]:
    configured = getattr(backbone.model.generation_config, "eos_token_id", None)
    listed = configured if isinstance(configured, list) else [configured]
    return {int(t) for t in [*listed, backbone.tokenizer.eos_token_id] if t is not None}


def pack_new(going: Sequence[Continuation], leading: Sequence[int], device: torch.device) -> PackedBatch:
    """The new tokens of continuations, each after what is already read; `leading`: rows in front of each."""
    samples = []
    for item, num_leading in zip(going, leading, strict=True):
        sample = Sample(np.array(item.new, dtype=np.int32), np.zeros(len(item.new), dtype=bool))
        if item.num_read:
            samples.append(SlotSample(sample, item.request.slot, position=num_leading + item.num_read))
        else:
            samples.append(SlotSample(sample.led_by(num_leading), item.request.slot))
    return pack_samples(samples, None, device)


def last_rows(batch: PackedBatch) -> list[int]:
    return [segment.end - 1 for segment in batch.segments]


@dataclass(frozen=True)
class Answer:
    prompt: Prompt
    text: str

    @property
    def is_exact(self) -> bool:
        """True if it equals the data's answer, apart from surrounding white space."""
        return self.prompt.reference is not None and self.text.strip() == self.prompt.reference.strip()


def answers(
    backbone: Backbone, prompts_of: Mapping[str, tuple[int | None, Sequence[Prompt]]], decoding: Decoding
) -> dict[str, list[Answer]]:
    """Answers by name: each name's slot (None: the bare backbone) to its prompts, all decoded together. A prompt's
    index among those of its name is its seed, so no draw depends on the other names."""
    refuse_long([prompt for _, prompts in prompts_of.values() for prompt in prompts], backbone.max_positions)
    requests = [request for slot, prompts in prompts_of.values() for request in requests_of(prompts, slot)]
    written = iter(generate(backbone, requests, decoding))
    return {
        name: [worded(prompt, next(written), backbone.tokenizer_of(slot)) for prompt in prompts]
        for name, (slot, prompts) in prompts_of.items()
    }


def refuse_long(prompts: Sequence[Prompt], longest: int) -> None:
    for prompt in prompts:
        if len(prompt.tokens) >= longest:
            raise DataError(
                f"the prompt has {len(prompt.tokens):,} tokens; the backbone has {longest:,} positions.",
                where=prompt.where,
            )


def requests_of(prompts: Sequence[Prompt], slot: int | None) -> list[Request]:
    return [Request(prompt.tokens.tolist(), slot, index) for index, prompt in enumerate(prompts)]


def worded(prompt: Prompt, tokens: Sequence[int], tokenizer: Any) -> Answer:
    return Answer(prompt, str(tokenizer.decode(tokens, skip_special_tokens=True)))


def exact_match(given: Sequence[Answer]) -> float:
    return sum(answer.is_exact for answer in given) / len(given)


class AnswerText:
    """The text of an answer that grows by tokens. Only its last tokens are decoded again for each of them.

    The text of the last `KEPT` tokens alone must be the end of the whole text; else, such as in the middle of a
    character, the tokens before them are decoded again as well.
    """

    KEPT = 16
    """Tokens whose text may still change by those that follow."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self.tokens: list[int] = []
        self._start = 0
        """Index of the first token that is decoded again."""
        self._before = ""
        """Text of the tokens before that one."""

    def add(self, token: int) -> str:
        """The whole text with one more token."""
        self.tokens.append(token)
        text = self._before + self._decode(self.tokens[self._start :])
        if len(self.tokens) - self._start >= 4 * self.KEPT:
            last = self._decode(self.tokens[-self.KEPT :])
            if last and text.endswith(last) and not last.startswith("\N{REPLACEMENT CHARACTER}"):
                self._start, self._before = len(self.tokens) - self.KEPT, text[: len(text) - len(last)]
        return text

    def whole(self) -> str:
        return self._decode(self.tokens)
