"""Objectives that weigh rows by log-probabilities: the right gradient on both paths, and no neighbour's bit moves."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tiny_models import dataset, random_backbone, random_sample

from weft.adapters.adapter import Adapter
from weft.engine.execute.references import JobReference, ReferenceCache, RequestedRows, run_references
from weft.model.backbone import Backbone
from weft.model.packed import SlotSample, pack_samples
from weft.objectives.objective import ACCURACY, LOSS, Score
from weft.objectives.preference import Dpo
from weft.spec import AdapterSpec

PATHS = ["reference", "fused"]
DPO = Dpo(0.3)
REWARDS = [f"rewards/{name}" for name in ("chosen", "rejected", "accuracies", "margins")]
RNG = np.random.default_rng(3)
ONE, OTHER, FIRST, SECOND, THIRD, FOURTH = (random_sample(RNG, n) for n in (19, 30, 12, 25, 17, 8))


def attached(backbone: Backbone, seed: int) -> tuple[Adapter, int]:
    adapter = backbone.new_adapter(AdapterSpec(r=4), seed)
    generator = torch.Generator().manual_seed(seed)
    params = adapter.groups["b"].params
    params.copy_(torch.randn(params.shape, generator=generator) * 0.1)
    adapter.changed()
    return adapter, backbone.attach(adapter)


def pair(backbone: Backbone, slot: int, better, worse, weight: float = 1.0) -> list[SlotSample]:
    """A group: both answers, with the log-probabilities of the bare backbone."""
    bare = JobReference(ReferenceCache(backbone), dataset([better, worse]))
    requested = [RequestedRows(bare, slot, bare.rows(sample, slot, 128)) for sample in (better, worse)]
    run_references(backbone, requested, 128, 128)
    pairs = zip((better, worse), requested, strict=True)
    return [SlotSample(s, slot, weight, objective=DPO, reference=each.rows) for s, each in pairs]


def run(backbone: Backbone, slot_samples: list[SlotSample]) -> list[Score]:
    return backbone.launch(pack_samples(slot_samples, 128, backbone.device), 128).scores()


def gradients(adapter: Adapter) -> torch.Tensor:
    return torch.cat([group.grad.flatten() for group in adapter.groups.values()])


def by_autograd(seed: int, pairs: list[tuple]) -> tuple[list[float], torch.Tensor]:
    """The loss of each pair and the gradient of half their sum, by autograd through all logits of a packed batch."""
    backbone = random_backbone("llama", kernels="reference")
    adapter, slot = attached(backbone, seed)
    slot_samples = [SlotSample(sample, at) for two in pairs for at in (slot, None) for sample in two]
    batch = pack_samples(slot_samples, 128, backbone.device)
    hidden_TD = backbone.reference.hidden(batch, 128)
    logits_NV = backbone.head.logits(hidden_TD[batch.supervised_N])
    logprobs_N = logits_NV.log_softmax(dim=1).gather(1, batch.targets_N[:, None])[:, 0]
    sums = [part.sum() for part in logprobs_N.split(list(batch.counts))]
    losses = []
    for better, worse, bare_better, bare_worse in zip(*(sums[i::4] for i in range(4)), strict=True):
        margin = DPO.beta * ((better - bare_better.detach()) - (worse - bare_worse.detach()))
        losses.append(-torch.nn.functional.logsigmoid(margin))
    (torch.stack(losses).sum() / 2).backward()
    return [loss.item() for loss in losses], gradients(adapter)


@pytest.mark.parametrize("kernels", PATHS)
def test_pairs_when_run_beside_supervised_jobs_then_loss_and_gradient_are_those_of_autograd(kernels):
    losses, expected = by_autograd(1, [(FIRST, SECOND), (THIRD, FOURTH)])
    backbone = random_backbone("llama", kernels=kernels)
    (neighbour, other), (adapter, slot) = (attached(backbone, seed) for seed in (0, 1))
    groups = [pair(backbone, slot, FIRST, SECOND, 0.5), pair(backbone, slot, THIRD, FOURTH, 0.5)]
    scores = run(backbone, [SlotSample(ONE, other, 0.1), *groups[0], SlotSample(OTHER, other, 0.1), *groups[1]])
    assert [scores[i][LOSS].total for i in (1, 4)] == pytest.approx(losses, rel=1e-5)
    assert [scores[i]["rewards/margins"].total for i in (1, 4)] == pytest.approx(
        [-math.log(math.expm1(x)) for x in losses], 1e-4
    )
    assert [sorted(score) for score in scores[1:3]] == [sorted([LOSS, ACCURACY, *REWARDS]), [ACCURACY]]
    mine = gradients(adapter)
    assert expected.norm() > 0 and (mine - expected).norm() <= 1e-5 * expected.norm()
    assert gradients(neighbour).norm() > 0


@pytest.mark.parametrize("kernels", PATHS)
def test_supervised_neighbour_when_pairs_share_the_microbatch_then_keeps_its_bits(kernels):
    """Also where a pair's own numbers are not finite."""
    seen = []
    for is_pair in (True, False):
        backbone = random_backbone("llama", kernels=kernels)
        (neighbour, other), (adapter, slot) = (attached(backbone, seed) for seed in (0, 1))
        group = pair(backbone, slot, FIRST, SECOND) if is_pair else [SlotSample(s, slot) for s in (FIRST, SECOND)]
        if is_pair:
            adapter.groups["b"].params.fill_(math.nan)
            adapter.changed()
        scores = run(backbone, [SlotSample(ONE, other, 0.1), *group, SlotSample(OTHER, other, 0.1)])
        seen.append(([scores[0], scores[-1]], gradients(neighbour)))
    assert seen[0][0] == seen[1][0] and torch.equal(seen[0][1], seen[1][1])


