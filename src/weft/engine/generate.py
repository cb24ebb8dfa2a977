"""Batched decoding: several sequences, each with its own adapter, on one shared backbone."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
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


@dataclass
class _Sequence:
    request: Request
    generator: torch.Generator
    cache: dict[int, Any] = field(default_factory=dict)
    tokens: list[int] = field(default_factory=list)


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
        group = [
            _Sequence(request, torch.Generator().manual_seed(mix(decoding.seed, request.seed)))
            for request in requests[start : start + BATCH]
        ]
        for which, token in _decode(backbone, group, decoding, ends):
            if on_token is not None:
                on_token(start + which, token)
        results.extend(sequence.tokens for sequence in group)
    return results


def end_tokens(backbone: Backbone) -> set[int]:
    """Tokens that end a generation."""
    configured = getattr(backbone.model.generation_config, "eos_token_id", None)
    listed = configured if isinstance(configured, list) else [configured]
    return {int(t) for t in [*listed, backbone.tokenizer.eos_token_id] if t is not None}


def _decode(
    backbone: Backbone, group: list[_Sequence], decoding: Decoding, ends: Collection[int]
) -> Iterator[tuple[int, int]]:
    waiting = [(which, sequence, list(sequence.request.tokens)) for which, sequence in enumerate(group)]
    longest = backbone.max_positions
    while waiting:
        logits = _advance(backbone, [(sequence, new) for _, sequence, new in waiting])
        going = []
        for (which, sequence, _), row in zip(waiting, logits, strict=True):
            token = _choose(row, decoding, sequence.generator)
            if token in ends:
                continue
            sequence.tokens.append(token)
            yield which, token
            length = len(sequence.request.tokens) + len(sequence.tokens)
            if len(sequence.tokens) < decoding.max_new_tokens and length < longest:
                going.append((which, sequence, [token]))
        waiting = going


def _advance(backbone: Backbone, fed: list[tuple[_Sequence, list[int]]]) -> torch.Tensor:
    """Feeds new tokens to their sequences; the logits after each one's last."""
    placed = []
    for sequence, new in fed:
        known = len(sequence.request.tokens) + len(sequence.tokens) - len(new)
        sample = Sample(np.array(new, dtype=np.int32), np.zeros(len(new), dtype=bool))
        placed.append(Placed(sample, sequence.request.slot, position=known))
    batch = pack_samples(placed, None, backbone.device)
    rows = [segment.end - 1 for segment in batch.segments]
    return backbone.logits(batch, rows, [sequence.cache for sequence, _ in fed])


def _choose(logits_V: torch.Tensor, decoding: Decoding, generator: torch.Generator) -> int:
    if decoding.temperature == 0:
        return int(logits_V.argmax())
    probabilities = torch.softmax(logits_V.cpu() / decoding.temperature, dim=0)
    ordered, tokens = probabilities.sort(descending=True)
    # A token stays if what precedes it is below top_p, so at least one does.
    ordered[ordered.cumsum(0) - ordered >= decoding.top_p] = 0.0
    return int(tokens[torch.multinomial(ordered, 1, generator=generator)])
