"""One linear with adapters against the frozen linear alone: forward, dX, dA and dB, timed as CUDA graph replays.

The frozen linear is two products of the GPU's own library: X Wᵀ and dY W. Every timing stands beside the relative error
of Y, dX, dA and dB against fp32, ‖found - true‖ / ‖true‖: a fast kernel that computes something else is not fast.

Shape suffixes: T rows, L rows of one job, D in, O out, R rank, P rank padded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import typer

from benchmarks.clock import QUICK, THOROUGH, Effort, in_turn_s, release
from benchmarks.figures import Figure, Kind
from benchmarks.report import (
    JsonFile,
    PlotFile,
    Quick,
    Regimes,
    check_files,
    conclude,
    measured_device,
    show,
    write_json,
)
from benchmarks.steps.regimes import MIXED_RANKS
from weft.errors import ConfigError, JobError, WeftError, closest
from weft.kernels.device import is_gpu
from weft.kernels.device_event import replayable
from weft.kernels.dropout import drop, keep_mask, module_key, row_keys
from weft.kernels.lora.expand import expand, expand_grad
from weft.kernels.lora.product import Factors, fits, product_grad_kernel, product_kernel
from weft.kernels.lora.shrink import shrink, shrink_grad
from weft.kernels.lora.tables import Entry, RowTables, SampleRows, Site, SlotTable, TableSizes, padded, row_tables
from weft.kernels.lora.weight_grad import weight_grad

SHAPES = ((4096, 4096), (4096, 14336), (14336, 4096), (5120, 5120))
"""(D, O) of the linears the geometric mean is taken over."""
NUM_TOKENS = (4096, 8192, 16384)
NUM_INPUTS = 4
"""Inputs that take turns inside a graph, so that no result lies in the cache from the time before."""
WARM_UP_S, TURN_S = 0.2, 0.1
"""Of the linear with adapters, or of the frozen one, before it is timed, and while it is."""
SCALE = 2.0
LARGEST_ERROR = 0.02
"""Products of bf16 numbers land between 1e-3 and 1e-2 of the truth; more is a wrong result."""


@dataclass(frozen=True)
class LinearCase:
    """Jobs on one linear."""

    key: str
    ranks: tuple[int, ...]
    dropout: float
    target: float


CASES = {
    case.key: case
    for case in (
        LinearCase("linear4_p0", (16,) * 4, 0.0, 1.09),
        LinearCase("linear4_p10", (16,) * 4, 0.1, 1.11),
        LinearCase("linear4_r64", (64,) * 4, 0.1, 1.15),
        LinearCase("linear32_mixed", MIXED_RANKS, 0.1, 1.15),
    )
}


def choose_cases(names: Sequence[str]) -> list[LinearCase]:
    """The named cases; without names, all."""
    for name in names:
        if name not in CASES:
            guess = closest(name, list(CASES))
            raise ConfigError(
                f"there is no figure {name!r}; accepted are {', '.join(CASES)}.",
                where="--regime",
                hint=f"Did you mean {guess}?" if guess else None,
            )
    return [case for case in CASES.values() if not names or case.key in names]


@dataclass(frozen=True)
class Job:
    """One adapter and its rows."""

    start: int
    end: int
    entry: Entry


@dataclass(frozen=True)
class Linear:
    """A linear with the adapters of some jobs, as the fast path computes it."""

    weight_OD: torch.Tensor
    jobs: tuple[Job, ...]
    site: Site
    rows: RowTables
    table: SlotTable

    def new_rank_space(self) -> torch.Tensor:
        """Room for S or dS, (T, R)."""
        return self.weight_OD.new_empty(self.rows.num_rows, self.table.rank_class)

    def forward(self, x_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Y (T, O) and S, which backward needs."""
        s_TR = self.new_rank_space()
        shrink(x_TD, s_TR, self.site, self.rows, self.table)
        if fits(self.site, x_TD, backward=False):
            return product_kernel(Factors(x_TD, self.weight_OD), s_TR, self.site, self.rows, self.table), s_TR
        y_TO = x_TD.new_empty(len(x_TD), self.site.num_out)
        expand(y_TO, s_TR, self.site, self.rows, self.table, adds=False)
        return y_TO.addmm_(x_TD, self.weight_OD.t()), s_TR

    def backward(self, dy_TO: torch.Tensor, x_TD: torch.Tensor, s_TR: torch.Tensor) -> torch.Tensor:
        """DX (T, D); adds to the gradients of every job."""
        ds_TR = self.new_rank_space()
        shrink_grad(dy_TO, ds_TR, self.site, self.rows, self.table)
        if fits(self.site, dy_TO, backward=True):
            factors = Factors(dy_TO, self.weight_OD.t())
            dx_TD = product_grad_kernel(factors, ds_TR, self.site, self.rows, self.table)
        else:
            dx_TD = dy_TO.new_empty(len(dy_TO), self.site.num_in)
            expand_grad(dx_TD, ds_TR, self.site, self.rows, self.table, adds=False)
            dx_TD.addmm_(dy_TO, self.weight_OD)
        weight_grad(x_TD, s_TR, dy_TO, ds_TR, self.site, self.rows, self.table)
        return dx_TD


