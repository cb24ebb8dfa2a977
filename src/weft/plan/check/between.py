"""What is wrong between the stages of a program: transfers that cross, stages that wait for ever."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from weft.plan.program import Backward, Forward, Measure, Program, Receive, Send, Step

Transfer = tuple[int, int, bool]
"""What travels: microbatch, stage it is for, whether it is a gradient."""


def crossings(program: Program) -> Iterator[str]:
    """Neighbours that would take each other's transfers for one another: channels deliver in order."""
    sent: dict[tuple[int, int, bool], list[int]] = defaultdict(list)
    awaited: dict[tuple[int, int, bool], list[int]] = defaultdict(list)
    for stage, instructions in enumerate(program.stages):
        for i in instructions:
            if isinstance(i, Send):
                sent[stage, i.to_stage, i.is_gradient].append(i.microbatch)
            elif isinstance(i, Receive):
                awaited[i.from_stage, stage, i.is_gradient].append(i.microbatch)
    for source, target, is_gradient in sorted({*sent, *awaited}):
        channel = (source, target, is_gradient)
        if sent[channel] != awaited[channel]:
            kind = "gradients" if is_gradient else "activations"
            yield f"stage {target} receives {kind} in another order than stage {source} sends them"


def stuck(program: Program) -> Iterator[str]:
    """Stages that wait for each other for ever when all lists run side by side."""
    places = [0] * program.num_stages
    arrived: set[Transfer] = set()
    measured: Counter[Measure] = Counter()
    measuring, rings = program.measuring, program.rings
    in_step = {stage for ring in rings for stage in ring}
    moved = True
    while moved:
        moved = False
        for stage, instructions in enumerate(program.stages):
            while places[stage] < len(instructions):
                i = instructions[places[stage]]
                if isinstance(i, Receive) and (i.microbatch, stage, i.is_gradient) not in arrived:
                    break
                if isinstance(i, Forward | Backward) and stage in in_step:
                    break
                if isinstance(i, Measure) and stage == measuring[i][0] and measured[i] < len(measuring[i]) - 1:
                    break
                if isinstance(i, Step) and measured[of := Measure(i.job, i.step)] < len(measuring.get(of, ())):
                    break
                if isinstance(i, Send):
                    arrived.add((i.microbatch, i.to_stage, i.is_gradient))
                measured.update([i] if isinstance(i, Measure) else [])
                places[stage] += 1
                moved = True
        for ring in rings:
            if _may_pass(program, ring, places):
                for stage in ring:
                    places[stage] += 1
                moved = True
    for stage, instructions in enumerate(program.stages):
        if places[stage] < len(instructions):
            yield f"stage {stage} waits for ever at {instructions[places[stage]]}"


def _may_pass(program: Program, ring: Sequence[int], places: Sequence[int]) -> bool:
    """Whether all of these stages stand before a pass in the same direction."""
    at = set[type | None]()
    for stage in ring:
        own, place = program.stages[stage], places[stage]
        at.add(type(own[place]) if place < len(own) else None)
    return at in ({Forward}, {Backward})
