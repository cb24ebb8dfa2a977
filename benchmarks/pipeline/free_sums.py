"""What free sums of gradients cost on a GPU beside ordered ones: whole steps of the same jobs, in turn.

free_sums_cost   time of a step with free sums over that of one with ordered sums, less one
free_sums_bits   numbers of the gradients that differ when the samples of a microbatch come in another order
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from benchmarks.pipeline.passes import BATCH, DROPOUT, NUM_JOBS, RANK, OneDevice, num_unequal
from benchmarks.steps.step import JOB
from weft.adapters.adapter import Adapter
from weft.engine.execute.optimizers.registry import optimizer_of
from weft.engine.execute.optimizers.step_together import step_together
from weft.kernels.dropout import mix
from weft.kernels.timing import median_s
from weft.model.backbone import Backbone
from weft.model.packed import PackedBatch, Placed, pack_samples
from weft.spec import AdapterSpec


def measure_free_sums(bench: OneDevice) -> dict[str, float]:
    """Keys as in `python -m benchmarks pipeline --json`."""
    backbone = bench.backbone()
    jobs = {sums: _new_adapters(backbone, sums) for sums in ("ordered", "free")}
    num_differing = _num_differing(bench, backbone, jobs["free"])
    seconds: dict[str, list[float]] = {sums: [] for sums in jobs}
    for _ in range(bench.rounds):
        for sums, adapters in jobs.items():
            seconds[sums].append(_step_s(bench, backbone, adapters))
    ordered_s, free_s = (statistics.median(seconds[sums]) for sums in ("ordered", "free"))
    return {"free_sums_cost": free_s / ordered_s - 1, "free_sums_bits": float(num_differing)}


def _step_s(bench: OneDevice, backbone: Backbone, adapters: Sequence[Adapter]) -> float:
    """Seconds of a step. No other jobs are there: kernels that never meet free sums are leaner."""
    optimizers = [optimizer_of(adapter, JOB) for adapter in adapters]
    row_tile = backbone.path.row_tile(bench.capacity)
    with _seated(backbone, adapters) as slots:
        batch = _packed(bench, backbone, slots)

        def step() -> None:
            backbone.launch(batch, row_tile)
            for adapter in adapters:
                adapter.complete_gradients()
            step_together(optimizers, [True] * len(optimizers))()

        return median_s(step, bench.device, warmups=1, repeats=3)


def _new_adapters(backbone: Backbone, sums: str) -> list[Adapter]:
    spec = AdapterSpec(r=RANK, lora_dropout=DROPOUT, init_lora_weights=False)
    return [backbone.new_adapter(spec, job, sums=sums) for job in range(NUM_JOBS)]


@contextmanager
def _seated(backbone: Backbone, adapters: Sequence[Adapter]) -> Iterator[list[int]]:
    slots = [backbone.attach(adapter) for adapter in adapters]
    try:
        yield slots
    finally:
        for slot in slots:
            backbone.detach(slot)


def _packed(bench: OneDevice, backbone: Backbone, slots: Sequence[int], *, turned: bool = False) -> PackedBatch:
    """A microbatch with as many samples of every job as one has room for, of a quarter of the usual length."""
    length = bench.length // BATCH
    placed = [
        Placed(sample.cut(length), slot, 1 / bench.length, mix(job, 0, index), mix(job))
        for job, slot in enumerate(slots)
        for index, sample in enumerate(bench.samples(job)[:BATCH])
    ]
    tile = backbone.path.row_tile(bench.capacity)
    return pack_samples(placed[::-1] if turned else placed, tile, bench.device)


def _num_differing(bench: OneDevice, backbone: Backbone, adapters: Sequence[Adapter]) -> int:
    """Numbers of the gradients that depend on the order of samples."""
    found: list[list[torch.Tensor]] = []
    with _seated(backbone, adapters) as slots:
        for turned in (False, True):
            batch = _packed(bench, backbone, slots, turned=turned)
            backbone.forward_backward(batch, backbone.path.row_tile(bench.capacity))
            for adapter in adapters:
                adapter.complete_gradients()
            found.append([group.grad.clone() for adapter in adapters for group in adapter.groups.values()])
            for adapter in adapters:
                adapter.zero_grad()
    assert all(bool(grad.any()) for grad in found[0]), "nothing was learnt"
    return sum(num_unequal(one, other) for one, other in zip(*found, strict=True))
