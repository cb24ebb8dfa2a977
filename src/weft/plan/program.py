"""A program is a plan as data: microbatches, and the instructions of every stage in order.

Stage s runs its instructions from first to last; a Receive waits for the matching Send of the neighbouring stage. One
device is one stage: it runs a microbatch forward, backward at once, and then the steps that are due (a `Turn`). A job's
step needs the norm of its whole gradient, which lies on all stages of a pipeline: each stage measures its part
(`Measure`), the first stage combines the parts, and each stage steps just before the job's next forward.

A program may have several whole replicas (`replica_sizes`), whose stages follow one another. A microbatch runs on one
of them; a job with order-independent sums has samples on several. Then each of these replicas measures, the first one
combines the sums, and every stage of every replica steps. Where replicas share frozen weights (`shards`), stages with
the same layers run in step. Devices that share every layer may run two microbatches side by side (`pairs`): both
forward, then both backward.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any, TypeVar

from weft.errors import PlanError
from weft.plan.layout import rings
from weft.plan.types import Microbatch, Segment


@dataclass(frozen=True, slots=True)
class Forward:
    microbatch: int


@dataclass(frozen=True, slots=True)
class Backward:
    """Runs a microbatch backward through this stage; every job in it gains gradients for its adapters here."""

    microbatch: int


@dataclass(frozen=True, slots=True)
class Send:
    microbatch: int
    is_gradient: bool
    to_stage: int


@dataclass(frozen=True, slots=True)
class Receive:
    """Waits for the matching Send of a neighbouring stage."""

    microbatch: int
    is_gradient: bool
    from_stage: int


@dataclass(frozen=True, slots=True)
class Measure:
    """Sends a stage's part of a job's squared gradient norm to the root, the first stage that measures the same step.
    The root's own Measure waits for all parts."""

    job: str
    step: int


@dataclass(frozen=True, slots=True)
class Step:
    """A job's optimizer step on this stage, after its global batch has been backward here. With several stages it waits
    for the gradient norm from the root."""

    job: str
    step: int


Instruction = Forward | Backward | Send | Receive | Measure | Step

_KINDS: dict[str, type[Instruction]] = {
    "forward": Forward,
    "backward": Backward,
    "send": Send,
    "receive": Receive,
    "measure": Measure,
    "step": Step,
}
_Built = TypeVar("_Built", bound=Segment | Instruction)
_NAMES = {kind: name for name, kind in _KINDS.items()}


@dataclass(frozen=True, slots=True)
class Turn:
    """One device's unit of work: a microbatch forward and backward, and the steps after it."""

    microbatch: Microbatch
    """Microbatch of the turn; without segments where only steps are due."""
    steps: tuple[Step, ...] = ()


