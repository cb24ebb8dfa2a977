"""Stages that are asked together: those of one process take turns."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from typing import Any, Protocol

from weft.engine.execute.protocol import StagedWork
from weft.model.backbone import Backbone
from weft.parallel.stages.interpreter import StageOutcome, StageProgram
from weft.parallel.stages.routes import Due, all_routes, due_at, routes_of, steps_due
from weft.parallel.stages.stage import Stage, stage_positions
from weft.parallel.stages.stage_answers import answer_prompts
from weft.parallel.stages.stage_evaluation import evaluate_jobs
from weft.parallel.stages.transport import Boxes, LocalTransport
from weft.plan.pipeline.append import Lists
from weft.plan.program import Instruction


class StageGroup(Protocol):
    """All stages of one or more replicas."""

    replica_sizes: list[int]
    """Stages of each replica; those of the first come first."""

    def ask(self, what: str, *given: Any) -> list[Any]:
        """What every stage answers to the same question: a method of `Stage`, or one of `TOGETHER`.

        Raises what one raised.
        """
        ...

    def call_each(self, what: str, given: Mapping[int, tuple[Any, ...]]) -> list[Any]:
        """The same of some stages, by number, with another thing given to each."""
        ...

    def append(self, work: StagedWork, lists: Lists, due: Due) -> int:
        """Starts a program that goes on, behind what was started so far; its number. Each stage runs its list now.

        `due`: what all of them tell each other of steps meanwhile.
        """
        ...

    def go_on(self, lists: Lists, due: Due) -> None:
        """Starts the rest of the last one, where nothing follows it."""
        ...

    def outcomes(self, number: int) -> list[StageOutcome]:
        """Waits for a program, of which all has been started; what every stage tells of it."""
        ...

    def close(self) -> None:
        """Ends them."""
        ...


def answer(stage: Stage, what: str, given: tuple[Any, ...]) -> Generator[None, None, Any]:
    """What a stage answers; it yields where another stage must have its turn first."""
    if what in TOGETHER:
        try:
            return (yield from TOGETHER[what](stage, *given))
        except BaseException:
            stage.references.forget()
            raise
    return getattr(stage, what)(*given)


def run_program(stage: Stage, work: StagedWork) -> Generator[None, None, StageOutcome]:
    """Runs a stage's instructions of a program; what is left of one that failed is let go of."""
    program = StageProgram(stage)
    stage.transport.open(routes_of(work.program))
    program.append(0, work, work.program.stages[stage.device], due_at(steps_due(work.program), stage.device))
    try:
        yield from program.run()
        stage.transport.finish()
    finally:
        stage.forget()
    ((_, outcome),) = program.ended
    return outcome


TOGETHER: dict[str, Callable[..., Generator[None, None, Any]]] = {
    "run": run_program,
    "evaluate": evaluate_jobs,
    "answer": answer_prompts,
}
"""What stages do by waiting for each other."""


