"""Batched decoding: several sequences, each with its own adapter, on one shared backbone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from weft.backbone.backbone import Backbone
from weft.backbone.packed import Placed, pack_samples
from weft.data.sample import Sample
from weft.kernels.dropout import mix

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
        self._cache: dict[int, Any] = {}
        self.new: list[int] = list(self.request.tokens)
        """Tokens the model has not read yet: the whole request at first, then the last one written."""


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
    known = [len(item.request.tokens) + len(item.tokens) - len(item.new) for item in going]
    logits = _logits(backbone, going, known)
    return [
        _write(item, row, ends, backbone.max_positions, backbone.leading_rows(item.request.slot))
        for item, row in zip(going, logits, strict=True)
    ]


def read_ahead(backbone: Backbone, item: Continuation, num_tokens: int) -> None:
    """Lets the model read the first of the new tokens and writes nothing, so that a long request takes several passes.

    At least one must be left for `advance`.
    """
    assert 0 < num_tokens < len(item.new)
    rest = item.new[num_tokens:]
    item.new = item.new[:num_tokens]
    known = len(item.request.tokens) + len(item.tokens) - num_tokens - len(rest)
    _logits(backbone, [item], [known])
    item.new = rest


def end_tokens(backbone: Backbone) -> set[int]:
    """Tokens that end a generation."""
    configured = getattr(backbone.model.generation_config, "eos_token_id", None)
    listed = configured if isinstance(configured, list) else [configured]
    return {int(t) for t in [*listed, backbone.tokenizer.eos_token_id] if t is not None}


def _write(
    item: Continuation, logits_V: torch.Tensor, ends: Collection[int], longest: int, num_leading: int
) -> int | None:
    token = _choose(logits_V, item.decoding, item._generator)
    if token in ends:
        item.is_over = True
        return None
    item.tokens.append(token)
    item.new = [token]
    length = num_leading + len(item.request.tokens) + len(item.tokens)
    item.is_over = len(item.tokens) >= item.decoding.max_new_tokens or length >= longest
    return token


def _logits(backbone: Backbone, going: Sequence[Continuation], known: Sequence[int]) -> torch.Tensor:
    """Feeds new tokens to their continuations, after those `known` to each; the logits after each one's last."""
    placed = []
    for item, position in zip(going, known, strict=True):
        sample = Sample(np.array(item.new, dtype=np.int32), np.zeros(len(item.new), dtype=bool))
        num_leading = backbone.leading_rows(item.request.slot)
        if position:
            placed.append(Placed(sample, item.request.slot, position=num_leading + position))
        else:
            placed.append(Placed(sample.led_by(num_leading), item.request.slot))
    batch = pack_samples(placed, None, backbone.device)
    rows = [segment.end - 1 for segment in batch.segments]
    return backbone.logits(batch, rows, [item._cache for item in going])


def _choose(logits_V: torch.Tensor, decoding: Decoding, generator: torch.Generator) -> int:
    if decoding.temperature == 0:
        return int(logits_V.argmax())
    probabilities = torch.softmax(logits_V.cpu() / decoding.temperature, dim=0)
    ordered, tokens = probabilities.sort(descending=True)
    # A token stays if what precedes it is below top_p, so at least one does.
    ordered[ordered.cumsum(0) - ordered >= decoding.top_p] = 0.0
    return int(tokens[torch.multinomial(ordered, 1, generator=generator)])
