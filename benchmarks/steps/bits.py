"""Whether a neighbour changes a job's bits: gradients of one job alone, beside 3 and 31 others, shorter ones, NaN and
wide ranks; and of one without dropout beside others with it.

The job's sample stands first when alone and last beside others, in microbatches of one capacity; beside shorter ones it
begins in the middle of a block, which it then shares. Counted are the numbers of its gradients that are not equal to
the bit.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from benchmarks.clock import Measured, peak_gb, release
from benchmarks.steps.regimes import BenchRun, Workload
from benchmarks.steps.samples import packed_samples
from weft.adapters.adapter import Adapter
from weft.errors import ModelError
from weft.kernels.dropout import mix
from weft.model.backbone import Backbone
from weft.model.packed import Placed, pack_samples
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
    placed: list[Placed] = []
    try:
        # The job itself comes last.
        for job in reversed(range(num_neighbours + 1)):
            adapter = _adapter(backbone, workload, job, DROPOUT if job else own_dropout)
            if poison and job:
                adapter.groups["b"].params.fill_(torch.nan)
                adapter.changed()
            slots.append(backbone.attach(adapter))
            own = [s.cut(s.length - s.length // 7) if shortened and job else s for s in samples[job]]
            placed += [Placed(s, slots[-1], 1e-3, mix(job, 0, i)) for i, s in enumerate(own)]
        batch = pack_samples(placed, row_tile, backbone.device)
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
