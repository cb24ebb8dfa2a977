"""An engine over ranks whose layout follows the jobs: all ranks are closed, and others opened, where that pays.

Every job is saved at a step boundary and goes on from that checkpoint on the new ranks, as it does when it moves from
one rank to another. The old ranks are closed first, because devices need not have room for both. Where the new ones
cannot be loaded, ranks of the old layout are started again, so that no step is lost.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from weft.data.dataset import JobData
from weft.engine.events import LayoutDecided
from weft.errors import WeftError
from weft.faults import point
from weft.job_state import JobState
from weft.parallel.replicas.layout_keeper import LayoutKeeper
from weft.parallel.replicas.rank_group import RankGroup
from weft.parallel.replicas.replicated_engine import ReplicatedEngine
from weft.plan.replan import Decision, MoveCost, Prediction
from weft.spec import JobSpec
from weft.store.rank_dir import revoke_permit


class FollowingEngine(ReplicatedEngine):
    """Trains jobs on replicas that change when jobs come and go."""

    def __init__(self, ranks: RankGroup, *given: Any, layouts: LayoutKeeper, **named: Any) -> None:
        """Like `ReplicatedEngine`; `layouts` decides when the run moves."""
        begun_s = time.monotonic()
        super().__init__(ranks, *given, **named)
        self._layouts = layouts
        self._load_s = time.monotonic() - begun_s
        self._job_s = 0.0
        """To save one job or to make it, as far as that has been measured."""

    @property
    def cost(self) -> MoveCost:
        """What a move would take now: as long as ranks took to load last, and jobs to be saved or made."""
        return MoveCost(self._job_s * len(self.jobs), self._load_s)

    def submit(self, spec: JobSpec, data: JobData, *, base_dir: Path | str = ".") -> None:
        """Adds a job, and measures how long that takes."""
        begun_s = time.monotonic()
        super().submit(spec, data, base_dir=base_dir)
        self._job_s = max(self._job_s, time.monotonic() - begun_s)

    def close(self) -> None:
        """Ends all ranks, and forecasts."""
        self._layouts.close()
        super().close()

    def _place(self) -> None:
        """Moves to another layout if one is decided on, then places jobs."""
        if self._ranks.loaded and not any(job.is_leaving for job in self.jobs.values()):
            self._layouts.watch(
                [job for job in self.jobs.values() if job.wants_rank and job.step < job.num_steps], self.timeline
            )
            if self._layouts.is_ready:
                event = self._layouts.decide(list(self.jobs.values()), self.timeline, self.cost, self._move)
                if event is not None:
                    self._say(event)
        super()._place()

    def _move(self, found: Decision) -> LayoutDecided:
        """Takes all jobs to another layout, from their last step boundary on."""
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
            return self._layouts.kept(f"{planned.layout} could not be had: {span['failed']}", seconds)
        return LayoutDecided(str(planned.layout), before, found.reason, seconds)

    def _release_all(self) -> None:
        """Has every rank save its jobs and let go of them, and waits until all files are written."""
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
        """Starts ranks in a layout, and waits until they are loaded and write into the run directory."""
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
        self._load_s = time.monotonic() - begun_s
