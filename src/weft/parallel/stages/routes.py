"""Which ways messages take in a program, and in which order those about steps go.

Messages carry no name: those of one channel between two stages arrive in the order in which they were sent, which is
all that NCCL has. Activations and gradients go in the order in which the program says so. What concerns a step is
sent when its sender comes to measure it, and may be wanted in another order; so the receiver is told the sender's order
with the lists that all stages run, and keeps what comes before its turn. To wait for that is never to wait longer: it
was sent before.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque

from weft.parallel.stages.transport import Channel, Route
from weft.plan.pipeline.append import Lists
from weft.plan.program import Measure, Program, Send, Step

StepOf = tuple[str, int]
"""A job and its step."""


Due = dict[Route, deque[StepOf]]
"""By route, the steps that messages will come of, in their order."""


class StepOrders:
    """In which order stages tell each other about steps, of programs whose lists are told bit by bit.

    Parts go to the judge, who tells every other stage that steps.
    """

    def __init__(self) -> None:
        self._judges: dict[Measure, int] = {}
        self._stepping: dict[Measure, list[int]] = {}

    def know(self, program: Program) -> None:
        """Learns who judges and who steps."""
        self._judges |= {measure: stages[0] for measure, stages in program.measuring.items()}
        stepping: dict[Measure, list[int]] = {}
        for stage, instructions in enumerate(program.stages):
            for i in instructions:
                if isinstance(i, Step):
                    stepping.setdefault(Measure(i.job, i.step), []).append(stage)
        self._stepping |= stepping

    def due(self, lists: Lists) -> Due:
        """What all stages send each other while they do what they are told next; no judge is told before the others."""
        found: Due = {}
        judged: list[Measure] = []
        for stage, instructions in enumerate(lists):
            for measure in (i for i in instructions if isinstance(i, Measure)):
                judge = self._judges[measure]
                routes = [Route(Channel.PART, stage, judge)]
                if stage == judge:
                    judged.append(measure)
                    routes = [Route(Channel.NORM, judge, to) for to in self._stepping.get(measure, ()) if to != judge]
                for route in routes:
                    found.setdefault(route, deque()).append((measure.job, measure.step))
        for measure in judged:
            del self._judges[measure]
            self._stepping.pop(measure, None)
        return found


def steps_due(program: Program) -> Due:
    """The same of a whole program."""
    orders = StepOrders()
    orders.know(program)
    return orders.due(program.stages)


def due_at(due: Due, stage: int) -> Due:
    """What a stage hears of it."""
    return {route: steps for route, steps in due.items() if route.target == stage}


def routes_of(program: Program) -> frozenset[Route]:
    """All ways that messages of a program take; the same on every stage."""
    sends = {
        Route(Channel.GRADIENT if i.is_gradient else Channel.ACTIVATION, stage, i.to_stage)
        for stage, instructions in enumerate(program.stages)
        for i in instructions
        if isinstance(i, Send) and program.microbatches[i.microbatch].segments
    }
    return frozenset(sends | steps_due(program).keys())


def all_routes(program: Program) -> frozenset[Route]:
    """All ways that messages may take in a program and in those that are appended to it, if they share jobs as it does.

    Stages that are at work open none: whoever waited for another to open it might be waited for.
    """
    replicas = program.replicas
    judges = [devices.start for devices in replicas]
    found = {
        route
        for devices in replicas
        for stage in devices[1:]
        for route in (Route(Channel.ACTIVATION, stage - 1, stage), Route(Channel.GRADIENT, stage, stage - 1))
    }
    firsts = Counter((i.job, i.step) for first in judges for i in program.stages[first] if isinstance(i, Step))
    shares_jobs = max(firsts.values(), default=0) > 1
    for judge, stage in itertools.product(judges, range(program.num_stages)):
        if stage != judge and (shares_jobs or any({judge, stage} <= {*devices} for devices in replicas)):
            found.add(Route(Channel.NORM, judge, stage))
            if stage > judge:
                found.add(Route(Channel.PART, stage, judge))
    return frozenset(found)
