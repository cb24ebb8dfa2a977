"""Brings the devices of a replica into step that share its frozen weights.

Every device needs the others' slices at every layer, so each runs its next microbatch when all do, an empty one where
it has none: because it is done, or because its next samples wait for a step that another device has still to bring
about. Problem: the fewest rounds in which the lists, in their own order, come to their ends; letting everybody run who
can is the best there is, since a microbatch that runs holds nobody up. O(instructions + rounds · devices).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from weft.errors import PlanError
from weft.plan.program import Backward, Forward, Instruction, Measure, Planner, Program, Step
from weft.plan.types import JobQueue, Limits, Microbatch


@dataclass(frozen=True)
class InStepPlanner:
    """A planner for devices of one stage each, brought into step."""

    planner: Planner

    def __call__(self, queues: Sequence[JobQueue], limits: Limits) -> Program:
        """The next program."""
        return in_step(self.planner(queues, limits))


def in_step(program: Program) -> Program:
    """A program of devices of one stage each, with empty microbatches so that all run theirs at the same time."""
    left = [deque(own) for own in program.stages]
    done: list[list[Instruction]] = [[] for _ in left]
    microbatches, measuring, measured = list(program.microbatches), program.measuring, Counter[Measure]()
    while True:
        _run_between(left, done, measuring, measured)
        runs = [bool(own) and isinstance(own[0], Forward) for own in left]
        if not any(runs):
            break
        for own, result, has_work in zip(left, done, runs, strict=True):
            if has_work:
                result += _take_microbatch(own)
            else:
                result += [Forward(len(microbatches)), Backward(len(microbatches))]
                microbatches.append(Microbatch(()))
    if any(left):
        raise PlanError(f"{next(own[0] for own in left if own)} waits for ever.")
    return replace(program, microbatches=tuple(microbatches), stages=tuple(map(tuple, done)), is_in_step=True)


def _take_microbatch(left: deque[Instruction]) -> list[Instruction]:
    """The next microbatch, forward and at once backward; what stands between the two concerns others, and follows."""
    forward = left.popleft()
    assert isinstance(forward, Forward)
    backward = Backward(forward.microbatch, forward.chunk)
    left.remove(backward)
    return [forward, backward]


def _run_between(
    left: Sequence[deque[Instruction]],
    done: Sequence[list[Instruction]],
    measuring: dict[Measure, tuple[int, ...]],
    measured: Counter[Measure],
) -> None:
    """Runs what devices do between microbatches, until all have to run one or to wait for somebody who has."""
    moved = True
    while moved:
        moved = False
        for device, (own, result) in enumerate(zip(left, done, strict=True)):
            while own and not isinstance(own[0], Forward):
                i = own[0]
                if isinstance(i, Measure) and device == measuring[i][0] and measured[i] < len(measuring[i]) - 1:
                    break
                if isinstance(i, Step) and measured[of := Measure(i.job, i.step)] < len(measuring.get(of, ())):
                    break
                measured.update([i] if isinstance(i, Measure) else [])
                result.append(own.popleft())
                moved = True
