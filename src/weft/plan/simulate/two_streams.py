"""Launch order of a device that interleaves several groups, so that one computes while another communicates.

Two passes take turns at every all-reduce (`in_turns`); what a pass computes between two of them is one subgraph
(`between_sums`). `adapters/devices.py` runs them so. A device computes in launch order, and its link sends in that
order too, so a group that waits for its all-reduce delays the other, whose turn comes later. In simulation this hides
more than MuxTune's algorithm 1: `python -m benchmarks pipeline` has both.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from weft.plan.cost.analytic import AnalyticCost
from weft.plan.cost.divided import Graph, layer_graph
from weft.plan.cost.learned import MeasuredPairs
from weft.plan.simulate.timeline import COMPUTE, SEND, Span, Timeline


@dataclass(frozen=True, slots=True)
class Subgraph:
    """Operators of one group that are launched together."""

    group: int
    operators: tuple[int, ...]
    """Indices into the group's graph, ascending; an all-reduce is the last."""
    compute_s: float
    reduce_s: float
    needs: tuple[int, ...]
    """Indices of the subgraphs of the same group that come first."""
    depth: int


Launch = tuple[int, int]
"""A group, and the index of one of its subgraphs."""


def between_sums(graph: Graph, group: int = 0) -> list[Subgraph]:
    """One graph cut after its all-reduces; the part after the last one is left out."""
    found: list[Subgraph] = []
    first = 0
    for index, operator in enumerate(graph):
        if operator.kind == "reduce":
            number, operators = len(found), tuple(range(first, index + 1))
            compute_s = sum(graph[each].seconds for each in operators[:-1])
            needs = (number - 1,) if number else ()
            found.append(Subgraph(group, operators, compute_s, operator.seconds, needs, number))
            first = index + 1
    return found


def in_turns(groups: Sequence[Sequence[Subgraph]]) -> list[Launch]:
    """One subgraph of each group in turn; groups that have ended are skipped."""
    turns = itertools.zip_longest(*([(g, i) for i in range(len(group))] for g, group in enumerate(groups)))
    return [launch for turn in turns for launch in turn if launch is not None]


def run_order(order: Sequence[Launch], groups: Sequence[Sequence[Subgraph]]) -> Timeline:
    computes_from = sends_from = 0.0
    done: dict[Launch, float] = {}
    spans: list[Span] = []
    for group, index in order:
        own = groups[group][index]
        start_s = max([computes_from, *(done[group, need] for need in own.needs)])
        computes_from = done[group, index] = start_s + own.compute_s
        args = {"group": group, "subgraph": index}
        spans.append(Span("compute", start_s, own.compute_s, args, lane=COMPUTE))
        if own.reduce_s:
            sends_from = max(sends_from, computes_from)
            spans.append(Span("all-reduce", sends_from, own.reduce_s, args, lane=SEND))
            sends_from = done[group, index] = sends_from + own.reduce_s
    return Timeline(tuple(sorted(spans, key=lambda span: span.start_s)))


@dataclass(frozen=True)
class PairTimes:
    """Ratio of the time of two passes side by side to that of both in sequence."""

    table: AnalyticCost
    """Costs of devices that share every layer; its links count until measurements exist."""
    measured: MeasuredPairs = MeasuredPairs()
    _known: dict[tuple[tuple[int, ...], tuple[int, ...], int, bool], float] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def share(self, first: Sequence[int], second: Sequence[int], stage: int, *, is_forward: bool) -> float:
        """The ratio for two microbatches with samples of these lengths; 1: nothing is hidden."""
        name = "forward" if is_forward else "backward", stage
        key = (tuple(first), tuple(second), stage, is_forward)
        if name in self.measured.pairs:
            return self.measured.pairs[name]
        if key not in self._known:
            self._known[key] = self._share([first, second], stage, is_forward, self.measured.sums.get(name))
        return self._known[key]

    def _share(self, pair: Sequence[Sequence[int]], stage: int, is_forward: bool, sums: float | None) -> float:
        """`sums`: measured share of a pass that waits for all-reduces; None: as in the table."""
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
            # The head is no layer and hides nothing.
            rest_s += ratio * (pass_s - sums_s - sum(each.compute_s for each in own))
            all_s += pass_s
        return (rest_s + run_order(in_turns(groups), groups).makespan_s) / all_s
