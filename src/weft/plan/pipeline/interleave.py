"""Orders for interleaved 1F1B: every stage holds several slices of the model, so a microbatch passes it several times.

Microbatches go in groups of S through slice 0, then the same S through slice 1, …; backwards likewise from the last
slice to the first. Stage s warms up with 2 (S - s - 1) + (V - 1) S slice-forwards and then alternates. Between two
flushes the bubble is (S - 1) / (V · N + S - 1) for N equal microbatches, N a multiple of S; another N is planned as the
next multiple, less the microbatches that are not there: leaving some out of every list blocks nothing.
O(stages × slices × microbatches).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from weft.plan.pipeline.lead import LeadOrder
from weft.plan.program import Backward, Forward


def interleaved_orders(num_stages: int, num_chunks: int, flushes: Sequence[int]) -> list[LeadOrder]:
    """Orders of all stages for the microbatches 0 … flushes[-1] - 1, emptied at every flush."""
    orders: list[LeadOrder] = [[] for _ in range(num_stages)]
    for start, end in itertools.pairwise((0, *flushes)):
        for stage, order in enumerate(orders):
            order.extend(_window(stage, num_stages, num_chunks, start, end))
    return orders


def _window(stage: int, num_stages: int, num_chunks: int, start: int, end: int) -> LeadOrder:
    size = -(-(end - start) // num_stages) * num_stages
    visits = [
        (group + place, chunk)
        for group in range(start, start + size, num_stages)
        for chunk in range(num_chunks)
        for place in range(num_stages)
    ]
    forwards = [Forward(k, chunk) for k, chunk in visits]
    backwards = [Backward(k, num_chunks - 1 - chunk) for k, chunk in visits]
    warmup = min(len(visits), 2 * (num_stages - stage - 1) + (num_chunks - 1) * num_stages)
    order: LeadOrder = list(forwards[:warmup])
    for forward, backward in itertools.zip_longest(forwards[warmup:], backwards):
        order.extend(visit for visit in (forward, backward) if visit is not None)
    return [visit for visit in order if visit.microbatch < end]
