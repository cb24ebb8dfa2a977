"""The life of a job: only legal moves, each with its event, and no writing by a worker that was replaced."""

from __future__ import annotations

import atexit
import functools
import itertools
import shutil
import tempfile
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from weft.job_state import FINAL_STATES
from weft.serve.db.engine import Database, Tx, migrate, now, open_database
from weft.serve.db.jobs import (
    MOVES,
    STATES,
    create_job,
    get_job,
    list_events,
    move,
    request_change,
    update_job,
)
from weft.serve.db.tables import EVENTS, JOBS
from weft.serve.db.tenants import create_tenant
from weft.serve.errors import Fenced, NotFound, NotPossible


def make(tx: Tx, status: str = "queued", **columns: Any) -> str:
    id = create_job(tx, "acme", model="tiny", training_file="file-1", settings={})["id"]
    tx.execute(sa.update(JOBS).where(JOBS.c.id == id).values(status=status, **columns))
    return str(id)


def test_move_when_legal_then_done_with_one_event_and_else_refused(database: Database):
    for before, to in itertools.product(STATES, STATES):
        check_move(database, before, to)


def check_move(database: Database, before: str, to: str) -> None:
    with database.begin() as tx:
        id = make(tx, before, worker="w", lease_until=1.0)
    if to not in MOVES[before]:
        with pytest.raises(NotPossible), database.begin() as tx:
            move(tx, "acme", id, to)
        with database.read() as tx:
            assert get_job(tx, "acme", id)["status"] == before
            assert len(list_events(tx, "acme", id).items) == 3
        return
    with database.begin() as tx:
        moved = move(tx, "acme", id, to)
    with database.read() as tx:
        job = get_job(tx, "acme", id)
        assert job == moved
        assert job["status"] == to
        assert (job["finished_at"] is not None) == (to in FINAL_STATES)
        assert (job["worker"] is None) == (to != "running")
        events = list_events(tx, "acme", id).items
        assert len(events) == 4
        assert events[0]["level"] == ("error" if to == "failed" else "info")


def test_move_when_the_fence_is_old_then_nothing_is_written(database: Database):
    with database.begin() as tx:
        id = make(tx, "running", fence=5)
    for stale in (4, 6):
        with pytest.raises(Fenced), database.begin() as tx:
            move(tx, "acme", id, "succeeded", fence=stale)
        with pytest.raises(Fenced), database.begin() as tx:
            update_job(tx, "acme", id, fence=stale, step=9)
    with database.begin() as tx:
        update_job(tx, "acme", id, fence=5, step=3, trained_tokens=77)
        assert move(tx, "acme", id, "succeeded", fence=5, trained_tokens=80)["step"] == 3
    with database.read() as tx:
        assert get_job(tx, "acme", id)["trained_tokens"] == 80


def test_job_when_another_tenant_touches_it_then_there_is_no_such_job(database: Database):
    with database.begin() as tx:
        id = make(tx)
    for touch in (
        lambda tx: get_job(tx, "globex", id),
        lambda tx: move(tx, "globex", id, "running"),
        lambda tx: request_change(tx, "globex", id, "cancel"),
        lambda tx: update_job(tx, "globex", id, fence=0, step=1),
    ):
        with pytest.raises(NotFound), database.begin() as tx:
            touch(tx)


# status, whether a live worker holds it, wanted -> wish -> status and wanted afterwards (None: refused)
WISHES = [
    ("queued", False, None, "cancel", ("cancelled", None)),
    ("queued", False, None, "pause", ("paused", None)),
    ("queued", False, None, "resume", ("queued", None)),
    ("validating_files", False, None, "cancel", ("cancelled", None)),
    ("validating_files", False, None, "pause", None),
    ("paused", False, None, "resume", ("queued", None)),
    ("paused", True, None, "resume", ("paused", "resume")),
    ("paused", False, None, "cancel", ("cancelled", None)),
    ("paused", False, None, "pause", ("paused", None)),
    ("running", True, None, "cancel", ("running", "cancel")),
    ("running", True, None, "pause", ("running", "pause")),
    ("running", True, None, "resume", ("running", None)),
    ("running", True, "pause", "resume", ("running", None)),
    ("running", True, "pause", "cancel", ("running", "cancel")),
    ("running", True, "cancel", "cancel", ("running", "cancel")),
    ("running", True, "cancel", "pause", None),
    ("running", True, "cancel", "resume", None),
    ("running", False, None, "cancel", ("cancelled", None)),
    ("running", False, None, "pause", ("paused", None)),
    ("succeeded", False, None, "cancel", None),
    ("failed", False, None, "cancel", None),
    ("cancelled", False, None, "cancel", ("cancelled", None)),
    ("cancelled", False, None, "pause", None),
    ("succeeded", False, None, "resume", None),
]


