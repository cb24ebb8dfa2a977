"""Orders of stages that follow from their lead.

A stage's lead is how many microbatches it may have between their forward and their backward.

Forwards and backwards both keep the stream's order, so a stage's order is fixed by one number per backward k: how many
forwards come before it,

    before(s, k) = max m  subject to  m ≤ k + lead(s),  m ≤ the next flush after k,
                                      forward j < m waits for no backward ≥ k,  bytes of k … m - 1 ≤ memory(s),
                                      m ≤ before(s - 1, k).

GPipe's lead is unbounded, 1F1B's is S - s; without flushes the same rule fills the pipe with the next job's samples.
The last condition makes any such orders run to their end: when stage s waits for backward k, every forward that later
stages do before it has been sent. O(stages × microbatches).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from weft.errors import PlanError
from weft.plan.pipeline.stream import BatchStream
from weft.plan.program import Backward, Forward

StageOrder = list[Forward | Backward]
"""What a stage computes, in order."""


def orders_by_lead(
    stream: BatchStream,
    leads: Sequence[int],
    flushes: Sequence[int],
    held_bytes: Callable[[int, int], int],
    memory_bytes: Sequence[int] | None,
) -> list[StageOrder]:
    """Orders of all stages; `held_bytes(microbatch, stage)` counts only under a memory limit."""
    size = len(stream.microbatches)
    allowed = [_unflushed(stream, flushes)]
    for stage, lead in enumerate(leads):
        before = [min(k + lead, allowed[-1][k]) for k in range(size)]
        if memory_bytes is not None:
            before = _within(before, [held_bytes(k, stage) for k in range(size)], memory_bytes[stage], stage)
        allowed.append(before)
    return [_order(before) for before in allowed[1:]]


def _unflushed(stream: BatchStream, flushes: Sequence[int]) -> list[int]:
    """Most forwards before each backward that flushes and the jobs' own steps allow."""
    size = len(stream.microbatches)
    limits = [size] * size
    for start, end in zip((0, *flushes), flushes, strict=False):
        limits[start:end] = [end] * (end - start)
    # Forward j is after backward waits_for[j], so at most j forwards are before that one and all earlier ones.
    for j, wait in enumerate(stream.waits_for):
        if wait >= 0:
            limits[wait] = min(limits[wait], j)
    for k in range(size - 2, -1, -1):
        limits[k] = min(limits[k], limits[k + 1])
    return limits


def _within(before: list[int], held: list[int], limit: int, stage: int) -> list[int]:
    """The same counts, less what does not fit into a stage's memory."""
    end, total, result = 0, 0, []
    for k, most in enumerate(before):
        while end < most and total + held[end] <= limit:
            total += held[end]
            end += 1
        if end <= k:
            raise does_not_fit(k, stage, held[k], limit)
        result.append(end)
        total -= held[k]
    return result


def does_not_fit(microbatch: int, stage: int, held: int, limit: int) -> PlanError:
    """One microbatch is too large for a stage, so no order can help."""
    return PlanError(
        f"stage {stage}: microbatch {microbatch} keeps {held:,} bytes until its backward, and the stage has {limit:,}; "
        "use a smaller microbatch capacity or more stages."
    )


def _order(before: Sequence[int]) -> StageOrder:
    order: StageOrder = []
    done = 0
    for k, count in enumerate(before):
        order.extend(Forward(j) for j in range(done, count))
        order.append(Backward(k))
        done = max(done, count)
    return order
