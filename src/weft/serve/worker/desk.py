"""The jobs a worker has: what the engine is asked to do with each, and what follows from what was written about it.

Nothing here touches the database; the clerk calls it between two transactions, and only when the last one has happened.
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
from weft.errors import StorageError, WeftError
from weft.job_state import Reason, ReasonCode
from weft.serve.blobs import Blobs
from weft.serve.db.engine import Database
from weft.serve.errors import Busy
from weft.serve.records.rows import Record
from weft.serve.tidy import discard
from weft.serve.worker.directory import WorkDirectory
from weft.serve.worker.held import Heard, Held
from weft.serve.worker.journal import Fate, Journal
from weft.serve.worker.outcome import error_of
from weft.serve.worker.preparer import Preparer
from weft.serve.worker.shelf import store_heard
from weft.serve.worker.tracking import Tracking

LOG = logging.getLogger("weft.serve.worker")
RETRY_S = 5.0
"""How soon a job that could not write, or whose data could not be stored here, is tried again."""


class Desk:
    """All claims of one worker, from the one that took a job to what ends it here."""

    def __init__(
        self,
        database: Database,
        blobs: Blobs,
        work: WorkDirectory,
        engine: Engine,
        *,
        wake: Callable[[], None],
        on_ready: Callable[[], None],
    ) -> None:
        """`wake` tells the trainer that there is work, `on_ready` is called when a job has been prepared."""
        self.held: dict[str, Held] = {}
        """By the name of the claim."""
        self.num_taken = 0
        self.cool_until = 0.0
        """No new jobs before, by the monotonic clock."""
        self.preparer = Preparer(database, blobs, work, engine.backbone.tokenizer, on_ready=on_ready)
        self.tracking = Tracking(work.run.path, lambda name, text: self.hear(name, Heard(JobWarning((name,), text))))
        self._blobs, self._work, self._engine, self._wake = blobs, work, engine, wake
        self._heard: deque[tuple[str, Heard]] = deque()

    def hear(self, name: str, heard: Heard) -> None:
        """Takes note of something; called by any thread, never waits."""
        self._heard.append((name, heard))

    @property
    def is_cool(self) -> bool:
        """Whether new jobs may come."""
        return time.monotonic() >= self.cool_until

    def collect(self) -> None:
        """Sorts what was heard by job; what is said of a job that is not ours any more is dropped."""
        while self._heard:
            name, heard = self._heard.popleft()
            if name in self.held:
                self.held[name].heard.append(heard)
                self.tracking.tell(self.held[name], heard.event)

    def store(self) -> None:
        """Puts what jobs have made into the file store, before the transaction that names it."""
        for held in self.held.values():
            store_heard(held, self._blobs, self._work)

    def take(self, job: Record) -> None:
        """Starts to prepare a job that was just claimed."""
        held = Held(job, priority=job["priority"])
        self.num_taken += 1
        LOG.info("claimed", extra={"fields": {"job": held.id, "tenant": held.tenant, "fence": held.fence}})
        self.held[held.name] = held
        self.preparer.put(held)

    def submit_prepared(self) -> None:
        """Hands prepared jobs to the engine; those that cannot be trained have failed."""
        for held, future in self.preparer.ready():
            if held.name not in self.held:
                self._work.drop(held.name)
                continue
            try:
                spec, data = future.result()
                self._engine.submit(replace(spec, priority=held.priority), data)
                held.is_training = True
                self._wake()
            except (StorageError, Busy) as error:
                # Nothing is wrong with the job, but it cannot be prepared here and now.
                LOG.warning("put back: %s", error, extra={"fields": {"job": held.id, "tenant": held.tenant}})
                self.cool_until = time.monotonic() + RETRY_S
                held.is_put_back = True
            except WeftError as error:
                self._fail(held, error_of(error, held.job))
            except Exception:
                # Whatever is wrong with this job's data is not the others' fault.
                LOG.exception("a job could not be prepared", extra={"fields": {"job": held.id, "tenant": held.tenant}})
                message = "The job could not be prepared because of an internal error."
                self._fail(held, {"code": "server_error", "message": message, "param": None})

    def _fail(self, held: Held, error: dict[str, Any]) -> None:
        held.heard.append(Heard(JobFailed(held.name, 0, Reason(ReasonCode.ERROR, error["message"])), error=error))

    def lose(self, held: Held) -> None:
        """Another worker has the job, or it is over: nothing more is written about it."""
        LOG.warning("lost", extra={"fields": {"job": held.id, "tenant": held.tenant, "fence": held.fence}})
        self._let_go(held)
        unused = [*held.blobs.values(), *((held.result.adapter, held.result.table) if held.result else ())]
        discard(self._blobs, unused)

    def conclude(self, journal: Journal) -> None:
        """What follows for a claim once the transaction is done."""
        held = journal.held
        for heard in held.heard:
            if isinstance(heard.event, CheckpointSaved):
                held.blobs.pop(heard.event.step, None)
        held.heard.clear()
        discard(self._blobs, journal.unused)
        if journal.fate is Fate.ENDED:
            self._forget(held)
            self._work.drop_job(held.id)
        elif journal.fate is Fate.RELEASED:
            self._forget(held)
        elif journal.fate is Fate.PAUSED:
            self._let_go(held)
        elif journal.fate is Fate.GOES_ON:
            held.asked = None
            self._command(self._engine.resume, held)
        elif journal.fate is Fate.STALLED:
            held.has_stalled, held.retry_at = True, time.monotonic() + RETRY_S

    def obey(self, rows: dict[str, Record]) -> None:
        """Passes on what users want of jobs that train."""
        for held in list(self.held.values()):
            row = rows.get(held.id)
            if row is None or not held.is_training:
                continue
            if row["wanted"] in ("cancel", "pause") and held.asked != row["wanted"]:
                held.asked = row["wanted"]
                self._command(self._engine.cancel if held.asked == "cancel" else self._engine.pause, held)
            if row["priority"] != held.priority:
                held.priority = row["priority"]
                live = self._engine.jobs.get(held.name)
                if live is not None:
                    live.spec = replace(live.spec, priority=held.priority)
            if held.retry_at is not None and time.monotonic() >= held.retry_at:
                held.retry_at = None
                self._command(self._engine.resume, held)

    def _let_go(self, held: Held) -> None:
        """Takes a job off the engine without a word to the database; its checkpoints stay for whoever is next."""
        if held.is_training:
            self._command(self._engine.cancel, held)
        self._forget(held)

    def _forget(self, held: Held) -> None:
        self.held.pop(held.name, None)
        self.tracking.tell(held, None)

    def _command(self, command: Callable[[str], None], held: Held) -> None:
        if held.name in self._engine.jobs:
            # The engine may forget a job that has ended at any moment; then there is nothing left to ask of it.
            with contextlib.suppress(WeftError):
                command(held.name)
        self._wake()
