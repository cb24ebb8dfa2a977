"""A device with a stream that computes and one that communicates, on the subgraphs of several groups.

Both take their operators in the order of launches. A subgraph computes when all that it needs has been computed and
added up over the devices; then its all-reduce waits for the link. `PairTimes` predicts with it what two microbatches
take that run side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from weft.plan.cost.analytic import AnalyticCost
from weft.plan.cost.learned import MeasuredPairs
from weft.plan.cost.operators import layer_graph
from weft.plan.interleave import Launch, Subgraph, between_sums, in_turns, order_problems
from weft.plan.simulate.timeline import COMPUTE, SEND, Span, Timeline


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


@dataclass(frozen=True)
class PairTimes:
    """What two passes take side by side, as a part of what they take one after another."""

    table: AnalyticCost
    """Of devices that share every layer; its links count until something has been measured."""
    measured: MeasuredPairs = MeasuredPairs()
    _known: dict[tuple[tuple[int, ...], tuple[int, ...], int, bool], float] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def share(self, first: Sequence[int], second: Sequence[int], stage: int, *, is_forward: bool) -> float:
        """Of two microbatches with samples of these lengths; 1: nothing is hidden."""
        name = "forward" if is_forward else "backward", stage
        key = (tuple(first), tuple(second), stage, is_forward)
        if name in self.measured.pairs:
            return self.measured.pairs[name]
        if key not in self._known:
            self._known[key] = self._share([first, second], stage, is_forward, self.measured.sums.get(name))
        return self._known[key]

    def _share(self, pair: Sequence[Sequence[int]], stage: int, is_forward: bool, sums: float | None) -> float:
        """`sums`: the part of a pass that is known to be waiting for these; None: what the table says."""
        cost, num_layers = self.table, self.table.memory.layers(stage)
        all_s = rest_s = 0.0
        groups = []
        for group, lengths in enumerate(pair):
            own = between_sums(layer_graph(cost, lengths, num_layers, is_forward=is_forward), group)
            pass_s = (cost.forward_s if is_forward else cost.backward_s)(lengths, stage)
            sums_s = sum(each.reduce_s for each in own)
            sum_ratio = 1.0 if sums is None else sums * pass_s / sums_s
            ratio = 1.0 if sums is None else (1.0 - sums) * pass_s / (pass_s - sums_s)
            groups.append([replace(e, compute_s=ratio * e.compute_s, reduce_s=sum_ratio * e.reduce_s) for e in own])
            # The head, which is no layer, hides nothing.
            rest_s += ratio * (pass_s - sums_s - sum(each.compute_s for each in own))
            all_s += pass_s
        return (rest_s + run_order(in_turns(groups), groups).makespan_s) / all_s
