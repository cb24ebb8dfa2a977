"""Batched decoding: several sequences, each with its own adapter, on one shared backbone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from weft.data.sample import Sample
from weft.kernels.dropout import mix
from weft.model.backbone import Backbone
from weft.model.packed import PackedBatch, PlacedSample, pack_samples

BATCH = 64
"""Sequences decoded at once."""


@dataclass(frozen=True)
class Request:
    """Tokens to go on from, and the slot whose adapter writes."""

    tokens: Sequence[int]
    slot: int | None = None
    seed: int = 0
    """Together with the decoding's seed, what its draws depend on."""


@dataclass(frozen=True)
class Decoding:
    """How the next token is chosen."""

    max_new_tokens: int = 256
    temperature: float = 0.0
    """0 takes the most likely token."""
    top_p: float = 1.0
    """Draw from the smallest set of tokens with this probability."""
    seed: int = 0


@dataclass(eq=False)
class Continuation:
    """A request under way: what has been written so far, and what the model remembers of it."""

    request: Request
    decoding: Decoding
    tokens: list[int] = field(default_factory=list)
    is_over: bool = False
    """Nothing more will be written: an end token came, or the longest length is reached."""

    def __post_init__(self) -> None:
        self._generator = torch.Generator().manual_seed(mix(self.decoding.seed, self.request.seed))
        self.cache: dict[int, Any] = {}
        """Keys and values by layer."""
        self.new: list[int] = list(self.request.tokens)
        """Tokens the model has not read yet: the whole request at first, then the last one written."""
        self.num_read = 0
        """Tokens before those."""

    def choose(self, logits_V: torch.Tensor) -> int:
        """The next token; to be asked once for each."""
        return _choose(logits_V, self.decoding, self._generator)

    def write(self, token: int, ends: Collection[int], longest: int, num_leading: int) -> int | None:
        """Adds the token that was chosen; None if it ends the answer instead.

        `longest`: positions that the model has; `num_leading`: rows in front of the request that an adapter fills.
        """
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
    """New tokens of every request, up to but without the end token; `on_token(which, token)` hears each as it comes.

    A sequence's draws depend on its own seed and the decoding's, not on the others or its place among them.
    """
    ends = end_tokens(backbone)
    results: list[list[int]] = []
    for start in range(0, len(requests), BATCH):
        group = [Continuation(request, decoding) for request in requests[start : start + BATCH]]
        while going := [(which, item) for which, item in enumerate(group) if not item.is_over]:
            written = advance(backbone, [item for _, item in going], ends)
            for (which, _), token in zip(going, written, strict=True):
                if token is not None and on_token is not None:
                    on_token(start + which, token)
        results.extend(item.tokens for item in group)
    return results


def advance(backbone: Backbone, going: Sequence[Continuation], ends: Collection[int]) -> list[int | None]:
    """Writes the next token of each, in one pass of the backbone; None where an end token came instead.

    What is written depends on a continuation alone, not on the others in the pass.
    """
    leading = [backbone.leading_rows(item.request.slot) for item in going]
    batch = pack_new(going, leading, backbone.device)
    logits = backbone.logits(batch, last_rows(batch), [item.cache for item in going])
    return [
        item.write(item.choose(row), ends, backbone.max_positions, num_leading)
        for item, row, num_leading in zip(going, logits, leading, strict=True)
    ]


def read_ahead(backbone: Backbone, item: Continuation, num_tokens: int) -> None:
    """Lets the model read the first of the new tokens and writes nothing, so that a long request takes several passes.

    At least one must be left for `advance`.
    """
    assert 0 < num_tokens < len(item.new)
    rest, item.new = item.new[num_tokens:], item.new[:num_tokens]
    batch = pack_new([item], [backbone.leading_rows(item.request.slot)], backbone.device)
    backbone.logits(batch, last_rows(batch), [item.cache])
    item.new, item.num_read = rest, item.num_read + num_tokens


def end_tokens(backbone: Backbone) -> set[int]:
    """Tokens that end a generation."""
    configured = getattr(backbone.model.generation_config, "eos_token_id", None)
    listed = configured if isinstance(configured, list) else [configured]
    return {int(t) for t in [*listed, backbone.tokenizer.eos_token_id] if t is not None}


def pack_new(going: Sequence[Continuation], leading: Sequence[int], device: torch.device) -> PackedBatch:
    """The new tokens of continuations, each after what the model has read of it; `leading`: rows in front of each."""
    placed = []
    for item, num_leading in zip(going, leading, strict=True):
        sample = Sample(np.array(item.new, dtype=np.int32), np.zeros(len(item.new), dtype=bool))
        if item.num_read:
            placed.append(PlacedSample(sample, item.request.slot, position=num_leading + item.num_read))
        else:
            placed.append(PlacedSample(sample.led_by(num_leading), item.request.slot))
    return pack_samples(placed, None, device)


def last_rows(batch: PackedBatch) -> list[int]:
    """The last row of each continuation, behind which its next token is chosen."""
    return [segment.end - 1 for segment in batch.segments]


def _choose(logits_V: torch.Tensor, decoding: Decoding, generator: torch.Generator) -> int:
    if decoding.temperature == 0:
        return int(logits_V.argmax())
    probabilities = torch.softmax(logits_V.cpu() / decoding.temperature, dim=0)
    ordered, tokens = probabilities.sort(descending=True)
    # A token stays if what precedes it is below top_p, so at least one does.
    ordered[ordered.cumsum(0) - ordered >= decoding.top_p] = 0.0
    return int(tokens[torch.multinomial(ordered, 1, generator=generator)])
