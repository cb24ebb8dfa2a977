"""A device with a stream that computes and one that communicates, on the subgraphs of several groups.

Both take their operators in the order of launches. A subgraph computes when all that it needs has been computed and
added up over the devices; then its all-reduce waits for the link.
"""

from __future__ import annotations

from collections.abc import Sequence

from weft.plan.interleave import Launch, Subgraph, early_order, launch_order, one_after_another, order_problems
from weft.simulate.timeline import COMPUTE, SEND, Span, Timeline


def run_order(order: Sequence[Launch], groups: Sequence[Sequence[Subgraph]]) -> Timeline:
    """When everything runs."""
    problems = order_problems(order, groups)
    assert not problems, problems
    computes_from = sends_from = 0.0
    done: dict[Launch, float] = {}
    spans: list[Span] = []
    for group, place in order:
        own = groups[group][place]
        start_s = max([computes_from, *(done[group, need] for need in own.needs)])
        computes_from = done[group, place] = start_s + own.compute_s
        args = {"group": group, "subgraph": place}
        spans.append(Span("compute", start_s, own.compute_s, args, lane=COMPUTE))
        if own.reduce_s:
            sends_from = max(sends_from, computes_from)
            spans.append(Span("all-reduce", sends_from, own.reduce_s, args, lane=SEND))
            sends_from = done[group, place] = sends_from + own.reduce_s
    return Timeline(tuple(sorted(spans, key=lambda span: span.start_s)))


def fastest_order(groups: Sequence[Sequence[Subgraph]]) -> list[Launch]:
    """The fastest of the orders that are known, at best one group after the other."""
    known = [one_after_another(groups), launch_order(groups), early_order(groups)]
    return min(known, key=lambda order: run_order(order, groups).makespan_s)
