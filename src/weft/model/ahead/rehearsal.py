"""Runs all that a run's jobs will launch on a model without numbers, so that its kernels are known before its weights.

The same lines as in training: the fused step, the loss, the optimizer. On the meta device they cost next to nothing,
and every launch is noted instead of made (`kernels/recorded.py`). Two parts: what the first steps and evaluations of
all jobs need, then what is needed besides when some of the jobs have ended.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, combinations, product

import torch

from weft.kernels.adamw import ParameterLane, Update, adamw
from weft.kernels.fixed_words import Words, collect
from weft.kernels.layers.cross_entropy import cross_entropy_rows
from weft.kernels.lora.tables import ANY_ORDER, Needs, rank_classes
from weft.kernels.recorded import RecordedLaunch, recorded_launches
from weft.methods.registry import METHODS
from weft.model.ahead.request import KernelRequest
from weft.model.ahead.skeleton import META, skeleton, skeleton_head
from weft.model.fused.attention import needs_bounds
from weft.model.fused.inputs import MIN_LONGEST, MIN_SPANS, Inputs, InputShape
from weft.model.fused.model import ROLES, FusedModel
from weft.model.fused.step import run_backward, run_forward
from weft.model.loss import BlockedLoss
from weft.model.path import Memory
from weft.plan.cost.memory import LOSS_ROWS
from weft.plan.cost.rows import GPU_ROW_TILE


def rehearse(request: KernelRequest) -> tuple[list[RecordedLaunch], list[RecordedLaunch]]:
    """What all jobs together launch, and what else some of them do without the others."""
    whole = Needs.of(request.ranks, drops=request.drops, others=request.others)
    first = recorded_launches(request.gpu, lambda: _run(request, [whole]))
    later = recorded_launches(request.gpu, lambda: _run(request, all_needs(request.ranks, drops=request.drops)))
    known = set(first)
    return first, [launch for launch in later if launch not in known]


def all_needs(ranks: Sequence[int], *, drops: bool) -> list[Needs]:
    """What any of the adapters may ask for together, as jobs come and go."""
    # The widest of a class stands for all of it.
    kinds = sorted({rank_classes([rank])[-1] for rank in ranks})
    groups = chain.from_iterable(combinations(kinds, number) for number in range(1, len(kinds) + 1))
    found = [Needs.of(group, drops=dropped) for group in groups for dropped in {False, drops}]
    return list(dict.fromkeys(found))


def _run(request: KernelRequest, needs: Sequence[Needs]) -> None:
    dtype = getattr(torch, request.dtype)
    model = skeleton(request.config, dtype, request.quantize, request.tensor)
    for asked in needs:
        for shape in _shapes(asked):
            _step(model, shape, asked, Memory(request.recompute))  # type: ignore[arg-type]
    linears = [(size, site.num_in) for site in model.sites for size in site.sizes if site.role in ROLES]
    for method, rank in request.copies:
        METHODS[method].compile_copy(rank, linears, torch.empty(0, dtype=dtype, device=META))
    loss = BlockedLoss(skeleton_head(request.config, dtype), LOSS_ROWS, cross_entropy_rows)
    hidden_ND = torch.empty(LOSS_ROWS, model.hidden, dtype=dtype, device=META)
    targets_N, weights_N = torch.empty(LOSS_ROWS, dtype=torch.int64, device=META), torch.empty(LOSS_ROWS, device=META)
    loss(hidden_ND, targets_N, weights_N)
    loss(hidden_ND, targets_N)
    for number, num_lanes in product(_numbers_of_jobs(request.num_jobs), request.lanes):
        _step_jobs(number, num_lanes)
    if ANY_ORDER in request.others:
        sums_P = torch.empty(16, device=META)
        collect(Words.of_nothing(sums_P), sums_P)


def _shapes(needs: Needs) -> Iterator[InputShape]:
    """Of a training microbatch, and of an evaluation's, which drops nothing, where that is another one's kernels."""
    longest = MIN_LONGEST if needs_bounds(META) else 0
    for drops in {True, not needs.drops}:
        yield InputShape(GPU_ROW_TILE, 2 * MIN_SPANS, longest, is_adapted=True, drops=drops)


def _step(model: FusedModel, shape: InputShape, needs: Needs, memory: Memory) -> None:
    """Forward and back."""
    table = model.table()
    table.needs = needs
    inputs = Inputs(shape, torch.empty(shape.layout["end"][0], dtype=torch.int32, device=META))
    passed = run_forward(model, inputs, table, None, memory, needs_grad=True)
    run_backward(passed, torch.empty_like(passed.left_TD))


def _numbers_of_jobs(most: int) -> list[int]:
    """One for each size of the optimizer's tables."""
    return [1, *(2**power for power in range(6, most.bit_length() + 1) if 2 ** (power - 1) < most)]


def _step_jobs(number: int, num_lanes: int) -> None:
    buffer_P = torch.empty(64, device=META)
    lane = ParameterLane(buffer_P, buffer_P, buffer_P, buffer_P, 1e-3)
    adamw([Update((lane,) * num_lanes, 1, (0.9, 0.999), 1e-8, 0.0, 1.0, True)] * number)
