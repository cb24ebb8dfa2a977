"""Keeps the layout of a run the best for its jobs, as they come and go.

When the set of jobs changes, a thread beside training predicts what the layout of now and others make of the jobs that
are left. At the first step boundary after that the run moves, if `plan/replan` says that it pays. What the first
prediction rests on was measured with other jobs; so when these have trained for as long as moving takes, it is asked
again, with their own pace, and then ever more rarely. Whatever goes wrong with planning or moving, jobs go on where
they are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Executor as Workers
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from weft.engine.events import LayoutDecided
from weft.engine.execute.movable import MovableExecutor, NotMovedError, OpenReplicas
from weft.engine.execute.protocol import ReplicaFaultError
from weft.engine.jobs.live_job import LiveJob
from weft.engine.program_run import rewind
from weft.engine.timeline import TimelineRecorder
from weft.errors import WeftError
from weft.methods.registry import cost_ranks
from weft.plan.deploy.workload import batch_samples
from weft.plan.layout import Layout
from weft.plan.program import Planner
from weft.plan.replan import Decision, Forecaster, LayoutForecast, Prediction, RemainingJob, decide
from weft.wall_clock import Activity

MOST_LENGTHS = 4096
"""Samples of a job whose lengths are looked at, the longest among them."""
LayoutOpener = Callable[[Prediction], tuple[OpenReplicas, Planner]]
"""What opens the replicas of a layout that was planned, and what plans their programs; opens nothing yet."""


class LayoutKeeper:
    """Asks what layout is best after jobs have changed, and moves a run there."""

    def __init__(
        self,
        executor: MovableExecutor,
        layout: Layout,
        forecast: Forecaster,
        opener: LayoutOpener,
        *,
        planned_for: Collection[str],
        workers: Workers | None = None,
    ) -> None:
        """`planned_for`: the jobs that the first layout was chosen for; `workers`: what forecasts run on."""
        self.layout = layout
        self._executor, self._forecast, self._opener = executor, forecast, opener
        self._workers = workers or ThreadPoolExecutor(1, "weft-layout")
        self._names: frozenset[str] | None = None
        """The jobs that were asked about last."""
        self._asked: Future[LayoutForecast] | None = None
        self._planned_for = frozenset(planned_for)
        self._is_first = False
        """It was about the jobs that the layout was chosen for: measurements are compared with it, and that is all."""
        self._is_told = False
        """Whether what comes of it is told even if nothing moves: once for each change."""
        self._again_s: float | None = None
        """When to ask again about the same jobs, by `time.perf_counter`."""
        self._waited_s = 0.0
        """How long it was between the last two questions about them."""
        self._known: tuple[Prediction, float] | None = None
        """Of the layout of now, with the tokens of a step."""
        self._since: tuple[dict[LiveJob, int], float] = ({}, 0.0)
        """Tokens that each job had trained when that began to count, and seconds of computing."""
        self.pace = 1.0
        """Seconds that go by for a predicted one, as far as that has been measured."""

    @property
    def is_ready(self) -> bool:
        """Whether there is something to decide at the next step boundary."""
        return self._asked is not None and self._asked.done()

    @property
    def _is_due(self) -> bool:
        return self._asked is None and self._again_s is not None and time.perf_counter() >= self._again_s

    def hear(self, jobs: Sequence[LiveJob], timeline: TimelineRecorder) -> None:
        """Has the layout for these jobs forecast, if others were asked about last, or these long ago."""
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

    def settle(
        self, jobs: Mapping[str, LiveJob], timeline: TimelineRecorder
    ) -> tuple[LayoutDecided | None, Planner | None]:
        """Does what a forecast that is ready asks for, with nothing under way; the planner to go on with if it moved.

        `jobs`: all that the executor knows.
        """
        assert self._asked is not None, "a forecast is ready"
        asked, self._asked = self._asked, None
        planner = None
        error = asked.exception()
        if error is not None:
            event = self._kept(f"another one could not be planned: {error}")
        else:
            forecast = asked.result()
            found = decide(self.layout, forecast, self.pace, self._executor.cost)
            event = self._kept(found.reason)
            if found.moves and not self._is_first:
                event, planner = self._move(found, jobs, timeline)
            now = forecast.planned if planner is not None else forecast.now
            self._known = None if now is None else (now, forecast.step_tokens)
            if not (found.moves or self._is_first) and found.planned != self.layout:
                self._waited_s = max(found.cost.seconds, 2 * self._waited_s)
                self._again_s = time.perf_counter() + self._waited_s
        alive = [job for job in jobs.values() if job.name in (self._names or ())]
        self._since = ({job: job.num_tokens for job in alive}, _computing_s(timeline))
        return event if self._is_told or planner is not None else None, planner

    def close(self) -> None:
        """Plans no more."""
        self._workers.shutdown(wait=False, cancel_futures=True)

    def _move(
        self, found: Decision, jobs: Mapping[str, LiveJob], timeline: TimelineRecorder
    ) -> tuple[LayoutDecided, Planner | None]:
        """Takes all jobs to another layout, from their last step boundary on."""
        for job in jobs.values():
            if job.is_running:
                rewind(self._executor, job)
        before, begun_s = self.layout, time.perf_counter()
        with timeline.span("move", before=str(before), layout=str(found.planned), reason=found.reason) as span:
            try:
                open_replicas, planner = self._opener(found.forecast.planned)
                added = self._executor.move(open_replicas)
            except (WeftError, NotMovedError) as error:
                if isinstance(error, ReplicaFaultError):
                    raise
                # Training stood still all the same.
                span["failed"] = str(error)
        if "failed" in span:
            seconds = time.perf_counter() - begun_s
            return self._kept(f"{found.planned} could not be had: {span['failed']}", seconds), None
        for job, own in ((jobs[name], own) for name, own in added.items() if name in jobs):
            job.lane, job.kernel_bytes = own.lane, own.kernel_bytes
            job.home, job.has_home = None if job.home is None else 0, False
        self.layout = found.planned
        seconds = time.perf_counter() - begun_s
        return LayoutDecided(str(self.layout), str(before), found.reason, seconds), planner

    def _kept(self, reason: str, seconds: float = 0.0) -> LayoutDecided:
        return LayoutDecided(str(self.layout), str(self.layout), reason, seconds)

    def _note_pace(self, timeline: TimelineRecorder) -> None:
        """Compares what has run since the last forecast with what that said."""
        if self._known is None:
            return
        prediction, step_tokens = self._known
        before, begun_s = self._since
        tokens = sum(job.num_tokens - then for job, then in before.items())
        seconds = _computing_s(timeline) - begun_s
        if tokens > 0 and seconds > 0:
            self.pace = (seconds / tokens) / (prediction.step_s / step_tokens)


def _computing_s(timeline: TimelineRecorder) -> float:
    return timeline.wall.split().seconds(Activity.COMPUTING)


def _remaining(job: LiveJob, num_steps: int) -> RemainingJob:
    """A job of an engine, as a planner sees it; read beside training, so nothing of it that changes."""
    spec, data = job.spec, job.data.train
    lengths = np.sort(data.samples.lengths)
    chosen = np.linspace(0, len(lengths) - 1, min(len(lengths), MOST_LENGTHS)).round().astype(int)
    return RemainingJob(
        job.name,
        batch_size=batch_samples(spec.batch_size, data.num_groups, len(lengths)),
        lengths=(*lengths[chosen].tolist(), job.longest),
        rank=cost_ranks(spec.adapter).widest,
        num_steps=num_steps,
        is_free=spec.sums == "free",
    )
