"""One pass of the backbone over the new tokens of many sequences.

Where the backbone has a decoder, keys and values stay in its pages; else, on the reference path, in the sequences' own
caches, concatenated again for every token: slow, and what the decoder is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from weft.data.samples import Sample
from weft.engine.inference.sampling import TokenLogprobs, score
from weft.kernels.device import is_gpu
from weft.model.backbone import Backbone
from weft.model.fused.decode import NewTokens
from weft.model.fused.path import DECODING_CAPACITY
from weft.model.packed import PackedBatch, SlotSample, pack_samples

if TYPE_CHECKING:
    from weft.engine.inference.generate import Continuation, StartedPass

SCORED_TOKENS = 256
"""Tokens whose log-probabilities are computed at once, apart from those that a pass chooses."""


@torch.no_grad()
def next_logits(backbone: Backbone, going: Sequence[Continuation], before: StartedPass | None = None) -> torch.Tensor:
    """Logits (N, V) after the new tokens of each; none depends on the others. `before`: the pass that chose tokens
    which are not written yet; it must be one that `can_run_ahead` allows to follow."""
    slots = [item.request.slot for item in going]
    return backbone.logits_of(_last_hidden(backbone, going, before), slots)


def can_run_ahead(backbone: Backbone, going: Sequence[Continuation]) -> bool:
    """True if a pass over these may start before the tokens of the pass before are written."""
    for slot, items in _by_slot(going).items():
        decoder, num_leading = backbone.decoder(slot), backbone.leading_rows(slot)
        if decoder is None or not decoder.runs_ahead or not all(item.can_run_ahead for item in items):
            return False
        # What was lost is read again, with the token that is missing here.
        if any(item.num_pending and decoder.has_lost(_new_tokens(item), num_leading) for item in items):
            return False
    return True


def decodes_as_training(backbone: Backbone, slot: int | None) -> bool:
    """True if log-probabilities from decoding have training's bits, as far as that was compared."""
    decoder = backbone.decoder(slot)
    return not is_gpu(backbone.device) if decoder is None else decoder.has_training_bits


@torch.no_grad()
def score_again(backbone: Backbone, item: Continuation) -> None:
    """Replaces the log-probabilities of an answer at its end by those of a training pass over prompt and answer."""
    slot, num_prompt = item.request.slot, len(item.prompt)
    tokens = [*item.prompt, *item.tokens]
    first = num_prompt if item.decoding.prompt_logprobs is None else 1
    own = Sample(np.array(tokens, dtype=np.int32), np.arange(len(tokens)) >= first)
    samples = [SlotSample(own.led_by(backbone.leading_rows(slot)), slot)]
    if (decoder := backbone.decoder(slot)) is not None:
        hidden_ND = decoder.read_as_training(samples)
    else:
        path = backbone.path_of(slot)
        row_tile = path.row_tile(DECODING_CAPACITY)
        hidden_ND = path.read(pack_samples(samples, row_tile, backbone.device), row_tile)
    num_top = max(number for number in (item.decoding.logprobs, item.decoding.prompt_logprobs, 0) if number is not None)
    found = scores_of(backbone, hidden_ND, tokens[first:], slot, num_top)
    if (wanted := item.decoding.prompt_logprobs) is not None:
        item.prompt_logprobs = [None, *(each.only(wanted) for each in found[: num_prompt - 1])]
    if (wanted := item.decoding.logprobs) is not None:
        item.logprobs = [each.only(wanted) for each in found[num_prompt - first :]]


def scores_of(
    backbone: Backbone, hidden_ND: torch.Tensor, tokens: Sequence[int], slot: int | None, num_top: int
) -> list[TokenLogprobs]:
    """Log-probabilities of tokens, given the last hidden state before each; some at once, since logits are large."""
    found: list[TokenLogprobs] = []
    for start in range(0, len(tokens), SCORED_TOKENS):
        some = tokens[start : start + SCORED_TOKENS]
        logits_NV = backbone.logits_of(hidden_ND[start : start + len(some)], [slot] * len(some))
        chosen = score(logits_NV.float(), torch.tensor(some, device=logits_NV.device), num_top)
        found += [each for each in chosen.to_host()[1] if each is not None]
    return found


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
        item.prompt_logprobs += scores_of(backbone, hidden_LD, scored, item.request.slot, num_top)
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
