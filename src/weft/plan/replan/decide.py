"""Whether a run changes its layout after its jobs have changed.

    redeploy if   pace · (left(now) − left(planned))  >  moving      or the replicas of now cannot hold a sample

`left` is all that remains to be trained. Forecasts are in predicted seconds; `pace` is how many seconds have gone by
for each predicted one since the jobs last changed, and moving is measured, so that both sides are seconds of this run.
Only adapters with their optimizers move.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.errors import PlanError
from weft.plan.layout import Layout
from weft.plan.replan.types import LayoutForecast, MoveCost


@dataclass(frozen=True)
class Decision:
    """What a run does about its layout, and why."""

    now: Layout
    forecast: LayoutForecast
    pace: float
    """Seconds that go by for a predicted one."""
    cost: MoveCost

    @property
    def planned(self) -> Layout:
        """The best layout for the jobs that are left."""
        return self.forecast.planned.layout

    @property
    def gain_s(self) -> float | None:
        """Saved by the planned layout, moving not counted; None if nothing else is possible."""
        if self.forecast.now is None:
            return None
        return self.pace * (self.forecast.now.left_s - self.forecast.planned.left_s)

    @property
    def moves(self) -> bool:
        """Whether the layout changes."""
        if self.planned == self.now:
            return False
        return self.gain_s is None or self.gain_s > self.cost.seconds

    @property
    def reason(self) -> str:
        """Why, as the rest of a line."""
        if self.planned == self.now:
            return "it is still the best for the jobs that are left"
        if self.gain_s is None:
            return f"samples of up to {self.forecast.longest:,} tokens fit on no replica there was"
        cost = f"{self.cost.seconds:,.3g} s"
        if self.moves:
            return f"it saves about {self.gain_s:,.3g} s of what is left, and moving takes {cost}"
        saved = f"would save about {self.gain_s:,.3g} s of what is left" if self.gain_s > 0 else "would save nothing"
        return f"{self.planned} {saved}, and moving takes {cost}"


def decide(now: Layout, forecast: LayoutForecast, pace: float, cost: MoveCost) -> Decision:
    """What a run in this layout does about a forecast."""
    if pace <= 0:
        raise PlanError(f"{pace} seconds go by for a predicted one; more than 0.")
    return Decision(now, forecast, pace, cost)
