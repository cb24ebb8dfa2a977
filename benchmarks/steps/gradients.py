"""Gradients compared: one job beside other neighbours (`step`), the fast path beside the reference (`agreement`).

Whether a neighbour changes a job's bits: gradients of one job alone, beside 3 and 31 others, shorter ones, NaN and
wide ranks; and of one without dropout beside others with it.

The job's sample stands first when alone and last beside others, in microbatches of one capacity; beside shorter ones it
begins in the middle of a block, which it then shares. Counted are the numbers of its gradients that are not equal to
the bit.

Whether the fast path computes what the reference path does: every gradient of every job, whole steps, real widths.

Kernels are compiled separately for each class of ranks and for dropout, and a compiler can get one of them wrong. So
two layers of a shape train a step on both paths for each such class, and the largest relative error of a job's
gradient, ‖fast - reference‖ / ‖reference‖, is the figure. Both round to bf16 at points of their own, which alone makes
0.03 of difference on an H200; a kernel that was compiled wrongly made 2 and more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Annotated

import torch
import typer

from benchmarks.clock import Measured, peak_gb, release
from benchmarks.figures import Figure, Kind
from benchmarks.report import (
    JsonFile,
    check_files,
    conclude,
    measured_device,
    show,
    write_json,
)
from benchmarks.steps.regimes import BF16, BenchRun, Workload, packed_samples
from weft.adapters.adapter import Adapter
from weft.errors import ModelError
from weft.kernels.device import is_cpu
from weft.kernels.dropout import mix
from weft.model.backbone import Backbone
from weft.model.load import make_backbone
from weft.model.packed import SlotSample, pack_samples
from weft.plan.cost.shape import Shape, find_shape
from weft.spec import AdapterSpec

DROPOUT = 0.1
WIDE = 8
"""Ranks of the wide neighbour, over the job's own."""


def measure_bits(backbone: Backbone, run: BenchRun) -> Measured:
    """Differences from the job alone, by neighbourhood; 0 everywhere is the promise."""
    release(backbone.device)
    workload = run.workload
    most = len(workload.ranks) - 1
    alone, num_tokens = _gradients(backbone, workload, 0)
    found = {f"beside_{n}": _gradients(backbone, workload, n)[0] for n in sorted({min(3, most), most})}
    found["beside_shorter"] = _gradients(backbone, workload, most, shortened=True)[0]
    found["beside_nan"] = _gradients(backbone, workload, most, poison=True)[0]
    wide = replace(workload, ranks=(workload.ranks[0], *(WIDE * rank for rank in workload.ranks[1:])))
    found["beside_wide"] = _gradients(backbone, wide, 1)[0]
    differing = {f"differing_{name}": float(_num_differing(alone, grads)) for name, grads in found.items()}
    plain = [_gradients(backbone, workload, number, own_dropout=0.0)[0] for number in (0, most)]
    differing["differing_beside_dropout"] = float(_num_differing(*plain))
    detail = ", ".join(f"{name.replace('_', ' ')} {count:,.0f}" for name, count in differing.items())
    total = sum(differing.values())
    text = f"of {alone.numel():,} numbers {detail}"
    return Measured(
        num_tokens, workload.capacity, 1.0, peak_gb(backbone.device), text, {"differing": total, **differing}
    )


def _num_differing(one: torch.Tensor, other: torch.Tensor) -> int:
    return int((one.view(torch.int32) != other.view(torch.int32)).sum())


