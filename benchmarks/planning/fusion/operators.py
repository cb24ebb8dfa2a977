"""Operators of tensor-parallel tasks, and the subgraphs in which they are launched.

A task's forward (or backward) through one stage is a graph of operators that compute or communicate. Model execution is
mostly a chain, so single operators are too fine to schedule: a subgraph is a run of computing operators, ended by the
communication that follows it. A small adapter is a subgraph of its own, so that several tasks' adapters can be fused;
a dependency may cross tasks for the same reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.errors import PlanError


@dataclass(frozen=True, slots=True)
class FusedOperator:
    """One operator of one task."""

    name: str
    """Unique over all tasks."""
    task: str
    seconds: float
    is_communication: bool = False
    is_adapter: bool = False
    after: tuple[str, ...] = ()
    """Operators whose results it needs."""


@dataclass(frozen=True, slots=True)
class Subgraph:
    """Operators of one task that are launched together, each needing the one before."""

    operators: tuple[FusedOperator, ...]
    depth: int
    """Longest chain of subgraphs before it; the shallowest have priority, which interleaves the tasks."""
    after: tuple[int, ...]
    """Subgraphs it needs, by number."""

    @property
    def task(self) -> str:
        """The task it belongs to."""
        return self.operators[0].task

    @property
    def seconds(self) -> float:
        """Of all its operators, one after another."""
        return sum(o.seconds for o in self.operators)


def segment(operators: Sequence[FusedOperator]) -> tuple[Subgraph, ...]:
    """The subgraphs of these operators, in an order in which they could run.

    An operator joins the subgraph of the one operator it needs if that is its last so far, computes and belongs to the
    same task. Edges therefore enter a subgraph only at its head, and no cycle can arise between subgraphs.
    """
    runs: list[list[FusedOperator]] = []
    home: dict[str, int] = {}
    for operator in sorted_by_need(operators):
        run = home[operator.after[0]] if len(operator.after) == 1 else None
        if run is not None and _joins(operator, runs[run][-1]):
            runs[run].append(operator)
        else:
            run = len(runs)
            runs.append([operator])
        home[operator.name] = run
    subgraphs: list[Subgraph] = []
    for run_operators in runs:
        after = tuple(sorted({home[name] for name in run_operators[0].after}))
        depth = 1 + max((subgraphs[i].depth for i in after), default=-1)
        subgraphs.append(Subgraph(tuple(run_operators), depth, after))
    return tuple(subgraphs)


def _joins(operator: FusedOperator, last: FusedOperator) -> bool:
    is_next = operator.after == (last.name,) and operator.task == last.task
    return is_next and not (last.is_communication or last.is_adapter or operator.is_adapter)


def sorted_by_need(operators: Sequence[FusedOperator]) -> list[FusedOperator]:
    """The operators, each after those it needs; the given order where it is free. Refuses cycles by name."""
    known = {o.name for o in operators}
    if len(known) != len(operators):
        raise PlanError(f"{len(operators)} operators have {len(known)} names; use each name once.")
    for operator in operators:
        if operator.seconds < 0:
            raise PlanError(f"takes {operator.seconds} seconds; use 0 or more.", where=operator.name)
        for name in operator.after:
            if name not in known:
                raise PlanError(f"needs '{name}', which is no operator here.", where=operator.name)
    ordered: list[FusedOperator] = []
    done: set[str] = set()
    waiting = list(operators)
    while waiting:
        still: list[FusedOperator] = []
        for operator in waiting:
            if done.issuperset(operator.after):
                ordered.append(operator)
                done.add(operator.name)
            else:
                still.append(operator)
        if len(still) == len(waiting):
            raise PlanError(f"operators need each other in a circle: {', '.join(o.name for o in still)}.")
        waiting = still
    return ordered


def tensor_parallel_chain(
    task: str, num_blocks: int, compute_s: float, communication_s: float
) -> tuple[FusedOperator, ...]:
    """A stage of `num_blocks` attention or MLP blocks that each end in an all-reduce; the seconds are those of all."""
    operators: list[FusedOperator] = []
    for block in range(num_blocks):
        after = (operators[-1].name,) if operators else ()
        compute = FusedOperator(f"{task}.{block}.compute", task, compute_s / num_blocks, after=after)
        reduce = FusedOperator(
            f"{task}.{block}.reduce", task, communication_s / num_blocks, is_communication=True, after=(compute.name,)
        )
        operators += [compute, reduce]
    return tuple(operators)
