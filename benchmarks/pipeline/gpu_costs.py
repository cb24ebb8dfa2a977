"""What two features cost on one GPU: gradient sums in any order, and shards.

Whole steps of the same jobs, with free sums and with ordered ones, in turn:

free_sums_cost   time of a step with free sums over that of one with ordered sums, less one
free_sums_bits   numbers of the gradients that differ when the samples of a microbatch come in another order

Shards on one GPU: other devices' slices come from pinned memory, which is slower than any link between GPUs.

shard_overlap    share of the time of gathering alone that a step does not take longer than with the whole model there
shard_bits       numbers of the adapters' gradients that differ between the two
The step is that of eight jobs in a microbatch of `capacity` tokens; half of every layer is gathered, forward and back.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from benchmarks.clock import THOROUGH, Effort, release
from benchmarks.pipeline.in_process import HostPeers
from benchmarks.pipeline.one_gpu import BATCH, DROPOUT, NUM_JOBS, RANK, OneDevice, num_unequal
from benchmarks.steps.regimes import BF16, MAIN_SHAPE, Workload
from benchmarks.steps.step import JOB, BenchJobs
from weft.adapters.adapter import Adapter
from weft.adapters.frozen import FrozenWeight, quantise
from weft.engine.execute.optimizers import optimizer_of
from weft.engine.execute.optimizers.optimizer import step_together
from weft.kernels.device_event import median_s
from weft.kernels.dropout import mix
from weft.model.backbone import Backbone
from weft.model.divided import share_layers
from weft.model.load import make_backbone, random_weight
from weft.model.packed import PackedBatch, SlotSample, pack_samples
from weft.plan.cost.shape import SHAPES, Shape
from weft.spec import AdapterSpec


def measure_free_sums(bench: OneDevice) -> dict[str, float]:
    """Keys as in `python -m benchmarks pipeline --json`."""
    backbone = bench.backbone()
    jobs = {sums: _new_adapters(backbone, sums) for sums in ("in_order", "any_order")}
    num_differing = _num_differing(bench, backbone, jobs["any_order"])
    seconds: dict[str, list[float]] = {sums: [] for sums in jobs}
    for _ in range(bench.rounds):
        for sums, adapters in jobs.items():
            seconds[sums].append(_step_s(bench, backbone, adapters))
    ordered_s, free_s = (statistics.median(seconds[sums]) for sums in ("in_order", "any_order"))
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
    return [backbone.new_adapter(spec, job, gradient_sum=sums) for job in range(NUM_JOBS)]


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
    on_slots = [
        SlotSample(sample.cut(length), slot, 1 / bench.length, mix(job, 0, index), mix(job))
        for job, slot in enumerate(slots)
        for index, sample in enumerate(bench.samples(job)[:BATCH])
    ]
    tile = backbone.path.row_tile(bench.capacity)
    return pack_samples(on_slots[::-1] if turned else on_slots, tile, bench.device)


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


NUM_DEVICES = 2


def measure_shards(
    device: torch.device, shape: Shape = SHAPES[MAIN_SHAPE], capacity: int = 8192, effort: Effort = THOROUGH
) -> dict[str, float]:
    """A step with the whole model on the device, one that gathers it, and gathering alone."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    workload = Workload((16,) * 8, (capacity // 8, capacity // 8), capacity)
    backbone = make_backbone(shape, BF16, dtype, device, kernels="fused")
    whole_s, expected = _timed_step(backbone, workload, effort)
    share_layers(backbone, HostPeers(0, NUM_DEVICES, device), lambda path: _drawn(backbone, path))
    release(device)
    shared_s, found = _timed_step(backbone, workload, effort)
    ring = backbone.ring
    assert ring is not None

    def run_empty_pass() -> None:
        ring.run_empty_pass(back=False, then_back=True)
        ring.run_empty_pass(back=True)

    gather_s = median_s(run_empty_pass, device, warmups=effort.warmups, repeats=effort.repeats)
    differing = sum(int((mine != other).sum()) for mine, other in zip(found, expected, strict=True))
    return {
        "shard_overlap": 1 - (shared_s - whole_s) / gather_s,
        "shard_bits": float(differing),
        "shard_whole_s": whole_s,
        "shard_step_s": shared_s,
        "shard_gather_s": gather_s,
        "shard_gather_gb_s": ring.gathered_bytes / gather_s / 1e9,
    }


def _timed_step(backbone: Backbone, workload: Workload, effort: Effort) -> tuple[float, list[torch.Tensor]]:
    """Seconds of a step, and the gradients of the first one."""
    jobs = BenchJobs(backbone, workload)
    try:
        backbone.launch(jobs.batch, jobs.row_tile).losses()
        grads = [group.grad.clone() for adapter in jobs.adapters for group in adapter.groups.values()]
        return median_s(jobs.step, backbone.device, **effort.times), grads
    finally:
        jobs.look()
        jobs.detach()


def _drawn(backbone: Backbone, path: str) -> FrozenWeight:
    """A linear's weight, drawn as it was when the model was built."""
    linear = backbone.linears[path]
    like = torch.empty(linear.frozen.shape, dtype=backbone.dtype, device="meta")
    return quantise(random_weight(like, f"{path}.weight", backbone.device), BF16.quantize)
