"""Keeps the database in step with one worker's engine, in a thread of its own, so that training never waits for it.

About once a second, one transaction for all jobs renews the leases, writes down everything the engine reported since
the last one, updates the worker's own row and claims new jobs. The renewal comes first and locks the rows, so the
worker learns that a job is no longer its own before it writes anything about it. Nothing outside the database changes
in the transaction: what follows from it is carried out once it is committed.

While the database does not answer, the notices wait and the transaction is tried again. If the connection breaks during
a commit, the worker's own row shows whether the transaction happened.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa

from weft.data.prepared.cache import default_cache
from weft.engine.engine import Engine
from weft.errors import StorageError, WeftError
from weft.serve.blobs import Blobs
from weft.serve.db.engine import Database, DbRow, Tx, now
from weft.serve.db.jobs import move
from weft.serve.db.leases import (
    Rebalance,
    SeatShares,
    claim_jobs,
    give_up,
    has_free,
    release,
    renew,
    shorten_leases,
)
from weft.serve.db.tables import WORKERS
from weft.serve.db.workers import SILENT_FIELD, loads_of, put_worker, remove_worker, wanted_of
from weft.serve.errors import Busy, Unsure
from weft.serve.settings import WorkerOptions
from weft.serve.worker.claim import Claim, EngineNotice
from weft.serve.worker.claims import Claims
from weft.serve.worker.directory import PreparedGc, WorkDirectory, clean_up_after_dead_workers
from weft.serve.worker.journal import Fate, Journal

LOG = logging.getLogger("weft.serve.worker")
LOOK_S = 0.2
"""How often an idle worker looks for new jobs. Looking only reads."""
STUCK = 70
"""The exit code of a worker whose training hung."""
LEAVE_TO_OTHERS_S = 5.0
"""How long a worker that has given jobs to others claims none itself."""
ROUNDS_PER_LOOK = 20
"""After so many rounds a worker looks for leases that are too long by a clock that was set back."""
MAKES_WAY = "It is another tenant's turn; the job goes back to the queue and will go on where it was"
MOVES = "Another worker has more room; the job goes back to the queue and will go on there where it was"
ABANDON_S = 5.0
"""How long a crashing worker waits for a transaction that is under way."""
TRACKING_GRACE_S = 5.0
"""How long a worker that is leaving waits for the trackers of its jobs."""


class DatabaseSync:
    """The thread of a worker that talks to the database; it neither trains nor answers prompts."""

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
        """`address` is where the worker answers prompts, and the token; `wake` wakes the trainer."""
        self.info: dict[str, Any] = {}
        self.crash: BaseException | None = None
        """The error that ended the thread, if there was one."""
        self.trainer_seen_at = time.monotonic()
        """When the thread that trains last reported that it is alive."""
        self._options = options
        self._database = database
        self._work = work
        self._num_rounds = 0
        self._unsure: SyncRound | None = None
        """A round whose commit was not confirmed: it may have happened or not."""
        self._prepared_gc = PreparedGc(database, default_cache())
        self._hurry = threading.Event()
        self._is_draining = self._is_abandoned = False
        self._wanted: str | None = None
        """What the operator wants of this worker: drain, remove or nothing."""
        self._has_left = False
        self._leave_by = 0.0
        self._claims = Claims(
            database, blobs, work, engine, limits=options.file_limits, wake=wake, on_ready=self._hurry.set
        )
        self._writer = RoundWriter(options, self._claims, address=address)
        # A daemon thread: a process that must end does not wait for a database that is away.
        self._thread = threading.Thread(target=self._run, name="weft-database-sync", daemon=True)

    def start(self) -> None:
        clean_up_after_dead_workers(self._database, self._work)
        self._thread.start()
        self._claims.preparer.start()
        self._claims.uploads.start()

    def add_notice(self, name: str, notice: EngineNotice, *, hurry: bool = False) -> None:
        """Queues a notice for the next transaction; with `hurry` that one comes at once. This never waits."""
        self._claims.add_notice(name, notice)
        if hurry:
            self._hurry.set()

    @property
    def num_claims(self) -> int:
        return self._claims.num_claimed

    @property
    def is_dismissed(self) -> bool:
        """Whether the operator wants this worker to give its jobs back and end."""
        return self._wanted == "remove"

    def drain(self) -> None:
        self._is_draining = True

    def leave(self) -> None:
        """Returns all jobs to the queue, removes the worker's row and waits for both; the engine has stopped before.
        The jobs stay ours until their last checkpoints are in the file store, if that takes no longer than half of the
        grace."""
        self._leave_by = time.monotonic() + self._options.grace_s / 2
        self._is_draining = self._has_left = True
        self._hurry.set()
        self._thread.join(self._options.grace_s)
        self._claims.tracking.close(TRACKING_GRACE_S)

    def abandon(self) -> None:
        """Lets other workers have the jobs at once because this one crashes; each job's loss is counted."""
        self._is_abandoned = True
        self._hurry.set()
        self._claims.close()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(ABANDON_S)
        with contextlib.suppress(WeftError), self._database.begin() as tx:
            give_up(tx, self._options.id)
            remove_worker(tx, self._options.id)

    def _run(self) -> None:
        try:
            due = 0.0
            while not self._is_abandoned:
                is_last = self._has_left and (self._claims.is_all_delivered or time.monotonic() >= self._leave_by)
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
            self._prepared_gc.run_if_due()
            return True
        except Busy as error:
            LOG.warning("the database does not answer: %s", error)
        except StorageError as error:
            LOG.warning("the file store does not answer: %s", error)
        return False

    def _is_work_waiting(self) -> bool:
        """Looks cheaply whether there is work, so that an idle worker starts soon without writing all the time."""
        if self._claims.preparer.has_ready:
            return True
        is_taking = not self._is_draining and self._wanted is None and self._claims.may_claim
        if not is_taking or self._claims.by_name:
            return False
        try:
            with self._database.read() as tx:
                return has_free(tx, self._options.base_model)
        except Busy:
            return False

    def _pulse(self, is_last: bool) -> None:
        if time.monotonic() - self.trainer_seen_at > self._options.stuck_s:
            self._exit_stuck()
        if self._unsure is not None and self._was_committed(self._unsure):
            sync_round, self._unsure = self._unsure, None
            self._carry_out(sync_round)
            if sync_round.is_last:
                return
        self._unsure = None
        self._claims.sort_notices()
        self._claims.submit_prepared()
        self._claims.upload()
        self._num_rounds += 1
        rounds: list[SyncRound] = []
        info = {**self.info, SILENT_FIELD: round(time.monotonic() - self.trainer_seen_at, 1)}

        def write(tx: Tx) -> None:
            is_stopping = self._is_draining
            rounds.append(self._writer.write(tx, self._num_rounds, is_last=is_last, is_stopping=is_stopping, info=info))

        try:
            self._database.run(write)
        except Unsure:
            self._unsure = rounds[-1]
            raise
        self._carry_out(rounds[-1])

    def _carry_out(self, sync_round: SyncRound) -> None:
        """Carries out what a committed transaction means for the engine and the directory."""
        for claim in sync_round.lost:
            self._claims.drop_lost(claim)
        for journal in sync_round.journals:
            self._claims.apply(journal)
        for job in sync_round.claimed:
            self._claims.add(job)
        if not sync_round.is_last:
            self._claims.pass_on_requests(sync_round.rows)
            self._give_back(sync_round)

    def _give_back(self, sync_round: SyncRound) -> None:
        """Gives jobs back that other workers are to have: all while draining, else those that move or make way."""
        self._wanted = sync_round.wanted
        moving = [claim for claim in self._claims.by_name.values() if claim.id in sync_round.moving]
        making_way = [claim for claim in self._claims.by_name.values() if claim.id in sync_round.making_way]
        if self._wanted == "drain":
            for claim in list(self._claims.by_name.values()):
                self._claims.give_back(claim)
        elif moving:
            for claim in moving:
                self._claims.give_back(claim, MOVES)
            self._writer.rebalance.rest(sync_round.at)
            # The jobs are for others, who look within a moment.
            self._claims.claim_after = time.monotonic() + LEAVE_TO_OTHERS_S
        elif making_way:
            for claim in making_way:
                self._claims.give_back(claim, MAKES_WAY)
            self._writer.seat_shares.rest(sync_round.at)

    def _was_committed(self, sync_round: SyncRound) -> bool:
        """Whether a transaction whose commit was not confirmed did happen."""
        mine = sa.select(WORKERS.c.info).where(WORKERS.c.id == self._options.id)
        # Locking the row waits for a commit that is still under way.
        with self._database.begin() as tx:
            info = tx.execute(mine.with_for_update()).scalar_one_or_none()
        # The last round removes the row.
        return info is None if sync_round.is_last else info is not None and info.get("turn") == sync_round.number

    def _exit_stuck(self) -> None:
        """Gives the jobs to others and ends the process, because training hangs where nothing can interrupt it."""
        LOG.error("training hangs; the worker ends", extra={"fields": {"worker": self._options.id}})
        self.abandon()
        os._exit(STUCK)


