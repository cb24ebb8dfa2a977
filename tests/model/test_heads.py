"""Heads of jobs: each sees its own rows alone, whatever its neighbours' heads hold."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tiny_models import random_backbone, random_sample

from weft.model.packed import SlotSample, pack_samples
from weft.objectives.heads import Classification
from weft.objectives.objective import LOSS
from weft.spec import AdapterSpec

CLASSES = Classification(("a", "b", "c"))
RNG = np.random.default_rng(5)
MINE = [random_sample(RNG, n).labelled_end(n % 3) for n in (9, 4, 17)]
OTHER, PLAIN = random_sample(RNG, 12).labelled_end(1), random_sample(RNG, 7)


@pytest.mark.parametrize("kernels", ["reference", "fused"])
def test_head_when_a_neighbours_is_nan_and_samples_are_cut_otherwise_then_has_the_same_bits(kernels):
    """Gradients of head and adapter, and losses."""
    backbone = random_backbone("llama", kernels=kernels)
    mine, other = (backbone.new_adapter(AdapterSpec(r=4), seed, objective=CLASSES) for seed in (0, 1))
    slot, neighbour = backbone.attach(mine), backbone.attach(other)
    slot_samples = [SlotSample(sample, slot, 0.25, head=CLASSES) for sample in MINE]

    def run(*microbatches: list[SlotSample]) -> tuple[list[float], dict[str, torch.Tensor]]:
        mine.zero_grad()
        losses = []
        for batch in microbatches:
            scores = backbone.launch(pack_samples(batch, 128, backbone.device), 128).scores()
            pairs = zip(batch, scores, strict=True)
            losses += [score[LOSS].total for item, score in pairs if item.slot == slot]
        return losses, {name: group.grad.clone() for name, group in mine.groups.items()}

    losses, expected = run(slot_samples)
    assert other.head is not None
    other.head.params[0].fill_(math.nan)
    beside = [SlotSample(OTHER, neighbour, 0.5, head=CLASSES), SlotSample(PLAIN, neighbour, 0.1)]
    again, found = run([*beside[:1], slot_samples[0]], [*slot_samples[1:], beside[1]])
    assert again == losses and expected["score"].abs().max() > 0
    assert all(found[name].equal(grad) for name, grad in expected.items())


def test_head_when_a_loss_is_not_finite_then_only_its_owner_is_notified():
    backbone = random_backbone("llama")
    adapters = [backbone.new_adapter(AdapterSpec(r=4), seed, objective=CLASSES) for seed in (0, 1)]
    slots = [backbone.attach(adapter) for adapter in adapters]
    assert adapters[1].head is not None
    adapters[1].head.params[0].fill_(math.inf)
    slot_samples = [
        SlotSample(sample, slot, head=CLASSES) for sample, slot in zip((MINE[0], OTHER), slots, strict=True)
    ]
    running = backbone.launch(pack_samples(slot_samples, 128, backbone.device), 128)
    assert running.finite([0, 1], 2).tolist() == [1.0, 0.0]
