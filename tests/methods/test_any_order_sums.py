"""gradient_sum any_order: the same bits for any order of samples, any cut and any neighbours, for every method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from test_methods import CASE_NAMES, VARIANTS, me, neighbours
from tiny_models import Job, assert_same_bits, flat, job_spec, random_backbone, random_data, train

from weft.data.dataset import JobData
from weft.data.samples import Samples
from weft.engine.execute.local import LocalExecutor
from weft.engine.execute.protocol import MicrobatchWork, NewJob, StepOrder, StepsWork
from weft.engine.jobs.live_job import LiveJob
from weft.errors import ConfigError
from weft.model.backbone import Backbone
from weft.objectives.heads import Classification
from weft.objectives.preference import Dpo
from weft.plan.types import Microbatch, Segment

STEPS = 3


def free(job: Job) -> Job:
    return replace(job[0], gradient_sum="any_order"), job[1]


def shuffled_run(backbone: Backbone, job: Job, seed: int | None, per_microbatch: int = 3) -> list[torch.Tensor]:
    """The adapter, and every step's gradients, of a job that trains with the groups of each global batch in an order
    drawn from the seed, or in its own."""
    spec, data = job
    executor = LocalExecutor(backbone)
    batches = LiveJob(spec, data).progress.batches
    executor.add(NewJob(spec, batches, None))
    executor.seat(spec.name)
    gradients: list[torch.Tensor] = []
    for step in range(STEPS):
        lengths = batches.lengths(step)
        size = data.train.objective.group_size
        groups = [range(start, start + size) for start in range(0, len(lengths), size)]
        order = range(len(groups)) if seed is None else np.random.default_rng(seed + step).permutation(len(groups))
        for cut in range(0, len(groups), per_microbatch):
            members = [i for group in order[cut : cut + per_microbatch] for i in groups[group]]
            segments = tuple(Segment(spec.name, step, i, int(lengths[i])) for i in members)
            executor.wait(executor.start(MicrobatchWork(Microbatch(segments), executor.row_tile(64))))
        adapter = executor.jobs[spec.name].weights.adapter
        adapter.complete_gradients()
        gradients += [group.grad.clone() for group in adapter.groups.values()]
        executor.wait(executor.start(StepsWork((StepOrder(spec.name, 1e-2, True),), None)))
    found = flat(executor.adapter_of(spec.name))
    executor.unseat(spec.name)
    executor.drop(spec.name)
    return [*found, *gradients]


def same(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> bool:
    return all(x.equal(y) for x, y in zip(left, right, strict=True))


def assert_order_matters_only_where_sums_are_ordered(backbone: Backbone, job: Job) -> None:
    mine = shuffled_run(backbone, free(job), None)
    for seed, per_microbatch in ((1, 3), (2, 7)):
        assert same(shuffled_run(backbone, free(job), seed, per_microbatch), mine)
    ordered = shuffled_run(backbone, job, None)
    assert not same(shuffled_run(backbone, job, 1), ordered), "sums in order do depend on it"
    for x, y in zip(mine, ordered, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", [*CASE_NAMES, *VARIANTS])
def test_any_order_sums_when_samples_are_permuted_and_cut_otherwise_then_no_bit_changes(case):
    # With an epsilon above the rounding, sums in any order and in order lead to about the same.
    backbone, job = random_backbone("llama_bias"), me(case, global_batch_size=7, adam_epsilon=1e-3)
    assert_order_matters_only_where_sums_are_ordered(backbone, job)


def labelled(data: JobData) -> JobData:
    samples = [sample.labelled_end(i % 3) for i, sample in enumerate(data.train.samples)]
    return JobData(replace(data.train, objective=Classification(("a", "b", "c")), samples=Samples.of(samples)), None)


OTHERS: dict[str, tuple[dict[str, Any], Any]] = {
    "pairs": ({"r": 4, "lora_dropout": 0.2}, lambda data: JobData(replace(data.train, objective=Dpo(0.3)), None)),
    "head": ({"method": "ia3"}, labelled),
    "tied rows": ({"r": 4, "trainable_token_indices": (9, 4, 30, 5)}, lambda data: data),
}


@pytest.mark.parametrize("case", OTHERS)
def test_any_order_sums_when_gradients_come_in_other_ways_then_no_bit_changes(case):
    """What does not come to an adapter's gradients by way of a module."""
    adapter, change = OTHERS[case]
    backbone = random_backbone("gemma2" if case == "tied rows" else "llama_bias")
    job = (
        job_spec("me", adapter=adapter, global_batch_size=6, seed=3),
        change(random_data(3, num_samples=24, lengths=(3, 30))),
    )
    mine = shuffled_run(backbone, free(job), None)
    assert same(shuffled_run(backbone, free(job), 1), mine) and same(shuffled_run(backbone, free(job), 2, 2), mine)
    assert not same(shuffled_run(backbone, job, 1), shuffled_run(backbone, job, None))


def test_any_order_sums_when_samples_are_long_then_no_bit_changes():
    """From 512 rows on, a product in fp32 that is added to a buffer is not a sum of its own."""
    backbone = random_backbone("llama_bias", max_position_embeddings=1024)
    spec = job_spec("me", adapter={"r": 4}, global_batch_size=4, seed=3, max_length=1024)
    job = free((spec, random_data(3, num_samples=12, lengths=(400, 700))))
    assert same(shuffled_run(backbone, job, 1, 2), shuffled_run(backbone, job, None, 4))


