"""In which order subgraphs of several tasks are launched, so that one's communication hides behind another's compute.

A device has two lanes, compute and communication. Each runs what is put on it in the order of launching, an operator as
soon as its lane is free and what it needs is done. Problem: min makespan over all orders that respect the subgraphs'
needs, a job shop with two machines, NP-hard.

Orders tried, each O(n²) at worst:
- by depth: Kahn's algorithm over all graphs at once; of the ready subgraphs the shallowest, of these the longest, so
  that the longest compute covers what is communicated meanwhile;
- by start: of the ready subgraphs the one that can start first, of these the one with the longest way to its end;
- one task after another.

The best is returned with the bound max(all compute, all communication, longest chain), so its gap is known. Tests prove
that every order is topological, and that the answer is never slower than one task after another nor below the bound.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.planning.fusion.operators import FusedOperator, Subgraph, segment, tensor_parallel_chain


@dataclass(frozen=True, slots=True)
class LaunchOrder:
    """Subgraphs in the order they are launched."""

    subgraphs: tuple[Subgraph, ...]
    """Numbered as their `after` says."""
    order: tuple[int, ...]
    makespan_s: float
    sequential_s: float
    """One task after another, on the same two lanes."""
    bound_s: float
    """No order takes less."""


class Lanes:
    """Two lanes to which subgraphs are added in the order of launching."""

    def __init__(self) -> None:
        self.free_at = {False: 0.0, True: 0.0}
        """When each lane, compute and communication, has done all it got."""
        self.ends: dict[str, float] = {}
        """When each operator ends."""

    @property
    def makespan_s(self) -> float:
        """When both lanes are done."""
        return max(self.free_at.values())

    def start(self, operator: FusedOperator) -> float:
        """When this operator would start if it came next."""
        return max([self.free_at[operator.is_communication], *(self.ends[name] for name in operator.after)])

    def add(self, subgraph: Subgraph) -> None:
        """Puts all operators of a subgraph on their lanes."""
        for operator in subgraph.operators:
            end = self.start(operator) + operator.seconds
            self.free_at[operator.is_communication] = self.ends[operator.name] = end


def interleave(operators: Sequence[FusedOperator]) -> LaunchOrder:
    """The best launch order found for these tasks' operators."""
    subgraphs = segment(operators)
    sequential = sequential_order(subgraphs)
    candidates = [order_by_depth(subgraphs), order_by_start(subgraphs), sequential]
    times = [play(subgraphs, order) for order in candidates]
    best = min(range(len(candidates)), key=times.__getitem__)
    return LaunchOrder(subgraphs, candidates[best], times[best], times[-1], _bound(subgraphs))


def play(subgraphs: Sequence[Subgraph], order: Sequence[int]) -> float:
    """Seconds until both lanes are done with this order."""
    lanes = Lanes()
    for number in order:
        lanes.add(subgraphs[number])
    return lanes.makespan_s


def order_by_depth(subgraphs: Sequence[Subgraph]) -> tuple[int, ...]:
    """Kahn's order over all tasks: shallowest first, of these the longest, ties by number."""
    return _order(subgraphs, lambda number, _: (subgraphs[number].depth, -subgraphs[number].seconds))


def order_by_start(subgraphs: Sequence[Subgraph]) -> tuple[int, ...]:
    """Earliest start first, of these the longest chain to the end, ties by number."""
    tails = _tails(subgraphs)
    return _order(subgraphs, lambda number, lanes: (lanes.start(subgraphs[number].operators[0]), -tails[number]))


def sequential_order(subgraphs: Sequence[Subgraph]) -> tuple[int, ...]:
    """One task after another, in the order they first appear, as far as dependencies between tasks allow."""
    places = {task: place for place, task in enumerate(dict.fromkeys(s.task for s in subgraphs))}
    return _order(subgraphs, lambda number, _: (places[subgraphs[number].task], number))


def tensor_parallel_clock(*, communication_share: float, num_blocks: int) -> Callable[[Sequence[float]], float]:
    """Says how long several tasks take within one clock of a tensor-parallel stage, from the seconds of each alone.

    Each task is a chain of `num_blocks` blocks that end in an all-reduce, which takes this share of its time.
    """

    @functools.cache
    def clock_s(seconds: tuple[float, ...]) -> float:
        chains = (
            tensor_parallel_chain(str(i), num_blocks, (1 - communication_share) * s, communication_share * s)
            for i, s in enumerate(seconds)
        )
        return interleave([operator for chain in chains for operator in chain]).makespan_s

    return lambda seconds: clock_s(tuple(seconds))


def _order(subgraphs: Sequence[Subgraph], rank: Callable[[int, Lanes], tuple[float, float]]) -> tuple[int, ...]:
    """Kahn's algorithm: of the subgraphs all whose needs are launched, always the one of lowest rank."""
    needs = [len(s.after) for s in subgraphs]
    followers: list[list[int]] = [[] for _ in subgraphs]
    for number, subgraph in enumerate(subgraphs):
        for need in subgraph.after:
            followers[need].append(number)
    ready = [number for number, count in enumerate(needs) if count == 0]
    lanes, order = Lanes(), []
    while ready:
        number = min(ready, key=lambda n: (*rank(n, lanes), n))
        ready.remove(number)
        order.append(number)
        lanes.add(subgraphs[number])
        for follower in followers[number]:
            needs[follower] -= 1
            if needs[follower] == 0:
                ready.append(follower)
    return tuple(order)


def _tails(subgraphs: Sequence[Subgraph]) -> list[float]:
    """Of each subgraph, the longest chain of seconds from its start to the end of its task."""
    tails = [s.seconds for s in subgraphs]
    beyond = [0.0] * len(subgraphs)
    # Needs have lower numbers, so from the back every follower is known.
    for number in reversed(range(len(subgraphs))):
        tails[number] += beyond[number]
        for need in subgraphs[number].after:
            beyond[need] = max(beyond[need], tails[number])
    return tails


def _bound(subgraphs: Sequence[Subgraph]) -> float:
    operators = [o for s in subgraphs for o in s.operators]
    busy_s = [sum(o.seconds for o in operators if o.is_communication == lane) for lane in (False, True)]
    ends: dict[str, float] = {}
    for operator in operators:
        ends[operator.name] = operator.seconds + max((ends[name] for name in operator.after), default=0.0)
    return max([*busy_s, *ends.values()])
