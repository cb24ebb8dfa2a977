"""In which order a device launches the operators of several groups, so that one computes while another communicates.

Two passes take turns at every all-reduce (`in_turns`), with all that a pass computes between two of them as one
subgraph (`between_sums`); `adapters/side_by_side.py` runs them so. A device computes in the order of launches, and its
link sends in that order too, so a group that waits for its all-reduce holds up the other, whose turn comes later.
Simulated, that hides more than MuxTune's algorithm 1: `python -m benchmarks pipeline` has both.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from weft.plan.cost.operators import Graph


@dataclass(frozen=True, slots=True)
class Subgraph:
    """Operators of one group that are launched together."""

    group: int
    operators: tuple[int, ...]
    """Places in the group's graph, in its order; an all-reduce is the last."""
    compute_s: float
    reduce_s: float
    needs: tuple[int, ...]
    """Subgraphs of the same group that come first, by their places among them."""
    depth: int
    """Subgraphs on the longest way to it."""


Launch = tuple[int, int]
"""A group, and the place of one of its subgraphs."""


def one_after_another(groups: Sequence[Sequence[Subgraph]]) -> list[Launch]:
    """The order of a device that knows no groups."""
    return [(g, i) for g, group in enumerate(groups) for i in range(len(group))]


def between_sums(graph: Graph, group: int = 0) -> list[Subgraph]:
    """One graph cut behind its all-reduces and nowhere else; what comes behind the last one is left out."""
    found: list[Subgraph] = []
    first = 0
    for place, operator in enumerate(graph):
        if operator.kind == "reduce":
            number, operators = len(found), tuple(range(first, place + 1))
            compute_s = sum(graph[each].seconds for each in operators[:-1])
            needs = (number - 1,) if number else ()
            found.append(Subgraph(group, operators, compute_s, operator.seconds, needs, number))
            first = place + 1
    return found


def in_turns(groups: Sequence[Sequence[Subgraph]]) -> list[Launch]:
    """One subgraph of each group after another; whoever has none left is passed over."""
    turns = itertools.zip_longest(*([(g, i) for i in range(len(group))] for g, group in enumerate(groups)))
    return [launch for turn in turns for launch in turn if launch is not None]


def order_problems(order: Sequence[Launch], groups: Sequence[Sequence[Subgraph]]) -> list[str]:
    """What is wrong with an order of launches; nothing if it launches everything once, behind what it needs."""
    places = {launch: place for place, launch in enumerate(order)}
    every = set(one_after_another(groups))
    found = [] if len(places) == len(order) else ["a subgraph is launched twice"]
    found += [f"group {g} has no subgraph {i}" for g, i in places.keys() - every]
    found += [f"subgraph {i} of group {g} is never launched" for g, i in sorted(every - places.keys())]
    if found:
        return found
    return [
        f"subgraph {i} of group {g} is launched before {need}, which it needs"
        for (g, i), place in places.items()
        for need in groups[g][i].needs
        if places[g, need] > place
    ]
