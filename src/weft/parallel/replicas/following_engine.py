"""An engine over ranks whose layout follows the jobs: ranks are closed, and others opened, where that pays.

Every job is saved at a step boundary and continues from that checkpoint on the new ranks, as in a move between two
ranks. The old ranks are closed first, because devices need not have memory for both. If the new ones cannot be loaded,
ranks of the old layout are started again, so no step is lost.

When the set of jobs changes, a thread predicts the remaining time in the current layout and in others (`LayoutKeeper`);
if `plan/replan` finds that another one pays, the run moves there. The first prediction rests on measurements of other
jobs, so it is made again with the measured speed once these jobs have trained for as long as a move takes, and then
less and less often. Any error in planning or moving leaves the jobs where they are.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Executor as Workers
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from weft.data.dataset import JobData
from weft.engine.events import EvalDone, LayoutDecided
from weft.engine.timeline import TimelineRecorder
from weft.errors import WeftError
from weft.job_state import JobState
from weft.parallel.auto_layout import remaining_job
from weft.parallel.replicas.messages import RankEvent
from weft.parallel.replicas.rank_group import RankGroup
from weft.parallel.replicas.records import JobRecord, RankRecord
from weft.parallel.replicas.replicated_engine import ReplicatedEngine
from weft.parallel.replicas.steered_engine import SweepReplicas
from weft.plan.layout import Layout
from weft.plan.replan import Decision, Forecaster, LayoutForecast, MoveCost, Prediction, RemainingJob, decide
from weft.spec import JobSpec
from weft.store.faults import point
from weft.store.run_dir import revoke_permit
from weft.store.wall_clock import Activity


class FollowingEngine(ReplicatedEngine):
    def __init__(self, ranks: RankGroup, *given: Any, layouts: LayoutKeeper, **named: Any) -> None:
        """Like `ReplicatedEngine`; `layouts` decides when the run moves."""
        begun_s = time.monotonic()
        super().__init__(ranks, *given, **named)
        self._layouts = layouts
        self._load_s = time.monotonic() - begun_s
        self._job_s = 0.0

    @property
    def cost(self) -> MoveCost:
        return MoveCost(self._job_s * len(self.jobs), self._load_s)

    def submit(self, spec: JobSpec, data: JobData, *, base_dir: Path | str = ".") -> None:
        begun_s = time.monotonic()
        super().submit(spec, data, base_dir=base_dir)
        self._job_s = max(self._job_s, time.monotonic() - begun_s)

    def close(self) -> None:
        self._layouts.close()
        super().close()

    def _assign_jobs(self) -> None:
        if self._ranks.loaded and not any(job.is_leaving for job in self.jobs.values()):
            self._layouts.watch(
                [job for job in self.jobs.values() if job.wants_rank and job.step < job.num_steps], self.timeline
            )
            if self._layouts.is_ready:
                event = self._layouts.decide(list(self.jobs.values()), self.timeline, self.cost, self._move)
                if event is not None:
                    self._queue_event(event)
        super()._assign_jobs()

    def _move(self, found: Decision) -> LayoutDecided:
        """Moves all jobs to another layout, from their last step boundary on."""
        before, begun_s = str(self._layouts.layout), time.monotonic()
        planned = found.forecast.planned
        with self.timeline.span("move", before=before, layout=str(planned.layout), reason=found.reason) as span:
            try:
                self._release_all()
                self._exchange(planned)
            except Exception as error:  # whatever it is, the run goes on where it was
                span["failed"] = str(error)
        self._is_stale = True
        seconds = time.monotonic() - begun_s
        if "failed" in span:
            return self._layouts.kept(f"{planned.layout} could not be loaded: {span['failed']}", seconds)
        return LayoutDecided(str(planned.layout), before, found.reason, seconds)

    def _release_all(self) -> None:
        begun_s = time.monotonic()
        released = [job for job in self.jobs.values() if job.rank is not None and not job.state.is_final]
        for job in released:
            point("replicas.move")
            self._release(job)
        while any(job.is_leaving for job in released) or not all(rank.is_idle for rank in self._ranks.loaded):
            self._receive_next()
        held = [job.name for job in released if job.state is JobState.PAUSED and job.rank is not None]
        if held:
            raise WeftError(f"{held[0]} could not be saved.")
        if released:
            self._job_s = (time.monotonic() - begun_s) / len(released)

    def _exchange(self, planned: Prediction) -> None:
        """Closes all ranks, which have no jobs, and opens those of another layout, or else of the old one again."""
        self._keep_timelines()
        self._close()
        for rank in self._ranks:
            revoke_permit(rank.permit)
        for job in self.jobs.values():
            job.rank = None
        try:
            self._open(planned)
        except Exception:
            self._open(self._layouts.now)
            raise

    def _open(self, wanted: Prediction) -> None:
        begun_s = time.monotonic()
        left = [job.spec for job in self.jobs.values() if not job.state.is_final]
        ranks = self._layouts.open_ranks(wanted, left, self.limits.capacity)
        try:
            self._use(ranks)
            if self._directory is not None:
                self._open_directories()
        except BaseException:
            ranks.abandon()
            raise
        self._homes = wanted.homes
        self._load_s = time.monotonic() - begun_s


class FollowingSweep(FollowingEngine, SweepReplicas):
    """Engine of a sweep over ranks whose layout follows the trials as they begin and end."""

    _is_moving = False

    def _move(self, found: Decision) -> LayoutDecided:
        self._is_moving = True
        try:
            return super()._move(found)
        finally:
            self._is_moving = False

    def _handle_event(self, rank: RankRecord, report: RankEvent) -> None:
        super()._handle_event(rank, report)
        if self._is_moving and isinstance(report.event, EvalDone):
            # Its reader decides later, when the job is on its next rank, at this step.
            self._go_on(report.event)


OpenRanks = Callable[[Prediction, Sequence[JobSpec], int], RankGroup]
"""Starts the ranks of a planned layout, for these jobs and this capacity."""


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
        """`planned_for`: jobs that the first layout was chosen for; `workers`: run the forecasts."""
        self.now = first
        self.open_ranks = open_ranks
        self._forecast = forecast
        self._workers = workers or ThreadPoolExecutor(1, "weft-layout")
        self._names: frozenset[str] | None = None
        self._pending: Future[LayoutForecast] | None = None
        self._planned_for = frozenset(planned_for)
        self._is_first = False
        """True if the forecast is for the jobs that the layout was chosen for: only compared with measurements."""
        self._is_reported = False
        """True if the decision is an event even if nothing moves: once for each change."""
        self._again_s: float | None = None
        """Time of the next forecast for the same jobs, by `time.perf_counter`."""
        self._waited_s = 0.0
        self._known: tuple[Prediction, float] | None = None
        """Prediction for the current layout, with the tokens of a step."""
        self._since: tuple[list[tuple[JobRecord, int]], float] = ([], 0.0)
        """Trained tokens of each job when counting began, and seconds of computing."""
        self.pace = 1.0
        """Measured seconds per predicted second."""

    @property
    def layout(self) -> Layout:
        return self.now.layout

    @property
    def is_ready(self) -> bool:
        return self._pending is not None and self._pending.done()

    @property
    def _is_due(self) -> bool:
        return self._pending is None and self._again_s is not None and time.perf_counter() >= self._again_s

    def watch(self, jobs: Sequence[JobRecord], timeline: TimelineRecorder) -> None:
        """Starts a forecast for these jobs, if they have changed or the last one is old."""
        names = frozenset(job.name for job in jobs)
        has_changed = names != self._names
        if not names or not (has_changed or self._is_due):
            return
        self._note_pace(timeline)
        self._is_first = self._names is None and names == self._planned_for
        self._is_reported = has_changed and not self._is_first
        if has_changed:
            self._waited_s = 0.0
        self._names, self._known, self._again_s = names, None, None
        left = [(job, job.num_steps - job.step) for job in jobs]
        self._pending = self._workers.submit(lambda: self._forecast([_remaining(*own) for own in left], self.layout))

    def decide(
        self,
        jobs: Sequence[JobRecord],
        timeline: TimelineRecorder,
        cost: MoveCost,
        move: Callable[[Decision], LayoutDecided],
    ) -> LayoutDecided | None:
        """Decides by a finished forecast, and calls `move` if the run moves; returns the event. `jobs`: all; `cost`: of
        a move."""
        assert self._pending is not None, "a forecast is ready"
        pending, self._pending = self._pending, None
        error = pending.exception()
        if error is not None:
            event = self.kept(f"another one could not be planned: {error}")
        else:
            forecast = pending.result()
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
        return event if self._is_reported or event.has_moved else None

    def kept(self, reason: str, seconds: float = 0.0) -> LayoutDecided:
        return LayoutDecided(str(self.layout), str(self.layout), reason, seconds)

    def close(self) -> None:
        self._workers.shutdown(wait=False, cancel_futures=True)

    def _note_pace(self, timeline: TimelineRecorder) -> None:
        """Compares measurements since the last forecast with its prediction."""
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
    return remaining_job(job.spec, job.data.train, num_steps, job.longest, job.num_parameters or None)