def _gradients(
    backbone: Backbone,
    workload: Workload,
    num_neighbours: int,
    *,
    shortened: bool = False,
    poison: bool = False,
    own_dropout: float = DROPOUT,
) -> tuple[torch.Tensor, int]:
    """All gradients of the first job of the workload after one microbatch, and the tokens in it."""
    samples = packed_samples(workload, backbone.vocabulary)
    row_tile = backbone.path.row_tile(workload.capacity)
    slots: list[int] = []
    on_slots: list[SlotSample] = []
    try:
        # The job itself comes last.
        for job in reversed(range(num_neighbours + 1)):
            adapter = _adapter(backbone, workload, job, DROPOUT if job else own_dropout)
            if poison and job:
                adapter.groups["b"].params.fill_(torch.nan)
                adapter.changed()
            slots.append(backbone.attach(adapter))
            own = [s.cut(s.length - s.length // 7) if shortened and job else s for s in samples[job]]
            on_slots += [SlotSample(s, slots[-1], 1e-3, mix(job, 0, i)) for i, s in enumerate(own)]
        batch = pack_samples(on_slots, row_tile, backbone.device)
        losses = backbone.forward_backward(batch, row_tile)
        if poison and math.isfinite(losses[0]):
            raise ModelError("the planted NaN did not reach its own job's loss.", where="benchmarks step")
        return torch.cat([group.grad for group in adapter.groups.values()]), batch.num_tokens
    finally:
        for slot in slots:
            backbone.detach(slot)


def _adapter(backbone: Backbone, workload: Workload, job: int, dropout: float) -> Adapter:
    """With a random B: a B of zeros would hide every difference in the gradient of A."""
    spec = AdapterSpec(r=workload.ranks[job], lora_dropout=dropout, init_lora_weights=False)
    return backbone.new_adapter(spec, job)


KEY = "agreement"
RANKS = ((8, 16), (20, 32), (8, 64), (16, 64, 256))
"""Each is a class of launches by itself: narrow, up to 32, up to 64, and wide."""
LAYERS, LENGTHS, CAPACITY = 2, (100, 180), 1024
LARGEST_ERROR = 0.05


def measure_agreement(shape: Shape, dtype: torch.dtype, device: torch.device, show: Callable[[str], None]) -> Figure:
    """The largest error over all classes of ranks, without dropout and with it."""
    small = replace(shape, layers=LAYERS)
    worst, where = 0.0, ""
    narrowest = shape.kv_heads * shape.head_size
    for wanted in RANKS:
        ranks = tuple(min(rank, narrowest) for rank in wanted)
        for dropout in (0.0, 0.1):
            workload = Workload(ranks, LENGTHS, CAPACITY, dropout)
            fast, reference = (
                _gradients_by_path(small, workload, dtype, device, path) for path in ("fused", "reference")
            )
            errors = [_error(found, true) for found, true in zip(fast, reference, strict=True)]
            show(f"{KEY}  ranks {ranks}, dropout {dropout}: " + ", ".join(f"{error:.1e}" for error in errors))
            if max(errors) > worst:
                worst, where = max(errors), f"ranks {ranks}, dropout {dropout}"
    return Figure(KEY, worst, Kind.ERROR, LARGEST_ERROR, detail=f"largest at {where}")


def _error(found: torch.Tensor, true: torch.Tensor) -> float:
    error = float((found - true).norm() / true.norm())
    return error if error == error else float("inf")


def _gradients_by_path(
    shape: Shape, workload: Workload, dtype: torch.dtype, device: torch.device, kernels: str
) -> list[torch.Tensor]:
    """The gradient of A and of B of every job after one microbatch, each by itself."""
    release(device)
    backbone = make_backbone(shape, BF16, dtype, device, kernels)
    row_tile = backbone.path.row_tile(workload.capacity)
    adapters = [_dropping_adapter(backbone, workload, job) for job in range(len(workload.ranks))]
    slots = [backbone.attach(adapter) for adapter in adapters]
    samples = packed_samples(workload, backbone.vocabulary)
    on_slots = [
        SlotSample(sample, slots[job], 1e-3, mix(job, 0, i))
        for job, own in enumerate(samples)
        for i, sample in enumerate(own)
    ]
    backbone.forward_backward(pack_samples(on_slots, row_tile, device), row_tile)
    return [group.grad.clone() for adapter in adapters for group in adapter.groups.values()]


def _dropping_adapter(backbone: Backbone, workload: Workload, job: int) -> Adapter:
    """With a random B: a B of zeros would hide what is wrong with the gradient of A."""
    # Every other job drops inputs: a kernel has both ways inside.
    dropout = workload.dropout if job % 2 == 0 else 0.0
    return backbone.new_adapter(AdapterSpec(r=workload.ranks[job], lora_dropout=dropout, init_lora_weights=False), job)


def agreement(
    model: Annotated[str, typer.Option(help="The shape whose widths are used, for two of its layers.")] = "tiny",
    json: JsonFile = None,
) -> None:
    """The fast path's gradients against the reference path's, for every kind of launch."""
    shape = find_shape(model)
    check_files(json, None)
    device = measured_device(needs_gpu=False)

    dtype = torch.float32 if is_cpu(device) else torch.bfloat16
    found = measure_agreement(shape, dtype, device, show)
    if json is not None:
        write_json(json, {found.key: found.value}, device)
    raise typer.Exit(conclude([found], [], device, None))
