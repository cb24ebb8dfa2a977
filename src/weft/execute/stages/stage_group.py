"""Stages that are asked together: those of one process take turns."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Generator, Mapping, Sequence
from typing import Any, Protocol

from weft.backbone.backbone import Backbone
from weft.execute.protocol import StagedWork
from weft.execute.stages.interpreter import StageOutcome, StageProgram
from weft.execute.stages.stage import Stage, stage_places
from weft.execute.stages.transport import Boxes, LocalTransport


class StageGroup(Protocol):
    """All stages of one or more replicas."""

    replica_sizes: list[int]
    """Stages of each replica; those of the first come first."""

    def ask(self, what: str, *given: Any) -> list[Any]:
        """What every stage answers to the same question, a method of `Stage` or `run`; raises what one raised."""
        ...

    def ask_each(self, what: str, given: Mapping[int, tuple[Any, ...]]) -> list[Any]:
        """The same of some stages, by number, with another thing given to each."""
        ...

    def recover(self) -> list[int]:
        """After a ReplicaLostError: starts the replicas anew that are gone, and says which; the others stay."""
        ...

    def close(self) -> None:
        """Ends them."""
        ...


def answer(stage: Stage, what: str, given: tuple[Any, ...]) -> Generator[None, None, Any]:
    """What a stage answers; it yields where another stage must have its turn first."""
    if what == "run":
        (work,) = given
        return (yield from run_program(stage, work))
    found = getattr(stage, what)(*given)
    return (yield from found) if isinstance(found, Generator) else found


def run_program(stage: Stage, work: StagedWork) -> Generator[None, None, StageOutcome]:
    """Runs a stage's instructions of a program; what is left of one that failed is let go of."""
    try:
        return (yield from StageProgram(stage, work).run())
    finally:
        stage.forget()


class LocalStages:
    """Stages of this process."""

    def __init__(self, *replicas: Sequence[Backbone]) -> None:
        """`replicas`: of each, the parts of its backbone in order."""
        boxes: Boxes = defaultdict(deque)
        self.replica_sizes = [len(parts) for parts in replicas]
        parts = [part for own in replicas for part in own]
        self.stages = [
            Stage(place, part, LocalTransport(place.device, boxes))
            for place, part in zip(stage_places(self.replica_sizes), parts, strict=True)
        ]

    def ask(self, what: str, *given: Any) -> list[Any]:
        """What every stage answers to the same question."""
        return self.ask_each(what, {stage.device: given for stage in self.stages})

    def ask_each(self, what: str, given: Mapping[int, tuple[Any, ...]]) -> list[Any]:
        """Lets the stages run in turn, each until it must wait for another."""
        waiting = {device: answer(self.stages[device], what, own) for device, own in given.items()}
        found: dict[int, Any] = {}
        while waiting:
            for index, running in list(waiting.items()):
                try:
                    with self.stages[index].at_work():
                        next(running)
                except StopIteration as end:
                    found[index] = end.value
                    del waiting[index]
        return [found[device] for device in given]

    def recover(self) -> list[int]:
        """Loses none."""
        return []

    def close(self) -> None:
        """Has nothing to end."""
