"""Programs of several stages as requests: what the stages get, what they report, and the order of their messages.

Messages carry no name: those of one channel between two stages arrive in the order in which they were sent, which is
all that NCCL guarantees. Activations and gradients go in the order of the program. A message about a step is sent when
its sender measures it, and may be needed in another order; so the receiver knows the sender's order from the lists that
all stages run (`StepOrders`), and keeps what arrives early. This never waits longer: it was sent before.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from weft.engine.execute.protocol import MemoryPeak, MicrobatchOutcome, Work
from weft.parallel.stages.transport import Channel, Route
from weft.plan.pipeline.append import Lists
from weft.plan.program import Measure, Program, Send, Step
from weft.plan.simulate.timeline import Span

if TYPE_CHECKING:
    from weft.kernels.adamw import Updated

StepOf = tuple[str, int]


Due = dict[Route, deque[StepOf]]


@dataclass(frozen=True)
class StagedOutcome:
    microbatches: Sequence[MicrobatchOutcome]
    steps: Mapping[tuple[str, int], Updated]
    spans: Sequence[Span]


@dataclass(frozen=True)
class StagedWork(Work[StagedOutcome]):
    """A program of several stages, from its beginning to its end. A consecutive program has ended once its rest has
    been started, with the next one or alone."""

    program: Program
    row_tile: int
    rates: Mapping[tuple[str, int], float]
    lists: Lists | None = None
    """Instructions of every stage now, with the rest of the program before, for consecutive programs."""
    first: int = 0
    kept: Mapping[tuple[str, int], int] = field(default_factory=dict)
    """Jobs and steps after which the job's state is copied for a checkpoint, with the first step still needed."""
    reads_references: bool = False
    """True if one of its jobs has a reference: devices in step then exchange how many passes each has to run."""


@dataclass(frozen=True)
class MoveWork(Work[None]):
    """Moves jobs to the replicas that a consecutive program trains them on; they have no work under way."""

    program: Program


@dataclass(frozen=True)
class FinishWork(Work[None]):
    lists: Lists


@dataclass
class StageOutcome:
    microbatches: dict[int, MicrobatchOutcome] = field(default_factory=dict)
    steps: dict[StepOf, Updated] = field(default_factory=dict)
    """Results, without those of jobs that have no share of the stage."""
    spans: list[Span] = field(default_factory=list)
    peak: MemoryPeak | None = None
    """Since the program before ended; None where it is not counted."""


def program_outcome(work: StagedWork, stages: list[StageOutcome]) -> StagedOutcome:
    nothing = MicrobatchOutcome((), 0, 0.0, 0.0)
    found = {k: outcome for stage in stages for k, outcome in stage.microbatches.items()}
    microbatches = [found.get(k, nothing) for k in range(len(work.program.microbatches))]
    spans = sorted((span for stage in stages for span in stage.spans), key=lambda span: (span.start_s, span.stage))
    steps: dict[StepOf, Updated] = {}
    for stage in stages:
        for step, updated in stage.steps.items():
            known = steps.get(step, updated)
            # NaN counts as the largest.
            largest = max(known.largest, updated.largest, key=lambda size: (math.isnan(size), size))
            steps[step] = dataclasses.replace(known, largest=largest)
    return StagedOutcome(microbatches, steps, spans)


class StageGroup(Protocol):
    replica_sizes: list[int]

    def call_all(self, what: str, *given: Any) -> list[Any]:
        """Every stage's answer to a method of `Stage` or one of `TOGETHER`; raises the first error."""
        ...

    def call_each(self, what: str, given: Mapping[int, tuple[Any, ...]]) -> list[Any]:
        """Answers of some stages to a method, by stage; each stage gets arguments of its own."""
        ...

    def append(self, work: StagedWork, lists: Lists, due: Due) -> int:
        """Starts a consecutive program after all earlier ones; returns its number. `due`: messages about steps
        meanwhile."""
        ...

    def go_on(self, lists: Lists, due: Due) -> None: ...

    def outcomes(self, number: int) -> list[StageOutcome]:
        """Waits for a program that has been started completely; returns every stage's outcome."""
        ...

    def check(self) -> None:
        """StageLostError if a stage is gone."""
        ...

    def close(self) -> None: ...


class StepOrders:
    """Order of the messages about steps, in programs whose lists arrive in parts. Parts go to the root stage, which
    sends the norm to every other stage that steps."""

    def __init__(self) -> None:
        self._roots: dict[Measure, int] = {}
        self._stepping: dict[Measure, list[int]] = {}

    def know(self, program: Program) -> None:
        self._roots |= {measure: stages[0] for measure, stages in program.measuring.items()}
        stepping: dict[Measure, list[int]] = {}
        for stage, instructions in enumerate(program.stages):
            for i in instructions:
                if isinstance(i, Step):
                    stepping.setdefault(Measure(i.job, i.step), []).append(stage)
        self._stepping |= stepping

    def due(self, lists: Lists) -> Due:
        """All messages between stages for these lists; no message of a root stage comes before the parts."""
        found: Due = {}
        measured: list[Measure] = []
        for stage, instructions in enumerate(lists):
            for measure in (i for i in instructions if isinstance(i, Measure)):
                root = self._roots[measure]
                routes = [Route(Channel.PART, stage, root)]
                if stage == root:
                    measured.append(measure)
                    routes = [Route(Channel.NORM, root, to) for to in self._stepping.get(measure, ()) if to != root]
                for route in routes:
                    found.setdefault(route, deque()).append((measure.job, measure.step))
        for measure in measured:
            del self._roots[measure]
            self._stepping.pop(measure, None)
        return found


def steps_due(program: Program) -> Due:
    orders = StepOrders()
    orders.know(program)
    return orders.due(program.stages)


def due_at(due: Due, stage: int) -> Due:
    return {route: steps for route, steps in due.items() if route.target == stage}


def routes_of(program: Program) -> frozenset[Route]:
    """All routes of a program's messages; the same on every stage."""
    sends = {
        Route(Channel.GRADIENT if i.is_gradient else Channel.ACTIVATION, stage, i.to_stage)
        for stage, instructions in enumerate(program.stages)
        for i in instructions
        if isinstance(i, Send) and program.microbatches[i.microbatch].segments
    }
    return frozenset(sends | steps_due(program).keys())


def all_routes(program: Program) -> frozenset[Route]:
    """All routes that a program and its successors may use, if they share jobs in the same way. Stages that are at work
    open no routes: each might wait for the other."""
    replicas = program.replicas
    roots = [devices.start for devices in replicas]
    found = {
        route
        for devices in replicas
        for stage in devices[1:]
        for route in (Route(Channel.ACTIVATION, stage - 1, stage), Route(Channel.GRADIENT, stage, stage - 1))
    }
    firsts = Counter((i.job, i.step) for first in roots for i in program.stages[first] if isinstance(i, Step))
    shares_jobs = max(firsts.values(), default=0) > 1
    for root, stage in itertools.product(roots, range(program.num_stages)):
        if stage != root and (shares_jobs or any({root, stage} <= {*devices} for devices in replicas)):
            found.add(Route(Channel.NORM, root, stage))
            if stage > root:
                found.add(Route(Channel.PART, stage, root))
    return frozenset(found)
