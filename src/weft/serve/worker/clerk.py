"""Keeps the database and the engine of one worker in step, in a thread of its own, so that training waits for neither.

About once a second, in one transaction for all jobs: a sign of life, leases renewed, everything the engine said since
written down, and new jobs claimed. The renewal comes first and holds the rows, so what is not ours any more is found
before anything is written about it. A database that is away is tried again; nothing that was heard is lost meanwhile.
Where the connection broke during a commit, the worker's own row tells whether it happened.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from weft.engine.engine import Engine
from weft.errors import StorageError, WeftError
from weft.serve.blobs import Blobs
from weft.serve.db.engine import Database, Tx, now
from weft.serve.db.tables import WORKERS
from weft.serve.errors import Busy, Unsure
from weft.serve.jobs.claim import claim, give_up, has_free, release, renew
from weft.serve.jobs.states import move
from weft.serve.records.rows import Record
from weft.serve.records.workers import put_worker, remove_worker
from weft.serve.worker.desk import Desk
from weft.serve.worker.directory import WorkDirectory
from weft.serve.worker.held import Heard, Held
from weft.serve.worker.journal import Fate, Journal
from weft.serve.worker.options import WorkerOptions
from weft.serve.worker.predecessors import clear_up

LOG = logging.getLogger("weft.serve.worker")
LOOK_S = 0.2
"""How often an idle worker looks for new jobs; it only reads."""
STUCK = 70
"""Exit code of a worker whose training hung."""
TRACKING_GRACE_S = 5.0
"""How long a worker that leaves waits for trackers of its jobs."""


@dataclass
class _Turn:
    """What one transaction did, and what follows from it once it has happened."""

    number: int
    is_last: bool
    rows: dict[str, Record] = field(default_factory=dict)
    """The jobs that are ours, by id."""
    journals: list[Journal] = field(default_factory=list)
    lost: list[Held] = field(default_factory=list)
    claimed: list[Record] = field(default_factory=list)


class Clerk:
    """Everything of a worker that is neither training nor answering."""

    def __init__(
        self,
        options: WorkerOptions,
        database: Database,
        blobs: Blobs,
        work: WorkDirectory,
        engine: Engine,
        *,
        address: tuple[str, str],
        wake: Callable[[], None],
    ) -> None:
        """`address`: where prompts are answered, and the token; `wake` tells the trainer that there is work."""
        self.info: dict[str, Any] = {}
        """What the worker's row says about it."""
        self.crash: BaseException | None = None
        """What ended the thread, if anything did."""
        self.trainer_seen_at = time.monotonic()
        """When the thread that trains last looked up."""
        self._options = options
        self._database = database
        self._work = work
        self._address, self._token = address
        self._num_turns = 0
        self._unsure: _Turn | None = None
        """A turn of which nobody knows yet whether it happened."""
        self._hurry = threading.Event()
        self._is_draining = False
        self._has_left = False
        self._desk = Desk(database, blobs, work, engine, wake=wake, on_ready=self._hurry.set)
        # A daemon: a process that must go does not wait for a database that is away.
        self._thread = threading.Thread(target=self._run, name="weft-clerk", daemon=True)

    def start(self) -> None:
        """The worker is seen, and jobs come."""
        clear_up(self._database, self._work)
        self._thread.start()
        self._desk.preparer.start()

    def hear(self, name: str, heard: Heard, *, hurry: bool = False) -> None:
        """Takes note of something; called by the trainer, never waits."""
        self._desk.hear(name, heard)
        if hurry:
            self._hurry.set()

    @property
    def num_claims(self) -> int:
        """Jobs taken so far."""
        return self._desk.num_taken

    def drain(self) -> None:
        """Takes no more jobs."""
        self._is_draining = True

    def leave(self) -> None:
        """After the engine has stopped: all jobs go back to the queue and the worker's row goes; waits for that."""
        self._is_draining = self._has_left = True
        self._hurry.set()
        self._thread.join(self._options.grace_s)
        self._desk.tracking.close(TRACKING_GRACE_S)

    def abandon(self) -> None:
        """The worker crashes: others may have its jobs at once, each with a loss counted."""
        with contextlib.suppress(WeftError), self._database.begin() as tx:
            give_up(tx, self._options.id)
            remove_worker(tx, self._options.id)

    def _run(self) -> None:
        try:
            due = 0.0
            while True:
                is_last = self._has_left
                if time.monotonic() >= due or self._hurry.is_set() or is_last or self._is_work_waiting():
                    self._hurry.clear()
                    due = time.monotonic() + self._options.pulse_s
                    if self._try_pulse(is_last) and is_last:
                        return
                self._hurry.wait(min(LOOK_S, self._options.pulse_s))
        except BaseException as error:
            self.crash = error

    def _try_pulse(self, is_last: bool) -> bool:
        try:
            self._pulse(is_last)
            return True
        except Busy as error:
            LOG.warning("the database does not answer: %s", error)
        except StorageError as error:
            LOG.warning("the file store does not answer: %s", error)
        return False

    def _is_work_waiting(self) -> bool:
        """A cheap look, so that an idle worker starts soon without writing all the time."""
        if self._desk.preparer.has_ready:
            return True
        if self._is_draining or self._room() < 1 or not self._desk.is_cool:
            return False
        try:
            with self._database.read() as tx:
                return not self._desk.held and has_free(tx, self._options.base_model)
        except Busy:
            return False

    def _room(self) -> int:
        return self._options.max_jobs - len(self._desk.held)

    def _pulse(self, is_last: bool) -> None:
        if time.monotonic() - self.trainer_seen_at > self._options.stuck_s:
            self._end_stuck()
        if self._unsure is not None and self._has_happened(self._unsure):
            turn, self._unsure = self._unsure, None
            self._follow(turn)
            if turn.is_last:
                return
        self._unsure = None
        self._desk.collect()
        self._desk.submit_prepared()
        self._desk.store()
        self._num_turns += 1
        turns: list[_Turn] = []
        try:
            self._database.run(lambda tx: turns.append(self._write(tx, is_last)))
        except Unsure:
            self._unsure = turns[-1]
            raise
        self._follow(turns[-1])

    def _write(self, tx: Tx, is_last: bool) -> _Turn:
        """Everything this worker has to say, in one transaction; nothing outside it changes yet."""
        turn = _Turn(self._num_turns, is_last)
        turn.rows = {row["id"]: row for row in renew(tx, self._options.id, lease_s=self._options.lease_s)}
        at = now(tx)
        for held in self._desk.held.values():
            row = turn.rows.get(held.id)
            if row is None or row["fence"] != held.fence:
                turn.lost.append(held)
            elif is_last or not held.is_unstored:
                turn.journals.append(self._journal(tx, held, row, at, is_last))
        if not is_last:
            turn.claimed = self._claim(tx, turn.rows)
        self._sign_life(tx, is_last)
        return turn

    def _claim(self, tx: Tx, rows: dict[str, Record]) -> list[Record]:
        """New jobs, and any that are ours by the database and not by what we know: else nobody would train them."""
        known = {(held.id, held.fence) for held in self._desk.held.values()}
        strays = [row for row in rows.values() if (row["id"], row["fence"]) not in known]
        if self._is_draining or not self._desk.is_cool:
            return strays
        options, room = self._options, self._room() - len(strays)
        return [*strays, *claim(tx, options.id, options.base_model, room, lease_s=options.lease_s)]

    def _follow(self, turn: _Turn) -> None:
        """What a transaction that has happened means for the engine and the directory."""
        for held in turn.lost:
            self._desk.lose(held)
        for journal in turn.journals:
            self._desk.conclude(journal)
        for job in turn.claimed:
            self._desk.take(job)
        if not turn.is_last:
            self._desk.obey(turn.rows)

    def _has_happened(self, turn: _Turn) -> bool:
        """Whether a transaction whose end was not heard is there."""
        mine = sa.select(WORKERS.c.info).where(WORKERS.c.id == self._options.id)
        # Whoever locks the row waits for a commit that is still under way.
        with self._database.begin() as tx:
            info = tx.execute(mine.with_for_update()).scalar_one_or_none()
        # The last turn takes the row away.
        return info is None if turn.is_last else info is not None and info.get("turn") == turn.number

    def _end_stuck(self) -> None:
        """Training hangs where nothing can interrupt it, as in a driver: others get the jobs, and the process ends."""
        LOG.error("training hangs; the worker ends", extra={"fields": {"worker": self._options.id}})
        self.abandon()
        os._exit(STUCK)

    def _journal(self, tx: Tx, held: Held, row: Record, at: float, is_last: bool) -> Journal:
        journal = Journal(tx, held, row, at)
        if not held.is_unstored:
            journal.write()
        if journal.fate is Fate.ENDED or journal.fate is Fate.PAUSED:
            return journal
        if (is_last or not held.is_training) and row["wanted"] in ("cancel", "pause"):
            to = {"cancel": "cancelled", "pause": "paused"}[row["wanted"]]
            move(tx, held.tenant, held.id, to, fence=held.fence)
            journal.fate = Fate.ENDED if to == "cancelled" else Fate.PAUSED
        elif is_last or held.is_put_back:
            # What is durable of it was counted when its checkpoint was.
            release(tx, held.tenant, held.id, fence=held.fence)
            journal.fate = Fate.RELEASED
        return journal

    def _sign_life(self, tx: Tx, is_last: bool) -> None:
        if is_last:
            remove_worker(tx, self._options.id)
            return
        put_worker(
            tx,
            self._options.id,
            base_model=self._options.base_model,
            address=self._address,
            token=self._token,
            info={**self.info, "turn": self._num_turns},
            is_draining=self._is_draining,
        )