@dataclass
class SyncRound:
    """What one transaction did, and what must be carried out once it is committed."""

    number: int
    is_last: bool
    at: float
    wanted: str | None
    """What the operator wants of this worker: drain, remove or nothing."""
    rows: dict[str, DbRow]
    journals: list[Journal] = field(default_factory=list)
    lost: list[Claim] = field(default_factory=list)
    claimed: list[DbRow] = field(default_factory=list)
    moving: list[str] = field(default_factory=list)
    making_way: list[str] = field(default_factory=list)


class RoundWriter:
    def __init__(self, options: WorkerOptions, claims: Claims, *, address: tuple[str, str]) -> None:
        """`address` is where the worker answers prompts, and the token."""
        self.rebalance, self.seat_shares = Rebalance(), SeatShares()
        self._clock_offset: float | None = None
        """The database's clock less this process's, at the last round."""
        self._options, self._claims = options, claims
        self._address, self._token = address

    def write(self, tx: Tx, number: int, *, is_last: bool, is_stopping: bool, info: Mapping[str, Any]) -> SyncRound:
        """Writes all that this worker has to report; with `is_stopping` it claims nothing, with `is_last` it gives all
        of its jobs back."""
        options = self._options
        rows = {row["id"]: row for row in renew(tx, options.id, lease_s=options.lease_s)}
        sync_round = SyncRound(number, is_last, now(tx), wanted_of(tx, options.id), rows)
        self._follow_clock(sync_round.at)
        if number % ROUNDS_PER_LOOK == 1:
            shorten_leases(tx)
        self._write_claims(tx, sync_round)
        if is_last:
            remove_worker(tx, options.id)
            return sync_round
        is_draining = is_stopping or sync_round.wanted is not None
        # The row comes first: what the worker can hold decides what it may claim.
        put_worker(
            tx,
            options.id,
            base_model=options.base_model,
            address=self._address,
            token=self._token,
            info={**info, "turn": number},
            is_draining=is_draining,
            machine=socket.gethostname(),
            lease_s=options.lease_s,
        )
        sync_round.claimed = self._claim_jobs(tx, rows, is_draining)
        if rows and not is_draining and not sync_round.claimed:
            values, at = rows.values(), sync_round.at
            sync_round.moving = self.rebalance.choose(tx, options.id, options.base_model, values, at)
            sync_round.making_way = self.seat_shares.choose(tx, options.id, options.base_model, values, at)
        return sync_round

    def _follow_clock(self, at: float) -> None:
        """Claims nothing for a moment once the database's clock was set forward: all leases seem to have run out."""
        offset = at - time.monotonic()
        before, self._clock_offset = self._clock_offset, offset
        if before is not None and offset - before > self._options.lease_s / 2:
            LOG.warning("the database's clock was set forward", extra={"fields": {"seconds": round(offset - before)}})
            self._claims.claim_after = time.monotonic() + LEAVE_TO_OTHERS_S

    def _write_claims(self, tx: Tx, sync_round: SyncRound) -> None:
        for claim in self._claims.by_name.values():
            row = sync_round.rows.get(claim.id)
            if row is None or row["fence"] != claim.fence:
                sync_round.lost.append(claim)
            elif sync_round.is_last or not claim.is_unstored:
                journal = self._journal(tx, claim, row, sync_round)
                if journal.fate is Fate.ENDED and row["saved_blob"]:
                    journal.unused.append(row["saved_blob"])
                sync_round.journals.append(journal)

    def _journal(self, tx: Tx, claim: Claim, row: DbRow, sync_round: SyncRound) -> Journal:
        journal, is_last = Journal(tx, claim, row, sync_round.at), sync_round.is_last
        if not claim.is_unstored:
            journal.write()
        if journal.fate is Fate.ENDED or journal.fate is Fate.PAUSED:
            return journal
        if (is_last or not claim.is_training or claim.is_leaving) and row["wanted"] in ("cancel", "pause"):
            to = {"cancel": "cancelled", "pause": "paused"}[row["wanted"]]
            move(tx, claim.tenant, claim.id, to, fence=claim.fence)
            journal.fate = Fate.ENDED if to == "cancelled" else Fate.PAUSED
        elif claim.too_large is not None:
            self._requeue_or_fail(tx, journal, claim.too_large)
        elif is_last or self._claims.may_release(claim):
            # Its durable tokens were counted with its last checkpoint.
            release(tx, claim.tenant, claim.id, fence=claim.fence, message=claim.leave_message)
            journal.fate = Fate.RELEASED
        return journal

    def _requeue_or_fail(self, tx: Tx, journal: Journal, error: dict[str, Any]) -> None:
        """Leaves a job that does not fit into this worker's memory to one that has more, or fails it."""
        claim = journal.claim
        mine, others = loads_of(tx, self._options.id, self._options.base_model)
        more = None if mine.job_bytes is None else mine.job_bytes + 1
        if more is not None and any(other.has_bytes(more) for other in others):
            release(tx, claim.tenant, claim.id, fence=claim.fence, min_job_bytes=more)
            journal.fate = Fate.RELEASED
        else:
            move(tx, claim.tenant, claim.id, "failed", fence=claim.fence, message=error["message"], error=error)
            journal.fate = Fate.ENDED

    def _claim_jobs(self, tx: Tx, rows: dict[str, DbRow], is_draining: bool) -> list[DbRow]:
        """Claims new jobs, and takes up any that are ours by the database but unknown here: no other worker would."""
        known = {(claim.id, claim.fence) for claim in self._claims.by_name.values()}
        strays = [row for row in rows.values() if (row["id"], row["fence"]) not in known]
        if is_draining or not self._claims.may_claim or not self._options.max_jobs:
            return strays
        options = self._options
        room = options.max_jobs - len(self._claims.by_name) - len(strays)
        return [*strays, *claim_jobs(tx, options.id, options.base_model, room, lease_s=options.lease_s)]
