"""Runs a program on the durations that were recorded when it ran on real stages.

What is left of the difference between both is what the simulator does not know: transfers, which take no time here, and
what a stage does between two instructions.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence

from weft.plan.program import Program
from weft.plan.simulate.interpret import simulate
from weft.plan.simulate.timeline import Span, Timeline


def replay(program: Program, spans: Iterable[Span]) -> Timeline:
    """What the simulator makes of a program whose passes and steps took as long as these spans."""
    return simulate(program, _Recorded(spans))


class _Recorded:
    """A cost model that gives each stage the durations it had, one after another.

    The simulator asks for each pass and step of a stage once, in the stage's order.
    """

    def __init__(self, spans: Iterable[Span]) -> None:
        self._left: dict[tuple[str, int], deque[float]] = defaultdict(deque)
        for span in spans:
            self._left[span.name, span.stage].append(span.duration_s)

    def forward_s(self, lengths: Sequence[int], stage: int) -> float:
        return self._left["forward", stage].popleft()

    def backward_s(self, lengths: Sequence[int], stage: int) -> float:
        return self._left["backward", stage].popleft()

    def step_s(self, stage: int) -> float:
        return self._left["step", stage].popleft()

    def transfer_s(self, num_tokens: int) -> float:
        return 0.0

    def held_bytes(self, lengths: Sequence[int], stage: int) -> int:
        return 0