@pytest.mark.parametrize(("status", "alive", "wanted", "wish", "expected"), WISHES)
def test_wish_when_made_then_done_noted_or_refused(
    database: Database, status: str, alive: bool, wanted: str | None, wish: str, expected: tuple[str, str | None] | None
):
    with database.begin() as tx:
        held = (
            {"worker": "w", "lease_until": now(tx) + (60 if alive else -1)} if status in ("running", "paused") else {}
        )
        id = make(tx, status, wanted=wanted, **held)
    if expected is None:
        with pytest.raises(NotPossible), database.begin() as tx:
            request_change(tx, "acme", id, wish)
        return
    for _ in range(2):
        with database.begin() as tx:
            job = request_change(tx, "acme", id, wish)
        assert (job["status"], job["wanted"]) == expected
    with database.read() as tx:
        stored = get_job(tx, "acme", id)
        assert (stored["status"], stored["wanted"]) == expected
        if status == "running" and not alive:
            # The worker that held it is dead; if not, its writes are refused.
            assert stored["fence"] == 1


@functools.cache
def _directory() -> str:
    """Where the lives below share one migrated database."""
    made = tempfile.mkdtemp(prefix="weft-job-life-")
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made


class JobLife(RuleBasedStateMachine):
    """Random wishes and work, against a model of a few lines."""

    def __init__(self) -> None:
        super().__init__()
        self.database = open_database(f"sqlite:///{_directory()}/weft.db")
        migrate(self.database)
        with self.database.begin() as tx:
            for table in (EVENTS, JOBS):
                tx.execute(sa.delete(table))
            if not tx.execute(sa.text("SELECT 1 FROM tenants")).first():
                create_tenant(tx, "acme")
            self.job = create_job(tx, "acme", model="tiny", training_file="f", settings={})["id"]
        self.status, self.wanted, self.num_events, self.fence = "queued", None, 3, 0

    def teardown(self) -> None:
        self.database.close()

    @rule(wish=st.sampled_from(["cancel", "pause", "resume"]))
    def wish(self, wish: str) -> None:
        before = (self.status, self.wanted)
        legal = self.status not in FINAL_STATES and (self.wanted != "cancel" or wish == "cancel")
        legal = legal or (self.status == "cancelled" and wish == "cancel")
        if not legal:
            with pytest.raises(NotPossible), self.database.begin() as tx:
                request_change(tx, "acme", self.job, wish)
            return
        if self.status == "running":
            self.wanted = None if wish == "resume" else wish
        elif self.status in ("queued", "paused"):
            goal = {"cancel": "cancelled", "pause": "paused", "resume": "queued"}[wish]
            self.num_events += goal != self.status
            self.status, self.wanted = goal, None
        with self.database.begin() as tx:
            job = request_change(tx, "acme", self.job, wish)
        assert (job["status"], job["wanted"]) == (self.status, self.wanted), (before, wish)

    @rule()
    def claim(self) -> None:
        if self.status == "queued":
            self.fence += 1
            self.status = "running"
            self.num_events += 1
            with self.database.begin() as tx:
                held = {"worker": "w", "lease_until": now(tx) + 600}
                move(tx, "acme", self.job, "running", **held)
                tx.execute(sa.update(JOBS).values(fence=self.fence))

    @rule(to=st.sampled_from(STATES), stale=st.booleans())
    def work(self, to: str, stale: bool) -> None:
        if self.status != "running":
            return
        expected: Any = Fenced if stale else None if to in MOVES["running"] else NotPossible
        if expected is not None:
            with pytest.raises(expected), self.database.begin() as tx:
                move(tx, "acme", self.job, to, fence=self.fence - stale)
            return
        with self.database.begin() as tx:
            move(tx, "acme", self.job, to, fence=self.fence)
        self.status, self.num_events = to, self.num_events + 1
        if to in (*FINAL_STATES, "paused"):
            self.wanted = None

    @invariant()
    def same(self) -> None:
        with self.database.read() as tx:
            job = get_job(tx, "acme", self.job)
            assert (job["status"], job["wanted"], job["fence"]) == (self.status, self.wanted, self.fence)
            assert tx.execute(sa.select(sa.func.count()).select_from(EVENTS)).scalar_one() == self.num_events


JobLife.TestCase.settings = settings(
    max_examples=25, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
TestJobLife = JobLife.TestCase