@pytest.mark.parametrize("kernels", PATHS)
def test_pair_when_other_pairs_are_scored_with_it_then_keeps_its_bits(kernels):
    seen = []
    for front, back in (([], []), ([(THIRD, FOURTH)], []), ([(SECOND, ONE)], [(OTHER, FOURTH)])):
        backbone = random_backbone("llama", kernels=kernels)
        (_, other), (adapter, slot) = (attached(backbone, seed) for seed in (0, 1))
        before, after = ([p for two in pairs for p in pair(backbone, other, *two)] for pairs in (front, back))
        scores = run(backbone, [*before, *pair(backbone, slot, FIRST, THIRD), *after])
        seen.append((scores[len(before)], gradients(adapter)))
    assert all(score == seen[0][0] and torch.equal(grad, seen[0][1]) for score, grad in seen[1:])


@pytest.mark.parametrize("kernels", PATHS)
def test_pairs_when_only_evaluated_then_the_same_scores_without_gradients(kernels):
    backbone = random_backbone("llama", kernels=kernels)
    adapter, slot = attached(backbone, 1)
    batch = pack_samples(pair(backbone, slot, FIRST, SECOND), 128, backbone.device)
    looked = backbone.scores(batch, 128)
    assert not gradients(adapter).any()
    assert looked == backbone.launch(batch, 128).scores()


def test_finite_when_a_pair_has_no_finite_loss_then_only_its_owner_is_notified():
    backbone = random_backbone("llama")
    (_, other), (adapter, slot) = (attached(backbone, seed) for seed in (0, 1))
    adapter.groups["b"].params.fill_(math.nan)
    adapter.changed()
    slot_samples = [SlotSample(ONE, other), *pair(backbone, slot, FIRST, SECOND), *pair(backbone, other, THIRD, FOURTH)]
    running = backbone.launch(pack_samples(slot_samples, 256, backbone.device), 256)
    assert running.finite([0, *[1] * 2, *[2] * 2], 3).tolist() == [1.0, 0.0, 1.0]
