"""One transaction of a worker: it renews the leases, writes what happened to each job, updates its row and claims jobs.

The renewal comes first and locks the rows, so the worker learns that a job is no longer its own before it writes
anything about it. Nothing outside the database changes here: what follows from a round is carried out once it is
committed.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from weft.serve.db.engine import Tx, now
from weft.serve.jobs.leases import claim_jobs, release, renew
from weft.serve.jobs.rebalance import Rebalance
from weft.serve.jobs.sharing import loads_of
from weft.serve.jobs.states import move
from weft.serve.records.rows import DbRow
from weft.serve.records.workers import put_worker, remove_worker, wanted_of
from weft.serve.worker.claim import Claim
from weft.serve.worker.claims import Claims
from weft.serve.worker.options import WorkerOptions
from weft.serve.worker.transaction.journal import Fate, Journal


@dataclass
class SyncRound:
    """What one transaction did, and what must be carried out once it is committed."""

    number: int
    is_last: bool
    at: float
    """When it was, by the database's clock."""
    wanted: str | None
    """What the operator wants of this worker: drain, remove or nothing."""
    rows: dict[str, DbRow]
    """The rows of the jobs that are ours, by id."""
    journals: list[Journal] = field(default_factory=list)
    lost: list[Claim] = field(default_factory=list)
    claimed: list[DbRow] = field(default_factory=list)
    moving: list[str] = field(default_factory=list)
    """The ids of jobs that another worker has room for."""


class RoundWriter:
    """Writes the rounds of one worker."""

    def __init__(self, options: WorkerOptions, claims: Claims, *, address: tuple[str, str]) -> None:
        """`address` is where the worker answers prompts, and the token."""
        self.rebalance = Rebalance()
        self._options, self._claims = options, claims
        self._address, self._token = address

    def write(self, tx: Tx, number: int, *, is_last: bool, is_stopping: bool, info: Mapping[str, Any]) -> SyncRound:
        """Writes all that this worker has to report; with `is_stopping` it claims nothing, with `is_last` it gives all
        of its jobs back."""
        options = self._options
        rows = {row["id"]: row for row in renew(tx, options.id, lease_s=options.lease_s)}
        sync_round = SyncRound(number, is_last, now(tx), wanted_of(tx, options.id), rows)
        self._write_claims(tx, sync_round)
        if is_last:
            remove_worker(tx, options.id)
            return sync_round
        is_draining = is_stopping or sync_round.wanted is not None
        # The row comes first: what the worker can hold decides what it may claim.
        self._put_worker(tx, {**info, "turn": number}, is_draining)
        sync_round.claimed = self._claim_jobs(tx, rows, is_draining)
        if rows and not is_draining and not sync_round.claimed:
            sync_round.moving = self.rebalance.choose(tx, options.id, options.base_model, rows.values(), sync_round.at)
        return sync_round

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
            self._place_too_large(tx, journal, claim.too_large)
        elif is_last or self._claims.may_release(claim):
            # Its durable tokens were counted with its last checkpoint.
            release(tx, claim.tenant, claim.id, fence=claim.fence, message=claim.leave_message)
            journal.fate = Fate.RELEASED
        return journal

    def _place_too_large(self, tx: Tx, journal: Journal, error: dict[str, Any]) -> None:
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
        """Claims new jobs, and takes up any that the database says are ours but we do not know: nobody else would."""
        known = {(claim.id, claim.fence) for claim in self._claims.by_name.values()}
        strays = [row for row in rows.values() if (row["id"], row["fence"]) not in known]
        if is_draining or not self._claims.may_claim:
            return strays
        options = self._options
        room = options.max_jobs - len(self._claims.by_name) - len(strays)
        return [*strays, *claim_jobs(tx, options.id, options.base_model, room, lease_s=options.lease_s)]

    def _put_worker(self, tx: Tx, info: Mapping[str, Any], is_draining: bool) -> None:
        put_worker(
            tx,
            self._options.id,
            base_model=self._options.base_model,
            address=self._address,
            token=self._token,
            info=info,
            is_draining=is_draining,
            machine=socket.gethostname(),
            lease_s=self._options.lease_s,
        )