@dataclass(frozen=True, slots=True)
class Program:
    """Instruction lists of all stages over the same microbatches."""

    microbatches: tuple[Microbatch, ...]
    """Microbatches of all stages; an empty one is a bubble that a pipeline's schedule needs to keep its distances (a
    no-op)."""
    stages: tuple[tuple[Instruction, ...], ...]
    replica_sizes: tuple[int, ...] = ()
    """Number of stages of each replica, whose lists follow one another; empty: one replica has them all."""
    shards: tuple[int, ...] = ()
    """Number of consecutive replicas that share each copy of the frozen weights; empty: none do. They run their passes
    at the same time; one that has no microbatch left runs an empty one."""
    pairs: tuple[tuple[int, int], ...] = ()
    """Microbatches that run side by side where devices share every layer: one computes while the other's sums are
    exchanged. On every stage both forwards, and both backwards, follow each other directly."""

    @classmethod
    def from_turns(cls, turns: Iterable[Turn]) -> Program:
        microbatches: list[Microbatch] = []
        instructions: list[Instruction] = []
        for turn in turns:
            if turn.microbatch.segments:
                instructions += (Forward(len(microbatches)), Backward(len(microbatches)))
                microbatches.append(turn.microbatch)
            instructions += turn.steps
        return cls(tuple(microbatches), (tuple(instructions),))

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    @property
    def replicas(self) -> tuple[range, ...]:
        ends = [*itertools.accumulate(self.replica_sizes or (self.num_stages,))]
        return tuple(range(start, end) for start, end in zip([0, *ends], ends, strict=False))

    @property
    def rings(self) -> tuple[tuple[int, ...], ...]:
        """The stages that run their passes at the same time, since they share the frozen weights of their layers."""
        return rings(self.replica_sizes, self.shards)

    @property
    def measuring(self) -> dict[Measure, tuple[int, ...]]:
        """The stages that measure each gradient; the first of them is the root."""
        stages_of: dict[Measure, list[int]] = {}
        for stage, instructions in enumerate(self.stages):
            for i in instructions:
                if isinstance(i, Measure):
                    stages_of.setdefault(i, []).append(stage)
        return {measure: tuple(stages) for measure, stages in stages_of.items()}

    @property
    def turns(self) -> list[Turn]:
        """The turns of one device; a PlanError if the program does not consist of turns."""
        if self.num_stages != 1:
            raise PlanError(f"the program is for {self.num_stages} stages; one device runs programs of one.")
        found: list[tuple[Microbatch, list[Step]]] = []
        instructions = iter(self.stages[0])
        for i in instructions:
            if isinstance(i, Step):
                if not found:
                    found.append((Microbatch(()), []))
                found[-1][1].append(i)
            elif isinstance(i, Forward) and next(instructions, None) == Backward(i.microbatch):
                found.append((self.microbatches[i.microbatch], []))
            else:
                raise PlanError(f"{i} is not a forward with its backward right after it; one device runs only those.")
        return [Turn(microbatch, tuple(steps)) for microbatch, steps in found]

    def to_json(self) -> dict[str, Any]:
        """The program as plain values. A segment is [job, step, index, length]; an instruction kind and fields."""
        return {
            "replica_sizes": list(self.replica_sizes),
            "shards": list(self.shards),
            "pairs": [list(pair) for pair in self.pairs],
            "microbatches": [[list(astuple(segment)) for segment in m.segments] for m in self.microbatches],
            "stages": [[[_NAMES[type(i)], *astuple(i)] for i in instructions] for instructions in self.stages],
        }

    @classmethod
    def from_json(cls, tree: Any) -> Program:
        """The program that `to_json` gave; a PlanError if it has another form. The checker tests its validity."""
        try:
            return cls(
                tuple(Microbatch(tuple(_built(Segment, own) for own in segments)) for segments in tree["microbatches"]),
                tuple(tuple(_built_instruction(*own) for own in stage) for stage in tree["stages"]),
                tuple(int(size) for size in tree.get("replica_sizes", ())),
                tuple(int(number) for number in tree.get("shards", ())),
                tuple((int(first), int(second)) for first, second in tree.get("pairs", ())),
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise PlanError(
                f"this is not a program ({type(error).__name__}: {error}); it needs microbatches and stages "
                "as `weft plan --json` writes them."
            ) from None


def _built_instruction(name: str, *values: Any) -> Instruction:
    """An instruction from its kind and fields; programs of weft 0.1 have a meaningless 0 after the microbatch."""
    kind = _KINDS[name]
    if kind in (Forward, Backward, Send, Receive) and len(values) == len(fields(kind)) + 1 and values[1] == 0:
        values = (values[0], *values[2:])
    return _built(kind, values)


def _built(kind: type[_Built], values: Sequence[Any]) -> _Built:
    """A segment or an instruction from its fields in order; a TypeError where one is missing or of another type."""
    for field, value in zip(fields(kind), values, strict=False):
        if not isinstance(value, str if field.name == "job" else int):
            raise TypeError(f"{field.name} of {kind.__name__} is {value!r}")
    return kind(*values)