def make_linear(
    case: LinearCase, num_in: int, num_out: int, num_rows: int, dtype: torch.dtype, device: torch.device
) -> Linear:
    """A random linear with the case's adapters on equal runs of rows; this is what a new fast path replaces."""
    generator = torch.Generator(device).manual_seed(num_in + num_out + num_rows)

    def normal(*shape: int, std: float = 0.02) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device).normal_(std=std, generator=generator)

    site = Site(0, (num_out,), num_in)
    table = SlotTable([site], device)
    edges = [num_rows * i // len(case.ranks) for i in range(len(case.ranks) + 1)]
    jobs, spans = [], []
    for rank, start, end in zip(case.ranks, edges, edges[1:], strict=False):
        a_PD, b_OP = normal(padded(rank), num_in), normal(num_out, padded(rank))
        a_PD[rank:], b_OP[:, rank:] = 0, 0
        grad_a_RD, grad_b_OR = torch.zeros(rank, num_in, device=device), torch.zeros(num_out, rank, device=device)
        entry = Entry(rank, a_PD, b_OP, grad_a_RD, grad_b_OR, SCALE, case.dropout, module_key("bench"))
        jobs.append(Job(start, end, entry))
        spans.append(SampleRows(start, end, table.put({0: entry})))
    keys_T = torch.from_numpy(row_keys(1, num_rows).copy()).to(device)
    rows = row_tables(spans, TableSizes(num_rows, len(spans)), keys_T)
    return Linear(normal(num_out, num_in), tuple(jobs), site, rows, table)


def relative_errors(linear: Linear, x_TD: torch.Tensor, dy_TO: torch.Tensor) -> dict[str, float]:
    """Errors of one forward and backward against fp32, the largest over the jobs."""
    for job in linear.jobs:
        job.entry.grad_a_RD.zero_()
        job.entry.grad_b_OR.zero_()
    y_TO, s_TR = linear.forward(x_TD)
    dx_TD = linear.backward(dy_TO, x_TD, s_TR)
    weight_OD = linear.weight_OD.float()
    errors = {"Y": 0.0, "dX": 0.0, "dA": 0.0, "dB": 0.0}
    for job in linear.jobs:
        own, entry = slice(job.start, job.end), job.entry
        x_LD, dy_LO = x_TD[own].float(), dy_TO[own].float()
        # The kernels read scale · B; its gradient is that of B.
        a_RD, b_OR = entry.a_PD[: entry.rank].float(), entry.b_OP[:, : entry.rank].float()
        keep_LD = keep_mask(linear.rows.keys_T[own], entry.key, x_LD.shape[1], entry.dropout)
        dropped_LD = drop(x_LD, keep_LD, entry.dropout)
        s_LR, ds_LR = dropped_LD @ a_RD.t(), dy_LO @ b_OR
        true = {
            "Y": (y_TO[own], x_LD @ weight_OD.t() + s_LR @ b_OR.t()),
            "dX": (dx_TD[own], dy_LO @ weight_OD + drop(ds_LR @ a_RD, keep_LD, entry.dropout)),
            "dA": (entry.grad_a_RD, ds_LR.t() @ dropped_LD),
            "dB": (entry.grad_b_OR, entry.scale * (dy_LO.t() @ s_LR)),
        }
        for name, (found, expected) in true.items():
            error = float((found.float() - expected).norm() / expected.norm())
            errors[name] = max(errors[name], error if math.isfinite(error) else math.inf)
    return errors


def measure_case(
    case: LinearCase,
    device: torch.device,
    dtype: torch.dtype,
    effort: Effort,
    show: Callable[[str], None],
    shapes: Sequence[tuple[int, int]] = SHAPES,
    num_tokens: Sequence[int] = NUM_TOKENS,
) -> Figure:
    """The geometric mean, over shapes and token counts, of time over the frozen linear's."""
    logs, worst = [], 0.0
    for num_in, num_out in shapes:
        for num_rows in num_tokens:
            release(device)
            linear = make_linear(case, num_in, num_out, num_rows, dtype, device)
            inputs = [_inputs(linear, number) for number in range(NUM_INPUTS)]
            errors = relative_errors(linear, *inputs[0])
            worst = max(worst, *errors.values())
            works = [replayable(work, device) for work in _turns(linear, inputs)]
            turn = {"turn_s": TURN_S, "warm_up_s": WARM_UP_S} if is_gpu(device) else {"turn_s": 0.0}
            times = in_turn_s(works, device, rounds=effort.rounds, **turn)
            ours, frozen = (seconds / NUM_INPUTS for seconds in times)
            del works
            logs.append(math.log(ours / frozen))
            found = " ".join(f"{name} {error:.1e}" for name, error in errors.items())
            show(
                f"{case.key}  {num_in}→{num_out}, {num_rows:,} tokens: {ours * 1e6:,.0f} µs over {frozen * 1e6:,.0f} "
                f"frozen = {ours / frozen:.3f}; relative errors {found}"
            )
            del linear, inputs
    if worst > LARGEST_ERROR:
        raise JobError(f"the result is wrong: relative error {worst:.1e}.", where=case.key)
    return Figure(
        case.key, math.exp(sum(logs) / len(logs)), Kind.TIME_RATIO, case.target, detail=f"errors ≤ {worst:.1e}"
    )


def _inputs(linear: Linear, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    num_out, num_in = linear.weight_OD.shape
    generator = torch.Generator(linear.weight_OD.device).manual_seed(number)
    x_TD, dy_TO = (
        linear.weight_OD.new_empty(linear.rows.num_rows, width).normal_(generator=generator)
        for width in (num_in, num_out)
    )
    return x_TD, dy_TO


def _turns(
    linear: Linear, inputs: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> tuple[Callable[[], None], Callable[[], None]]:
    """Forward and backward on every input in turn, with adapters and without."""

    def ours() -> None:
        for x_TD, dy_TO in inputs:
            _, s_TR = linear.forward(x_TD)
            linear.backward(dy_TO, x_TD, s_TR)

    def frozen() -> None:
        for x_TD, dy_TO in inputs:
            torch.mm(x_TD, linear.weight_OD.t())
            torch.mm(dy_TO, linear.weight_OD)

    return ours, frozen


def kernels(
    regime: Regimes = None,
    json: JsonFile = None,
    plot: PlotFile = None,
    quick: Quick = False,
) -> None:
    """One linear with adapters against the frozen linear, forward and backward, with the error beside each timing."""
    cases = choose_cases(regime or [])
    device = measured_device(needs_gpu=True)
    check_files(json, plot)

    effort = QUICK if quick else THOROUGH
    figures, failures = [], []
    for case in cases:
        try:
            figures.append(measure_case(case, device, torch.bfloat16, effort, show))
        except WeftError as error:
            failures.append(str(error))
            continue
        show(f"  {figures[-1].line}")
        if json is not None:
            write_json(json, {found.key: found.value for found in figures}, device)
    raise typer.Exit(conclude(figures, failures, device, plot))
