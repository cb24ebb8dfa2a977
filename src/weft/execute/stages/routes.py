"""Which ways messages take in a program, and in which order those about steps go.

Messages carry no name: those of one channel between two stages arrive in the order in which they were sent, which is
all that NCCL has. Activations and gradients go in the order in which the program says so. What concerns a step is
sent when its sender comes to measure it, and may be wanted in another order; so the receiver reads the sender's order
from the program, and keeps what comes before its turn. To wait for that is never to wait longer: it was sent before.
"""

from __future__ import annotations

from collections import deque

from weft.execute.stages.transport import Channel, Route
from weft.plan.program import Measure, Program, Send, Step

StepOf = tuple[str, int]
"""A job and its step."""


Due = dict[Route, deque[StepOf]]
"""By route, the steps that messages will come of, in their order."""


def steps_due(program: Program) -> Due:
    """All that stages tell each other about steps: parts go to the judge, who tells every other stage that steps."""
    judges = {measure: stages[0] for measure, stages in program.measuring.items()}
    stepping: dict[Measure, list[int]] = {}
    for stage, instructions in enumerate(program.stages):
        for i in instructions:
            if isinstance(i, Step):
                stepping.setdefault(Measure(i.job, i.step), []).append(stage)
    found: Due = {}
    for stage, instructions in enumerate(program.stages):
        for measure in (i for i in instructions if isinstance(i, Measure)):
            judge = judges[measure]
            routes = [Route(Channel.PART, stage, judge)]
            if stage == judge:
                routes = [Route(Channel.VERDICT, judge, to) for to in stepping.get(measure, ()) if to != judge]
            for route in routes:
                found.setdefault(route, deque()).append((measure.job, measure.step))
    return found


def routes_of(program: Program) -> frozenset[Route]:
    """All ways that messages of a program take; the same on every stage."""
    sends = {
        Route(Channel.GRADIENT if i.is_gradient else Channel.ACTIVATION, stage, i.to_stage)
        for stage, instructions in enumerate(program.stages)
        for i in instructions
        if isinstance(i, Send) and program.microbatches[i.microbatch].segments
    }
    return frozenset(sends | steps_due(program).keys())