class RunningStage:
    """A stage whose programs go on."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self._program = StageProgram(stage)
        self._running: Generator[None, None, None] | None = None

    @property
    def has_work(self) -> bool:
        """Whether it may do something now."""
        return self._program.has_work

    @property
    def oldest(self) -> int:
        """The number of the program that it is about to end."""
        return self._program.oldest

    def append(self, number: int, work: StagedWork, instructions: Sequence[Instruction], due: Due) -> None:
        """Has it run these next: the rest of the program before, and the beginning of this one."""
        if self._program.is_over:
            self.stage.transport.open(all_routes(work.program))
        self._program.append(number, work, instructions, due)

    def go_on(self, instructions: Sequence[Instruction], due: Due) -> None:
        """Has it run these next."""
        self._program.go_on(instructions, due)

    def turn(self) -> list[tuple[int, StageOutcome]]:
        """Lets it run an instruction, if it need not wait for another stage; the programs that ended with it."""
        self._running = self._running or self._program.run()
        try:
            with self.stage.at_work():
                next(self._running)
        except StopIteration:
            self._running = None
        except BaseException:
            self.fail()
            raise
        ended, self._program.ended = self._program.ended, []
        if ended and self._program.is_over:
            self.forget()
        return ended

    def forget(self) -> None:
        """Lets go of all that is left; microbatches are counted from 0 again."""
        self._program, self._running = StageProgram(self.stage), None
        self.stage.forget()

    def fail(self) -> None:
        """The same where it did not come to its end."""
        self.forget()
        self.stage.references.forget()


class LocalStages:
    """Stages of this process."""

    def __init__(self, *replicas: Sequence[Backbone]) -> None:
        """`replicas`: of each, the parts of its backbone in order."""
        self._boxes: Boxes = defaultdict(deque)
        self.replica_sizes = [len(parts) for parts in replicas]
        parts = [part for own in replicas for part in own]
        self._transports = [LocalTransport(device, self._boxes) for device in range(len(parts))]
        self.stages = [
            Stage(place, part, transport)
            for place, part, transport in zip(stage_positions(self.replica_sizes), parts, self._transports, strict=True)
        ]
        self._going = [RunningStage(stage) for stage in self.stages]
        self._ended: dict[int, dict[int, StageOutcome]] = defaultdict(dict)
        """What stages have told of programs that nobody has waited for."""
        self._num_appended = 0

    def ask(self, what: str, *given: Any) -> list[Any]:
        """What every stage answers to the same question."""
        return self.call_each(what, {stage.device: given for stage in self.stages})

    def call_each(self, what: str, given: Mapping[int, tuple[Any, ...]]) -> list[Any]:
        """Lets the stages run in turn, each until it must wait for another. Where one fails, all end."""
        waiting = {device: answer(self.stages[device], what, own) for device, own in given.items()}
        try:
            found = self._take_turns(waiting)
        except BaseException:
            for index, running in waiting.items():
                with self.stages[index].at_work():
                    running.close()
            if what in TOGETHER:
                # What else is asked may fail while programs go on, and leaves what they have sent.
                self._boxes.clear()
            raise
        return [found[device] for device in given]

    def _take_turns(self, waiting: dict[int, Generator[None, None, Any]]) -> dict[int, Any]:
        """Runs them to their ends, and says what each has found."""
        found: dict[int, Any] = {}
        while waiting:
            for index, running in list(waiting.items()):
                self._transports[index].begin_turn()
                try:
                    with self.stages[index].at_work():
                        next(running)
                except StopIteration as end:
                    found[index] = end.value
                    del waiting[index]
            self._check_not_stuck(waiting)
        return found

    def append(self, work: StagedWork, lists: Lists, due: Due) -> int:
        """Runs the stages' lists in turn."""
        self._num_appended += 1
        for stage, (going, own) in enumerate(zip(self._going, lists, strict=True)):
            going.append(self._num_appended, work, own, due_at(due, stage))
        self._run()
        return self._num_appended

    def go_on(self, lists: Lists, due: Due) -> None:
        """Runs the rest in turn."""
        for stage, (going, own) in enumerate(zip(self._going, lists, strict=True)):
            going.go_on(own, due_at(due, stage))
        self._run()

    def outcomes(self, number: int) -> list[StageOutcome]:
        """What has been told."""
        found = self._ended.pop(number)
        return [found[stage] for stage in range(len(self.stages))]

    def close(self) -> None:
        """Has nothing to end."""

    def _run(self) -> None:
        try:
            while working := [stage for stage, going in enumerate(self._going) if going.has_work]:
                for stage in working:
                    self._transports[stage].begin_turn()
                    for number, outcome in self._going[stage].turn():
                        self._ended[number][stage] = outcome
                self._check_not_stuck([stage for stage in working if self._going[stage].has_work])
        except BaseException:
            for going in self._going:
                going.fail()
            self._boxes.clear()
            raise

    def _check_not_stuck(self, working: Collection[int]) -> None:
        """RuntimeError where all that have work left wait for what nobody is going to send: they would for ever."""
        awaited = [self._transports[stage].awaited for stage in working]
        routes = [route for route in awaited if route is not None]
        if routes and len(routes) == len(working):
            waits = ", ".join(f"{r.target} for {r.channel.name.lower()} of {r.source}" for r in routes)
            raise RuntimeError(f"stages wait for each other for ever: {waits}")
