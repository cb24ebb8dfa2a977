"""Checks an untested model family: packed samples must give the results of the model's own attention on
single samples, and on a CPU the same bits with any neighbours."""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import nn

from weft.data.samples import Sample
from weft.errors import ModelError
from weft.kernels.device import is_cpu
from weft.model.backbone import Backbone
from weft.model.packed import SlotSample, pack_samples
from weft.model.packing import attention, experts, mixers
from weft.plan.cost.shape import CPU_ROW_TILE
from weft.spec import AdapterSpec

LENGTHS = (5, 9)
NEIGHBOURS = (150, 5, 140)
"""Lengths of a sample's neighbours, at most what the model supports: more than a tile before it, and after it."""


def check_packing(backbone: Backbone) -> None:
    """Refuses a backbone whose packed results differ from its own, or depend on a sample's neighbours."""
    family, where = backbone.model.config.model_type, f"base_model {backbone.name}"
    obstacle = _unsupported_call(backbone) or _leak(backbone)
    if obstacle:
        raise ModelError(f"{family} {obstacle}, so it cannot be trained exactly.", where=where)
    error = packing_error(backbone)
    if not error <= (1e-4 if backbone.dtype == torch.float32 else 5e-2):
        raise ModelError(
            f"{family} gives other results when samples are packed (relative error {error:.1e}), so it cannot be "
            "trained exactly.",
            where=where,
        )
    if is_cpu(backbone.device) and not keeps_bits(backbone):
        raise ModelError(
            f"{family} gives a sample other bits beside other samples, so it cannot be trained exactly.", where=where
        )


def packing_error(backbone: Backbone) -> float:
    samples = _random_samples(backbone, LENGTHS)
    packed = backbone.logits(pack_samples([SlotSample(s) for s in samples], None, backbone.device))
    backbone.routing.segments = ()
    with _running_plainly(backbone), torch.no_grad():
        ids = [torch.from_numpy(s.tokens.astype(np.int64))[None].to(backbone.device) for s in samples]
        expected = torch.cat([backbone.model(input_ids=ids_1T).logits[0] for ids_1T in ids]).float()
    return float((packed - expected).abs().max() / expected.abs().max())


def keeps_bits(backbone: Backbone) -> bool:
    """Whether a sample's loss and gradients are bit-identical alone and with neighbours."""
    adapter = backbone.new_adapter(AdapterSpec(r=1, init_lora_weights=False), 0)
    slot = backbone.attach(adapter)
    mine, *others = _random_samples(backbone, (7, *(min(n, backbone.max_positions) for n in NEIGHBOURS)))
    first, second, last = (SlotSample(other) for other in others)
    found: list[tuple[float, dict[str, torch.Tensor]]] = []
    for before, after in (((), ()), ((first, second), (last,))):
        adapter.zero_grad()
        batch = pack_samples([*before, SlotSample(mine, slot), *after], CPU_ROW_TILE, backbone.device)
        losses = backbone.forward_backward(batch, CPU_ROW_TILE)
        found.append((losses[len(before)], {name: group.grad.clone() for name, group in adapter.groups.items()}))
    backbone.detach(slot)
    (loss, alone), (other_loss, beside) = found
    return loss == other_loss and all(torch.equal(alone[name], beside[name]) for name in alone)


def _unsupported_call(backbone: Backbone) -> str | None:
    """Why adapters on a linear do not see each row of the microbatch exactly once; None if they do."""
    batch = pack_samples([SlotSample(s) for s in _random_samples(backbone, LENGTHS)], None, backbone.device)
    rows: dict[str, list[int]] = collections.defaultdict(list)
    with contextlib.ExitStack() as hooks:
        for path, linear in backbone.linears.items():
            counted = functools.partial(_count_rows, rows[path])
            hooks.callback(linear.register_forward_pre_hook(counted).remove)
        backbone.logits(batch)
    for path, seen in rows.items():
        if len(seen) > 1:
            return f"runs {path} {len(seen)} times a pass"
        if seen and seen != [batch.num_rows]:
            return f"shows {path} {seen[0]} of {batch.num_rows} rows"
    return None


def _count_rows(rows: list[int], _: nn.Module, given: tuple[torch.Tensor, ...]) -> None:
    rows.append(given[0][..., 0].numel())


def _leak(backbone: Backbone) -> str | None:
    """A sentence if a sample is affected by NaN in the one before it."""
    first, mine = _random_samples(backbone, LENGTHS)
    batch = pack_samples([SlotSample(first), SlotSample(mine)], None, backbone.device)
    clean = backbone.logits(batch)[first.length :]

    def spoil(_: nn.Module, given: object, embeds_TD: torch.Tensor) -> torch.Tensor:
        return embeds_TD.index_fill(0, torch.arange(first.length, device=embeds_TD.device), float("nan"))

    hook = backbone.model.get_input_embeddings().register_forward_hook(spoil)
    try:
        spoiled = backbone.logits(batch)[first.length :]
    finally:
        hook.remove()
    return None if torch.equal(clean, spoiled) else "lets a sample see the one before it when they are packed"


@contextlib.contextmanager
def _running_plainly(backbone: Backbone) -> Iterator[None]:
    """Makes a model use transformers' own plain attention, mixers and experts in this context."""
    model = backbone.model
    attention.restore_attention(model)
    mixers.restore_mixers(model)
    model.set_attn_implementation("eager")
    experts.choose(model, "eager")
    try:
        yield
    finally:
        model.set_attn_implementation(attention.NAME)
        attention.prepare_attention(model)
        mixers.prepare_mixers(model)
        experts.choose(model, experts.NAME)


def _random_samples(backbone: Backbone, lengths: Sequence[int]) -> list[Sample]:
    rng = np.random.default_rng(0)
    vocabulary = backbone.model.config.get_text_config().vocab_size
    return [Sample(rng.integers(0, vocabulary, n, dtype=np.int32), np.ones(n, dtype=bool)) for n in lengths]
