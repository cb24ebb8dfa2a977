"""What each replica does in a step: predicted and measured seconds, as in LobRA's figures 9 and 10.

A step is one global batch of every job of a program. Of a replica, the slowest stage's passes count, measured or by its
cost model; waiting for other stages, other replicas and the optimizer is the rest of the step, in which it is idle.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from weft.plan.cost.learned import PASSES, PassCosts
from weft.plan.program import Forward, Program
from weft.plan.simulate.timeline import Span
from weft.plan.types import Microbatch

STEP_SPAN = "dispatch"
"""Name of a span from the beginning of a step to its end, on the first stage of a replica."""


@dataclass(frozen=True, slots=True)
class ReplicaShare:
    replica: int
    tokens: int
    longest: int
    predicted_s: float
    seconds: float
    busy: float
    """Share of the step in which its stages computed, on average."""
    is_learnt: bool
    """True if the prediction rests on measured passes, not on the hardware table."""


def step_spans(program: Program, costs: Sequence[PassCosts], spans: Sequence[Span], begin_s: float) -> list[Span]:
    """A span for every step and replica, with its `ReplicaShare`; a step begins where the one before has ended, the
    first one not before `begin_s`. `costs`: of each replica, by which the program was planned."""
    rounds = _rounds(program.microbatches)
    found: list[Span] = []
    for number in sorted({number for number in rounds if number is not None}):
        ran = [s for s in spans if s.name in PASSES and rounds[s.args["microbatch"]] == number]
        if not ran:
            continue
        begin_s = max(begin_s, min(span.start_s for span in ran))
        seconds = max(span.end_s for span in ran) - begin_s
        for replica, stages in enumerate(program.replicas):
            forwards = (i.microbatch for i in program.stages[stages.start] if isinstance(i, Forward))
            own = [program.microbatches[k] for k in forwards if rounds[k] == number]
            taken = [sum(span.duration_s for span in ran if span.stage == stage) for stage in stages]
            share = ReplicaShare(
                replica,
                sum(microbatch.num_tokens for microbatch in own),
                max((segment.length for microbatch in own for segment in microbatch.segments), default=0),
                _predicted_s(own, costs[replica], len(stages)),
                max(taken),
                sum(taken) / (len(stages) * seconds) if seconds > 0 else 0.0,
                costs[replica][1] is not None,
            )
            found.append(Span(STEP_SPAN, begin_s, seconds, dataclasses.asdict(share), stages.start))
        begin_s += seconds
    return found


def _rounds(microbatches: Sequence[Microbatch]) -> list[int | None]:
    """Step that each microbatch belongs to, counted from 0; None for empty ones."""
    first: dict[str, int] = {}
    for segment in (segment for microbatch in microbatches for segment in microbatch.segments):
        first[segment.job] = min(first.get(segment.job, segment.step), segment.step)
    return [max((s.step - first[s.job] for s in microbatch.segments), default=None) for microbatch in microbatches]


def _predicted_s(own: Sequence[Microbatch], costs: PassCosts, num_stages: int) -> float:
    cost, adapters = costs
    lengths = [[segment.length for segment in microbatch.segments] for microbatch in own]
    added_s = 0.0 if adapters is None else sum(len(PASSES) * adapters.microbatch_s(m.job_tokens) for m in own)
    return added_s + max(
        sum(cost.forward_s(each, stage) + cost.backward_s(each, stage) for each in lengths)
        for stage in range(num_stages)
    )