def test_job_when_sums_are_free_then_capacities_and_neighbours_change_no_bit():
    backbone = random_backbone("llama_bias")
    job = free(me("dora"))
    alone = train(backbone, [job])["me"]
    for capacity in (40, 96, 256):
        assert_same_bits(alone, train(backbone, [job], capacity=capacity)["me"])
    others = neighbours()
    together = train(backbone, [others[0], job, *map(free, others[1:])])
    assert_same_bits(alone, together["me"])
    assert_same_bits(together["lora"], train(backbone, others[:1])["lora"])


def seated(backbone: Backbone, job: Job) -> tuple[LocalExecutor, MicrobatchWork]:
    """A job that may train, and its first global batch."""
    spec, data = job
    executor = LocalExecutor(backbone)
    executor.add(NewJob(spec, LiveJob(spec, data).progress.batches, None))
    executor.seat(spec.name)
    lengths = executor.jobs[spec.name].given.batches.lengths(0)
    segments = tuple(Segment(spec.name, 0, i, int(length)) for i, length in enumerate(lengths))
    return executor, MicrobatchWork(Microbatch(segments), executor.row_tile(64))


@pytest.mark.parametrize(
    ("model", "kernels", "sums", "adapter"),
    [
        ("llama_bias", "reference", "any_order", {"r": 4}),
        ("llama_bias", "fused", "any_order", {"r": 4}),
        ("gemma2", "reference", "ordered", {"r": 4, "trainable_token_indices": (9, 4, 30, 5)}),
    ],
    ids=["reference", "fused", "tied rows"],
)
def test_gradient_when_the_step_empties_only_its_buffers_then_has_nothing_of_the_batch_before(
    model, kernels, sums, adapter
):
    """As those of 8 bits do, and all of a GPU."""
    spec = job_spec("me", adapter=adapter, global_batch_size=6, optim="adamw_8bit", gradient_sum=sums)
    executor, work = seated(random_backbone(model, kernels=kernels), (spec, random_data(3)))
    own, found = executor.jobs["me"].weights.adapter, []
    for _ in range(2):
        executor.wait(executor.start(work))
        own.complete_gradients()
        found.append([group.grad.clone() for group in own.groups.values()])
        executor.wait(executor.start(StepsWork((StepOrder("me", 0.0, True),), None)))
    assert same(*found) and any(grad.any() for grad in found[0])


@pytest.mark.parametrize("kernels", ["reference", "fused"])
def test_sums_when_the_gradient_of_all_replicas_has_come_then_begin_again(kernels):
    executor, work = seated(random_backbone("llama_bias", kernels=kernels), free(me("lora", global_batch_size=3)))
    adapter = executor.jobs["me"].weights.adapter
    executor.wait(executor.start(work))
    assert any(words.fine_P.any() for words in adapter.any_order_sums().values())
    adapter.write_gradients({name: torch.ones_like(group.grad) for name, group in adapter.groups.items()})
    assert not any(words.fine_P.any() for words in adapter.any_order_sums().values())
    adapter.complete_gradients()
    assert all((group.grad == 1).all() for group in adapter.groups.values())


@pytest.mark.parametrize("index", [0, 4, 6])
def test_step_when_one_samples_gradient_is_not_finite_then_is_left_out_and_the_next_is_taken(index, monkeypatch):
    """At any index: integers have no NaN."""
    executor, work = seated(random_backbone("llama_bias"), free(me("lora", global_batch_size=7)))
    adapter = executor.jobs["me"].weights.adapter
    module = next(iter(adapter.modules.values()))
    take, taken = module.any_order_sums.take_sample, []

    def spoilt() -> None:
        if len(taken) == index:
            module.grad_b_OR[0, 0] = torch.nan
        taken.append(index)
        take()

    monkeypatch.setattr(module.any_order_sums, "take_sample", spoilt)
    before = flat(executor.adapter_of("me"))
    order = StepsWork((StepOrder("me", 1e-2, True),), None)
    executor.wait(executor.start(work))
    (updated,) = executor.wait(executor.start(order))
    assert updated.skipped and same(flat(executor.adapter_of("me")), before) and len(taken) == 7
    executor.wait(executor.start(work))
    (updated,) = executor.wait(executor.start(order))
    assert not updated.skipped and not same(flat(executor.adapter_of("me")), before)


@pytest.mark.parametrize("adapter", [{"r": 4, "lora_dropout": 0.2}, {"r": 3, "freeze_a": True}], ids=["lora", "fa"])
def test_any_order_sums_when_kernels_are_fused_then_no_order_and_no_cut_changes_a_bit(adapter):
    backbone = random_backbone("llama_bias", kernels="fused")
    spec = job_spec("me", adapter=adapter, global_batch_size=7, adam_epsilon=1e-3, seed=3)
    job = (spec, random_data(3, num_samples=24, lengths=(3, 30)))
    assert_order_matters_only_where_sums_are_ordered(backbone, job)


def test_any_order_sums_when_kernels_are_fused_then_neighbours_of_both_kinds_keep_their_bits():
    backbone = random_backbone("llama_bias", kernels="fused")
    one, other = me("lora"), (job_spec("other", adapter={"r": 12}, seed=5), random_data(5))
    together = train(backbone, [free(one), other])
    assert_same_bits(train(backbone, [free(one)])["me"], together["me"])
    assert_same_bits(train(backbone, [other])["other"], together["other"])


def test_any_order_sums_when_the_fused_kernels_cannot_make_them_then_are_refused_in_a_sentence():
    spec, data = free((job_spec("me", adapter={"method": "ia3"}), random_data(0)))
    executor = LocalExecutor(random_backbone("llama_bias", kernels="fused"))
    with pytest.raises(
        ConfigError, match=r"gradient_sum: any_order has fused kernels for lora only, not for ia3; use in_"
    ):
        executor.add(NewJob(spec, LiveJob(spec, data).progress.batches, None))
    assert not executor.jobs
