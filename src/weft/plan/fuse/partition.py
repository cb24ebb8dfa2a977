"""Which tasks run as one batch: the partition into fused tasks with the least end-to-end latency.

Problem: tasks sorted by tokens, ties by name. min over m and cut points 0 = c_0 < c_1 < … < c_m = n of

    L(H_1) + Σ_{j≥2} C · mean_s p_s(H_j)      subject to every H_j = tasks c_{j−1} … c_j − 1 fitting in memory

The first fused task fills and drains the pipeline; each further one adds its average pass per stage to the steady
phase, once per microbatch. F(i, j), the least for the first i tasks in j fused tasks, has optimal substructure:

    F(i, 1) = L(H_{0..i}),   F(i, j) = min_{l < i} F(l, j − 1) + C · mean_s p_s(H_{l..i})

Complexity: n² / 2 intervals priced once (fewer where memory ends them: what holds more samples holds more bytes), then
O(n² · m) additions in numpy. Tests prove that the result equals the best of all 2^(n−1) partitions into neighbours. A
partition of tasks that are no neighbours may be better where memory binds: that is bin packing, and not searched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weft.errors import PlanError
from weft.plan.fuse.tasks import FusedTask, FuseTask, Pipe, check_tasks

CostTable = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Fusion:
    """A partition of tasks into fused tasks."""

    fused: tuple[FusedTask, ...]
    """From the fewest tokens per task upward."""
    latency_s: float
    """F(n, m): predicted for one global batch of every task."""


def fuse(tasks: Sequence[FuseTask], pipe: Pipe) -> Fusion:
    """The partition of least predicted latency; among equals the one with the fewest fused tasks."""
    return min(fuse_by_count(tasks, pipe), key=lambda f: (f.latency_s, len(f.fused)))


def fuse_by_count(tasks: Sequence[FuseTask], pipe: Pipe) -> tuple[Fusion, ...]:
    """The best partition into 1, 2, …, n fused tasks, without the counts that memory forbids."""
    check_tasks(tasks)
    ordered = sorted(tasks, key=lambda t: (t.num_tokens, t.job))
    first_N, added_NN = _price(ordered, pipe)
    rows, choices = [first_N], []
    for _ in range(1, len(ordered)):
        # Row l, column i: the first l + 1 tasks are done, one more fused task holds l + 1 … i.
        through_NN = rows[-1][:-1, None] + added_NN[1:, :]
        choice_N = np.argmin(through_NN, axis=0)
        choices.append(choice_N)
        rows.append(through_NN[choice_N, np.arange(len(ordered))])
    return tuple(
        Fusion(_trace(ordered, choices[:count]), float(row_N[-1]))
        for count, row_N in enumerate(rows)
        if np.isfinite(row_N[-1])
    )


def _price(ordered: Sequence[FuseTask], pipe: Pipe) -> tuple[CostTable, CostTable]:
    """L of tasks 0 … i, and C · mean pass of tasks l … i; infinite where they do not fit or l > i."""
    num_tasks = len(ordered)
    first_N = np.full(num_tasks, np.inf)
    added_NN = np.full((num_tasks, num_tasks), np.inf)
    for low in range(num_tasks):
        for high in range(low, num_tasks):
            fused = FusedTask(tuple(ordered[low : high + 1]))
            if not pipe.fits(fused):
                if low == high:
                    raise PlanError(
                        f"one microbatch of {fused.num_tokens} tokens does not fit in the stages' free bytes "
                        f"{pipe.free_bytes}; use smaller microbatches.",
                        where=ordered[low].job,
                    )
                break
            passes_s = pipe.passes_s(fused)
            added_NN[low, high] = pipe.num_microbatches * sum(passes_s) / pipe.num_stages
            if low == 0:
                first_N[high] = pipe.latency_s(passes_s)
    return first_N, added_NN


def _trace(ordered: Sequence[FuseTask], choices: Sequence[npt.NDArray[np.intp]]) -> tuple[FusedTask, ...]:
    """The fused tasks behind F(n, len(choices) + 1), from the last cut back to the first."""
    fused: list[FusedTask] = []
    last = len(ordered) - 1
    for choice_N in reversed(choices):
        cut = int(choice_N[last])
        fused.append(FusedTask(tuple(ordered[cut + 1 : last + 1])))
        last = cut
    fused.append(FusedTask(tuple(ordered[: last + 1])))
    return tuple(reversed(fused))
