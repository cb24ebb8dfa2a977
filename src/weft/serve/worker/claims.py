"""All jobs that a worker has claimed: what the engine is to do with each, and what follows from each transaction.

Nothing here touches the database. `DatabaseSync` calls these methods between two transactions, and only when it knows
that the last one was committed.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from weft.engine.engine import Engine
from weft.engine.events import CheckpointSaved, JobFailed, JobWarning
from weft.engine.execute.protocol import ReplicaFaultError
from weft.errors import JobError, StorageError, WeftError
from weft.job_state import JobState, Reason, ReasonCode
from weft.serve.blobs import Blobs
from weft.serve.db.engine import Database, DbRow
from weft.serve.db.files import discard
from weft.serve.errors import Busy
from weft.serve.limited_process import FileLimits
from weft.serve.worker.checkpoint_uploads import CheckpointUploads, upload_results
from weft.serve.worker.claim import GIVE_BACK, Claim, EngineNotice, Tracking
from weft.serve.worker.directory import WorkDirectory
from weft.serve.worker.journal import Fate, Journal, error_of
from weft.serve.worker.prepare import JobPreparer

LOG = logging.getLogger("weft.serve.worker")
RETRY_S = 5.0
"""Seconds until a job that could not write, or whose data could not be stored here, is tried again."""

STORE_S = 60.0
"""How long a job that is given back may wait until its checkpoint is in the file store."""


class Claims:
    def __init__(
        self,
        database: Database,
        blobs: Blobs,
        work: WorkDirectory,
        engine: Engine,
        *,
        limits: FileLimits,
        wake: Callable[[], None],
        on_ready: Callable[[], None],
    ) -> None:
        """`limits` are those of reading one job's files; `wake` wakes the trainer; `on_ready` is
        called when a job has been prepared."""
        self.by_name: dict[str, Claim] = {}
        self.num_claimed = 0
        self.claim_after = 0.0
        """The worker claims no new jobs before this time of the monotonic clock."""
        self.preparer = JobPreparer(
            database,
            blobs,
            work,
            engine.executor.tokenizer,
            limits=limits,
            on_ready=on_ready,
            wall=engine.timeline.wall,
        )
        self.tracking = Tracking(
            work.run.path, lambda name, text: self.add_notice(name, EngineNotice(JobWarning((name,), text)))
        )
        self.uploads = CheckpointUploads(database, blobs, work)
        self._blobs, self._work, self._engine, self._wake = blobs, work, engine, wake
        self._notices: deque[tuple[str, EngineNotice]] = deque()

    def close(self) -> None:
        """Ends the threads that prepare jobs and copy checkpoints, after what they are doing."""
        self.preparer.close()
        self.uploads.close()

    def add_notice(self, name: str, notice: EngineNotice) -> None:
        """Queues a notice for the claim of this name. Any thread may call this; it never waits."""
        self._notices.append((name, notice))

    @property
    def is_all_delivered(self) -> bool:
        return not self._notices and self.uploads.is_idle

    @property
    def may_claim(self) -> bool:
        return time.monotonic() >= self.claim_after

    def sort_notices(self) -> None:
        """Gives each queued notice to its claim; a notice about a job that is no longer ours is dropped."""
        while self._notices:
            name, notice = self._notices.popleft()
            claim = self.by_name.get(name)
            if claim is None:
                continue
            claim.notices.append(notice)
            self.tracking.record(claim, notice.event)
            if isinstance(notice.event, CheckpointSaved):
                self.uploads.offer(claim, notice.event.step)

    def upload(self) -> None:
        """Puts the jobs' results into the file store, before the transaction that names them."""
        for claim in self.by_name.values():
            upload_results(claim, self._blobs, self._work)

    def add(self, job: DbRow) -> None:
        """Adds a claim for a job that was just taken, and starts to prepare it."""
        claim = Claim(job, priority=job["priority"])
        self.num_claimed += 1
        LOG.info("claimed", extra={"fields": {"job": claim.id, "tenant": claim.tenant, "fence": claim.fence}})
        self.by_name[claim.name] = claim
        self.preparer.put(claim)

    def submit_prepared(self) -> None:
        """Hands prepared jobs to the engine; a job that cannot be trained fails."""
        for claim, future in self.preparer.ready():
            if claim.name not in self.by_name:
                self._work.drop(claim.name)
                continue
            try:
                spec, data = future.result()
                self._engine.submit(replace(spec, priority=claim.priority), data)
                claim.is_training = True
                self._wake()
            except (StorageError, Busy) as error:
                # Nothing is wrong with the job, but it cannot be prepared here and now.
                LOG.warning("put back: %s", error, extra={"fields": {"job": claim.id, "tenant": claim.tenant}})
                self.claim_after = time.monotonic() + RETRY_S
                claim.is_put_back = True
            except ReplicaFaultError:
                # The worker ends; the job is not to blame.
                raise
            except JobError as error:
                claim.too_large = error_of(error)
            except WeftError as error:
                fields = {"job": claim.id, "tenant": claim.tenant}
                LOG.warning("not trainable: %s", error, extra={"fields": fields})
                self._fail(claim, error_of(error))
            except Exception:
                # Whatever is wrong with this job's data must not harm the other jobs.
                fields = {"job": claim.id, "tenant": claim.tenant}
                LOG.exception("a job could not be prepared", extra={"fields": fields})
                message = "The job could not be prepared because of an internal error."
                self._fail(claim, {"code": "server_error", "message": message, "param": None})

    def _fail(self, claim: Claim, error: dict[str, Any]) -> None:
        reason = Reason(ReasonCode.ERROR, error["message"])
        claim.notices.append(EngineNotice(JobFailed(claim.name, 0, reason), error=error))

    def drop_lost(self, claim: Claim) -> None:
        """Drops a claim whose job another worker has taken or whose job is over; nothing more is written about it."""
        LOG.warning("lost", extra={"fields": {"job": claim.id, "tenant": claim.tenant, "fence": claim.fence}})
        self._let_go(claim)
        unused = [*claim.blobs.values(), *((claim.result.adapter, claim.result.table) if claim.result else ())]
        discard(self._blobs, unused)

    def apply(self, journal: Journal) -> None:
        claim = journal.claim
        for notice in claim.notices:
            if isinstance(notice.event, CheckpointSaved):
                claim.blobs.pop(notice.event.step, None)
        claim.notices.clear()
        discard(self._blobs, journal.unused)
        if journal.fate is Fate.ENDED:
            self._forget(claim)
            self.uploads.forget(claim)
            self._work.drop_job(claim.id)
        elif journal.fate is Fate.RELEASED or journal.fate is Fate.PAUSED:
            self._let_go(claim)
        elif journal.fate is Fate.LEAVING:
            self._leave(claim)
        elif journal.fate is Fate.GOES_ON:
            claim.requested = None
            self._command(self._engine.resume, claim)
        elif journal.fate is Fate.STALLED:
            claim.has_stalled, claim.retry_at = True, time.monotonic() + RETRY_S

    def pass_on_requests(self, rows: dict[str, DbRow]) -> None:
        """Passes users' requests about the jobs that it trains on to the engine."""
        for claim in list(self.by_name.values()):
            row = rows.get(claim.id)
            if row is None or not claim.is_training or claim.requested == GIVE_BACK or claim.is_leaving:
                continue
            if row["wanted"] in ("cancel", "pause") and claim.requested != row["wanted"]:
                claim.requested = row["wanted"]
                self._command(self._engine.cancel if claim.requested == "cancel" else self._engine.pause, claim)
            if row["priority"] != claim.priority:
                claim.priority = row["priority"]
                live = self._engine.jobs.get(claim.name)
                if live is not None:
                    live.spec = replace(live.spec, priority=claim.priority)
            if claim.retry_at is not None and time.monotonic() >= claim.retry_at:
                claim.retry_at = None
                self._command(self._engine.resume, claim)

    def give_back(self, claim: Claim, message: str | None = None) -> None:
        """Has a job saved at its next step boundary and returned to the queue; `message` is the reason for its user."""
        if claim.requested is not None or claim.is_leaving:
            return
        claim.leave_message = message
        live = self._engine.jobs.get(claim.name)
        if not claim.is_training:
            claim.is_put_back = True
        elif live is not None and live.state is JobState.PAUSED:
            # It could not write and waits to be tried again.
            self._leave(claim)
        else:
            claim.requested = GIVE_BACK
            self._command(self._engine.pause, claim)

    def _leave(self, claim: Claim) -> None:
        claim.is_leaving, claim.leave_by = True, time.monotonic() + STORE_S

    def may_release(self, claim: Claim) -> bool:
        is_kept = not self.uploads.is_busy_with(claim) or time.monotonic() >= claim.leave_by
        return claim.is_put_back or (claim.is_leaving and is_kept)

    def _let_go(self, claim: Claim) -> None:
        """Takes a job off the engine without writing to the database; its checkpoints stay for the next worker."""
        if claim.is_training:
            self._command(self._engine.cancel, claim)
        self._forget(claim)

    def _forget(self, claim: Claim) -> None:
        self.by_name.pop(claim.name, None)
        self.tracking.record(claim, None)

    def _command(self, command: Callable[[str], None], claim: Claim) -> None:
        if claim.name in self._engine.jobs:
            # The engine may forget a job that has ended at any moment; then there is nothing left to do.
            with contextlib.suppress(WeftError):
                command(claim.name)
        self._wake()
