"""One pass of the backbone over the new tokens of many sequences.

Where the backbone has a decoder, keys and values stay in its pages; else, on the reference path, in the sequences' own
caches, concatenated again for every token: slow, and what the decoder is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from weft.data.samples import Sample
from weft.engine.inference.sampling import score
from weft.model.backbone import Backbone
from weft.model.fused.decode import NewTokens
from weft.model.packed import PackedBatch, SlotSample, pack_samples

if TYPE_CHECKING:
    from weft.engine.inference.generate import Continuation, StartedPass


@torch.no_grad()
def next_logits(backbone: Backbone, going: Sequence[Continuation], before: StartedPass | None = None) -> torch.Tensor:
    """Logits (N, V) after the new tokens of each; none depends on the others. `before`: the pass that chose tokens
    which are not written yet; it must be one that `can_run_ahead` allows to follow."""
    slots = [item.request.slot for item in going]
    return backbone.logits_of(_last_hidden(backbone, going, before), slots)


def can_run_ahead(backbone: Backbone, going: Sequence[Continuation]) -> bool:
    """Whether a pass over these may start before tokens of the one before are written."""
    for slot, items in _by_slot(going).items():
        decoder, num_leading = backbone.decoder(slot), backbone.leading_rows(slot)
        if decoder is None or not decoder.runs_ahead or not all(item.can_run_ahead for item in items):
            return False
        # What was lost is read again, with the token that is missing here.
        if any(item.num_pending and decoder.has_lost(_new_tokens(item), num_leading) for item in items):
            return False
    return True


def _by_slot(going: Sequence[Continuation]) -> dict[int | None, list[Continuation]]:
    found: dict[int | None, list[Continuation]] = {}
    for item in going:
        found.setdefault(item.request.slot, []).append(item)
    return found


@torch.no_grad()
def read_ahead(backbone: Backbone, item: Continuation, num_tokens: int) -> None:
    """Reads the first of the new tokens and writes nothing, for requests of several passes; at least one must be left.
    Scores the tokens of the prompt that follow them, if that is wanted."""
    assert 0 < num_tokens < len(item.new)
    whole = item.new
    item.new = whole[:num_tokens]
    try:
        hidden_LD = _hidden(backbone, item)
    finally:
        item.new = whole
    num_top, scored = item.decoding.prompt_logprobs, item.prompt[item.num_read + 1 : item.num_read + 1 + num_tokens]
    if num_top is not None and scored:
        logits = backbone.logits_of(hidden_LD[: len(scored)], [item.request.slot] * len(scored))
        found = score(logits, torch.tensor(scored, device=logits.device), num_top)
        item.prompt_logprobs.extend(found.to_host()[1])
    item.new, item.num_read = whole[num_tokens:], item.num_read + num_tokens


def _hidden(backbone: Backbone, item: Continuation) -> torch.Tensor:
    """The last hidden states of one sequence's new tokens (L, D)."""
    num_leading = backbone.leading_rows(item.request.slot)
    decoder = backbone.decoder(item.request.slot)
    if decoder is None:
        batch = pack_new([item], [num_leading], backbone.device)
        return backbone.reference.hidden(batch, None, [item.cache])[-len(item.new) :]
    new = _new_tokens(item)
    if decoder.has_lost(new, num_leading):
        # All that was read before is read once more, in front of these tokens.
        already = [*item.request.tokens, *item.tokens][: item.num_read]
        item.cache = {}
        new = NewTokens([*already, *item.new], item.request.slot, item.cache)
    return decoder.read_every(new, num_leading)[-len(item.new) :]


def _last_hidden(backbone: Backbone, going: Sequence[Continuation], before: StartedPass | None = None) -> torch.Tensor:
    """The last hidden state of each (N, D)."""
    slots = {item.request.slot for item in going}
    decoders = {slot: backbone.decoder(slot) for slot in slots}
    decoder = next((found for found in decoders.values() if found is not None), None)
    if decoder is None:
        return _by_reference(backbone, going)
    mine = [index for index, item in enumerate(going) if decoders[item.request.slot] is not None]
    leading_of = {slot: backbone.leading_rows(slot) for slot in slots}
    leading = [leading_of[going[index].request.slot] for index in mine]
    for index, num_leading in zip(mine, leading, strict=True):
        if not going[index].num_pending and decoder.has_lost(_new_tokens(going[index]), num_leading):
            going[index].forget_read()
    rows = {} if before is None else {id(item): row for row, item in enumerate(before.items)}
    new = [_new_tokens(going[index], rows.get(id(going[index]), 0)) for index in mine]
    read_MD = decoder.read(new, leading, None if before is None else before.chosen.tokens_R)
    others = [index for index, item in enumerate(going) if decoders[item.request.slot] is None]
    if not others:
        return read_MD
    hidden_ND = read_MD.new_empty(len(going), read_MD.shape[1])
    hidden_ND[mine] = read_MD
    hidden_ND[others] = _by_reference(backbone, [going[index] for index in others])
    return hidden_ND


def _new_tokens(item: Continuation, row: int = 0) -> NewTokens:
    """`row`: where the pass before has chosen a token that is not written yet."""
    to_come = item.decoding.max_new_tokens - item.num_chosen
    if item.num_pending:
        return NewTokens([-1 - row], item.request.slot, item.cache, item.num_read + len(item.new), to_come)
    return NewTokens(item.new, item.request.slot, item.cache, item.num_read, to_come)


def _by_reference(backbone: Backbone, going: Sequence[Continuation]) -> torch.Tensor:
    batch = pack_new(going, [backbone.leading_rows(item.request.slot) for item in going], backbone.device)
    hidden_TD = backbone.reference.hidden(batch, None, [item.cache for item in going])
    return hidden_TD[last_rows(batch)]


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
