"""Forecasters that name layouts, and run at once, so that no test of a run that moves depends on a clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor as Workers
from concurrent.futures import Future
from typing import Any

from weft.errors import PlanError
from weft.plan.layout import Layout, parse_layout
from weft.plan.replan import LayoutForecast, Prediction, RemainingJob


class AtOnce(Workers):
    """Runs what it is given when it is given it, so that no test depends on a clock."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except Exception as error:
            done.set_exception(error)
        return done


class Names:
    """A forecaster that names one layout for each number of jobs; all of them save as much."""

    def __init__(self, layouts: dict[int, str], saved_s: float = 1e9, step_s: float = 1.0) -> None:
        self.layouts, self.saved_s, self.step_s = layouts, saved_s, step_s
        self.requests: list[tuple[list[RemainingJob], str]] = []

    def __call__(self, jobs: Sequence[RemainingJob], now: Layout) -> LayoutForecast:
        self.requests.append((list(jobs), str(now)))
        if len(jobs) not in self.layouts:
            raise PlanError("no layout is known.")
        planned = Prediction(parse_layout(self.layouts[len(jobs)]), self.step_s, 1.0)
        tokens = sum(job.step_tokens for job in jobs)
        return LayoutForecast(Prediction(now, self.step_s, 1.0 + self.saved_s), planned, tokens, 64)
