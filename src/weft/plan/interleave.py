"""In which order a device launches the operators of several groups, so that one computes while another communicates.

MuxTune's algorithm 1 (section 3.4.2). Every group's graph is cut into subgraphs: runs of frozen operators, each with
the all-reduce at its end, and every adapter by itself. Then Kahn's algorithm over all graphs at once: of the subgraphs
that wait for nothing, those of the least depth are the foremost, and of these the one that computes longest is launched
next. So the groups take turns, and the longest computations hide what is under way.

What runs is simpler (`adapters/side_by_side.py`): two passes take turns at every all-reduce (`in_turns`), with all that
a pass computes between two of them as one subgraph (`between_sums`). A device computes in the order of launches, and
its link sends in that order too, so a group that waits for its all-reduce holds up the other, whose turn comes later.
Simulated, what runs hides more: `python -m benchmarks pipeline` has both.
"""

from __future__ import annotations

import heapq
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


def segment(graph: Graph, group: int = 0) -> list[Subgraph]:
    """The subgraphs of one graph, in an order in which they could be launched."""
    members: list[list[int]] = []
    home: dict[int, int] = {}
    before: list[set[int]] = []
    """All subgraphs that come before each, however far."""
    is_open = -1
    for place, operator in enumerate(graph):
        needed = {home[need] for need in operator.needs}
        joins = is_open >= 0 and operator.kind != "adapter"
        # What waits for the open run by way of another subgraph cannot be part of it.
        joins = joins and not any(is_open in before[other] for other in needed if other != is_open)
        if not joins:
            members.append([])
            before.append(set())
        own = is_open if joins else len(members) - 1
        members[own].append(place)
        home[place] = own
        for other in needed - {own}:
            before[own] |= {other, *before[other]}
        if operator.kind == "frozen":
            is_open = own
        elif operator.kind == "reduce" or is_open in before[own]:
            is_open = -1
    return _in_order(graph, group, members, home)


def launch_order(groups: Sequence[Sequence[Subgraph]]) -> list[Launch]:
    """Algorithm 1: the order in which the subgraphs of all groups are launched; ties by group and place."""
    waiting = {(g, i): len(own.needs) for g, group in enumerate(groups) for i, own in enumerate(group)}
    followers: dict[Launch, list[Launch]] = {}
    for g, group in enumerate(groups):
        for i, own in enumerate(group):
            for need in own.needs:
                followers.setdefault((g, need), []).append((g, i))
    ready = [_rank(groups, launch) for launch, count in waiting.items() if not count]
    heapq.heapify(ready)
    found: list[Launch] = []
    while ready:
        *_, launch = heapq.heappop(ready)
        found.append(launch)
        for follower in followers.get(launch, []):
            waiting[follower] -= 1
            if not waiting[follower]:
                heapq.heappush(ready, _rank(groups, follower))
    return found


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


def _rank(groups: Sequence[Sequence[Subgraph]], launch: Launch) -> tuple[int, float, Launch]:
    own = groups[launch[0]][launch[1]]
    return own.depth, -own.compute_s, launch


def _in_order(graph: Graph, group: int, members: list[list[int]], home: dict[int, int]) -> list[Subgraph]:
    """The subgraphs of those members, each behind all that it needs."""
    needs = [{home[need] for place in own for need in graph[place].needs} - {i} for i, own in enumerate(members)]
    depths: dict[int, int] = {}
    # What a subgraph needs was begun before it, or while it was open by an adapter that needs what came before.
    left = list(range(len(members)))
    while left:
        known = [i for i in left if needs[i] <= depths.keys()]
        for i in known:
            depths[i] = 1 + max((depths[need] for need in needs[i]), default=-1)
        left = [i for i in left if i not in depths]
    order = sorted(depths, key=lambda i: (depths[i], members[i][0]))
    number = {i: new for new, i in enumerate(order)}
    found = []
    for i in order:
        operators = [graph[place] for place in members[i]]
        reduce_s = sum(operator.seconds for operator in operators if operator.kind == "reduce")
        compute_s = sum(operator.seconds for operator in operators) - reduce_s
        own_needs = tuple(sorted(number[need] for need in needs[i]))
        found.append(Subgraph(group, tuple(members[i]), compute_s, reduce_s, own_needs, depths[i]))
    return found
