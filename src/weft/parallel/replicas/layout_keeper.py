"""Chooses the layout of a run again as its jobs come and go.

When the set of jobs changes, a thread beside training predicts what the layout of now and others make of the jobs that
are left; if `plan/replan` finds that another one pays, the run moves there. What the first
prediction rests on was measured with other jobs; so when these have trained for as long as moving takes, it is made
again, with their measured pace, and then ever more rarely. Whatever goes wrong with planning or moving, jobs go on
where they are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Executor as Workers
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from weft.engine.events import LayoutDecided
from weft.engine.timeline import TimelineRecorder
from weft.methods.registry import cost_ranks
from weft.parallel.replicas.known_job import JobRecord
from weft.parallel.replicas.rank_group import RankGroup
from weft.plan.deploy.workload import batch_samples
from weft.plan.layout import Layout
from weft.plan.replan import Decision, Forecaster, LayoutForecast, MoveCost, Prediction, RemainingJob, decide
from weft.spec import JobSpec
from weft.wall_clock import Activity

MOST_LENGTHS = 4096
"""Samples of a job whose lengths are looked at, the longest among them."""
OpenRanks = Callable[[Prediction, Sequence[JobSpec], int], RankGroup]
"""Starts the ranks of a layout that was planned, for these jobs and this capacity."""


class LayoutKeeper:
    """Forecasts layouts after jobs have changed, and decides whether a run moves."""

    def __init__(
        self,
        first: Prediction,
        forecast: Forecaster,
        open_ranks: OpenRanks,
        *,
        planned_for: Collection[str],
        workers: Workers | None = None,
    ) -> None:
        """`planned_for`: the jobs that the first layout was chosen for; `workers`: what forecasts run on."""
        self.now = first
        """The layout of the run, as it was planned."""
        self.open_ranks = open_ranks
        self._forecast = forecast
        self._workers = workers or ThreadPoolExecutor(1, "weft-layout")
        self._names: frozenset[str] | None = None
        """The jobs of the last forecast."""
        self._asked: Future[LayoutForecast] | None = None
        self._planned_for = frozenset(planned_for)
        self._is_first = False
        """The forecast is of the jobs that the layout was chosen for: measurements are compared with it, no more."""
        self._is_told = False
        """Whether the decision is an event even if nothing moves: once for each change."""
        self._again_s: float | None = None
        """When to forecast the same jobs again, by `time.perf_counter`."""
        self._waited_s = 0.0
        """Seconds between their last two forecasts."""
        self._known: tuple[Prediction, float] | None = None
        """Of the layout of now, with the tokens of a step."""
        self._since: tuple[list[tuple[JobRecord, int]], float] = ([], 0.0)
        """Tokens that each job had trained when that began to count, and seconds of computing."""
        self.pace = 1.0
        """Seconds that go by for a predicted one, as far as that has been measured."""

    @property
    def layout(self) -> Layout:
        """That of the run."""
        return self.now.layout

    @property
    def is_ready(self) -> bool:
        """Whether there is something to decide."""
        return self._asked is not None and self._asked.done()

    @property
    def _is_due(self) -> bool:
        return self._asked is None and self._again_s is not None and time.perf_counter() >= self._again_s

    def watch(self, jobs: Sequence[JobRecord], timeline: TimelineRecorder) -> None:
        """Starts a forecast for these jobs, if the last one was for others, or long ago."""
        names = frozenset(job.name for job in jobs)
        has_changed = names != self._names
        if not names or not (has_changed or self._is_due):
            return
        self._note_pace(timeline)
        self._is_first = self._names is None and names == self._planned_for
        self._is_told = has_changed and not self._is_first
        if has_changed:
            self._waited_s = 0.0
        self._names, self._known, self._again_s = names, None, None
        left = [(job, job.num_steps - job.step) for job in jobs]
        self._asked = self._workers.submit(lambda: self._forecast([_remaining(*own) for own in left], self.layout))

    def decide(
        self,
        jobs: Sequence[JobRecord],
        timeline: TimelineRecorder,
        cost: MoveCost,
        move: Callable[[Decision], LayoutDecided],
    ) -> LayoutDecided | None:
        """Decides by a forecast that is ready, and calls `move` if the run moves; the event, if there is one.

        `jobs`: all that the run has; `cost`: of a move.
        """
        assert self._asked is not None, "a forecast is ready"
        asked, self._asked = self._asked, None
        error = asked.exception()
        if error is not None:
            event = self.kept(f"another one could not be planned: {error}")
        else:
            forecast = asked.result()
            found = decide(self.layout, forecast, self.pace, cost)
            event = self.kept(found.reason)
            if found.moves and not self._is_first:
                event = move(found)
            if event.has_moved:
                self.now = forecast.planned
            now = forecast.planned if event.has_moved else forecast.now
            self._known = None if now is None else (now, forecast.step_tokens)
            if not (found.moves or self._is_first) and found.planned != self.layout:
                self._waited_s = max(found.cost.seconds, 2 * self._waited_s)
                self._again_s = time.perf_counter() + self._waited_s
        alive = [job for job in jobs if job.name in (self._names or ())]
        self._since = ([(job, job.num_tokens) for job in alive], _computing_s(timeline))
        return event if self._is_told or event.has_moved else None

    def kept(self, reason: str, seconds: float = 0.0) -> LayoutDecided:
        """The event that says why nothing moves."""
        return LayoutDecided(str(self.layout), str(self.layout), reason, seconds)

    def close(self) -> None:
        """Forecasts no more."""
        self._workers.shutdown(wait=False, cancel_futures=True)

    def _note_pace(self, timeline: TimelineRecorder) -> None:
        """Compares what has run since the last forecast with what that predicted."""
        if self._known is None:
            return
        prediction, step_tokens = self._known
        before, begun_s = self._since
        tokens = sum(job.num_tokens - then for job, then in before)
        seconds = _computing_s(timeline) - begun_s
        if tokens > 0 and seconds > 0:
            self.pace = (seconds / tokens) / (prediction.step_s / step_tokens)


def _computing_s(timeline: TimelineRecorder) -> float:
    return timeline.wall.split().seconds(Activity.COMPUTING)


def _remaining(job: JobRecord, num_steps: int) -> RemainingJob:
    """A job of a run, as a planner sees it; read beside training, so nothing of it that changes."""
    spec, data = job.spec, job.data.train
    lengths = np.sort(data.samples.lengths)
    chosen = np.linspace(0, len(lengths) - 1, min(len(lengths), MOST_LENGTHS)).round().astype(int)
    return RemainingJob(
        job.name,
        batch_size=batch_samples(spec.batch_size, data.num_groups, len(lengths)),
        lengths=(*lengths[chosen].tolist(), job.longest),
        rank=cost_ranks(spec.adapter).widest,
        num_steps=num_steps,
        is_any_order=spec.gradient_sum == "any_order",
    )
