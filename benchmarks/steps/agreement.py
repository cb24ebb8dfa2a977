"""Whether the fast path computes what the reference path does: every gradient of every job, whole steps, real widths.

Kernels are compiled anew for each class of ranks and for dropout, and a compiler can get one of them wrong. So two
layers of a shape train a step on both paths for each such class, and the largest relative error of a job's gradient,
‖fast - reference‖ / ‖reference‖, is the figure. Both round to bf16 in places of their own, which alone makes 0.03 of
difference on an H200; a kernel that was compiled wrongly made 2 and more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from benchmarks.clock import release
from benchmarks.figures import Figure, Kind
from benchmarks.steps.regimes import BF16, Workload
from benchmarks.steps.samples import packed_samples
from weft.adapters.adapter import Adapter
from weft.kernels.dropout import mix
from weft.model.backbone import Backbone
from weft.model.packed import Placed, pack_samples
from weft.model.random_model import make_backbone
from weft.plan.cost.published_shapes import Shape
from weft.spec import AdapterSpec

KEY = "agreement"
RANKS = ((8, 16), (20, 32), (8, 64), (16, 64, 256))
"""Each is a class of launches by itself: narrow, up to 32, up to 64, and wide."""
LAYERS, LENGTHS, CAPACITY = 2, (100, 180), 1024
LARGEST_ERROR = 0.05


def measure_agreement(shape: Shape, dtype: torch.dtype, device: torch.device, say: Callable[[str], None]) -> Figure:
    """The largest error over all classes of ranks, without dropout and with it."""
    small = replace(shape, layers=LAYERS)
    worst, where = 0.0, ""
    narrowest = shape.kv_heads * shape.head_size
    for wanted in RANKS:
        ranks = tuple(min(rank, narrowest) for rank in wanted)
        for dropout in (0.0, 0.1):
            workload = Workload(ranks, LENGTHS, CAPACITY, dropout)
            fast, reference = (_gradients(small, workload, dtype, device, path) for path in ("fused", "reference"))
            errors = [_error(found, true) for found, true in zip(fast, reference, strict=True)]
            say(f"{KEY}  ranks {ranks}, dropout {dropout}: " + ", ".join(f"{error:.1e}" for error in errors))
            if max(errors) > worst:
                worst, where = max(errors), f"ranks {ranks}, dropout {dropout}"
    return Figure(KEY, worst, Kind.ERROR, LARGEST_ERROR, detail=f"largest at {where}")


def _error(found: torch.Tensor, true: torch.Tensor) -> float:
    error = float((found - true).norm() / true.norm())
    return error if error == error else float("inf")


def _gradients(
    shape: Shape, workload: Workload, dtype: torch.dtype, device: torch.device, kernels: str
) -> list[torch.Tensor]:
    """The gradient of A and of B of every job after one microbatch, each by itself."""
    release(device)
    backbone = make_backbone(shape, BF16, dtype, device, kernels)
    row_tile = backbone.path.row_tile(workload.capacity)
    adapters = [_adapter(backbone, workload, job) for job in range(len(workload.ranks))]
    slots = [backbone.attach(adapter) for adapter in adapters]
    samples = packed_samples(workload, backbone.vocabulary)
    placed = [
        Placed(sample, slots[job], 1e-3, mix(job, 0, i))
        for job, own in enumerate(samples)
        for i, sample in enumerate(own)
    ]
    backbone.forward_backward(pack_samples(placed, row_tile, device), row_tile)
    return [group.grad.clone() for adapter in adapters for group in adapter.groups.values()]


def _adapter(backbone: Backbone, workload: Workload, job: int) -> Adapter:
    """With a random B: a B of zeros would hide what is wrong with the gradient of A."""
    # Every other job drops inputs: a kernel has both ways inside.
    dropout = workload.dropout if job % 2 == 0 else 0.0
    return backbone.new_adapter(AdapterSpec(r=workload.ranks[job], lora_dropout=dropout, init_lora_weights=False), job)
