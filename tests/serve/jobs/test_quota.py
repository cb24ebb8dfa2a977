"""Tokens of unfinished jobs are spoken for: by a guess at first, then by the worker's own count."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.data.order import BatchSchedule
from weft.serve.db.engine import Database, DbRow
from weft.serve.db.jobs import create_job, get_job, move
from weft.serve.db.tables import JOBS
from weft.serve.db.tenants import update_tenant
from weft.serve.db.usage import TokenUsage, check_tokens, count_tokens, guess_tokens, reserve, token_usage
from weft.serve.errors import Fenced, OverLimit
from weft.spec import JobSpec


def make(database: Database, planned: int | None, **columns: Any) -> DbRow:
    with database.begin() as tx:
        job = create_job(
            tx, "acme", model="tiny", training_file="file-1", settings={}, planned_tokens=planned
        )  # fmt: skip
        if columns:
            tx.execute(sa.update(JOBS).where(JOBS.c.id == job["id"]).values(columns))
        return get_job(tx, "acme", job["id"])


def limit(database: Database, tokens: int) -> None:
    with database.begin() as tx:
        update_tenant(tx, "acme", max_trained_tokens=tokens)


def test_tokens_when_jobs_are_in_all_states_then_trained_and_reserved_add_up(database: Database):
    make(database, 100)
    make(database, 100, trained_tokens=30)
    make(database, None, trained_tokens=7)
    make(database, 100, trained_tokens=120)
    ended = make(database, 100, trained_tokens=60)
    with database.begin() as tx:
        move(tx, "acme", ended["id"], "cancelled")
        assert token_usage(tx, "acme") == TokenUsage(30 + 7 + 120 + 60, 100 + 70)
        assert token_usage(tx, "globex") == TokenUsage(0, 0)
        check_tokens(tx, "acme", 217 + 170 + 10, 10)
        with pytest.raises(OverLimit, match="217 tokens have been trained of at most 396, 170 more are reserved"):
            check_tokens(tx, "acme", 396, 10)
        check_tokens(tx, "acme", None, 10**12)


def test_count_when_the_worker_knows_more_then_the_first_come_train_and_the_last_is_refused(database: Database):
    jobs = [make(database, 10) for _ in range(3)]
    limit(database, 100)
    with database.begin() as tx:
        reserve(tx, jobs[0], 40)
    with database.begin() as tx:
        reserve(tx, jobs[1], 60)
    with database.begin() as tx, pytest.raises(OverLimit, match=r"100 more are reserved .* this job needs 40"):
        reserve(tx, jobs[2], 40)
    with database.read() as tx:
        assert [get_job(tx, "acme", job["id"])["planned_tokens"] for job in jobs] == [40, 60, 10]


def test_count_when_a_later_job_has_begun_then_it_counts_against_an_earlier_one(database: Database):
    first, later = make(database, 10), make(database, 10, started_at=5, planned_tokens=90)
    claimed = make(database, 5, worker="w")
    limit(database, 100)
    with database.begin() as tx, pytest.raises(OverLimit, match="95 more are reserved"):
        reserve(tx, first, 10)
    with database.begin() as tx:
        # What has begun goes on, whatever became of the limit.
        reserve(tx, later, 500)
        reserve(tx, {**claimed, "started_at": 1}, 500)


def test_count_when_a_worker_has_just_taken_the_job_then_its_own_guess_is_not_in_its_way(database: Database):
    job = make(database, 60, worker="w")
    limit(database, 100)
    with database.begin() as tx:
        reserve(tx, job, 100)


def test_count_when_another_worker_has_the_job_then_fenced(database: Database):
    job = make(database, 10, fence=3)
    with database.begin() as tx, pytest.raises(Fenced):
        reserve(tx, {**job, "fence": 2}, 10)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=12),
    batch=st.integers(1, 5),
    epochs=st.floats(0.1, 3),
    steps=st.none() | st.integers(1, 30),
    shuffle=st.booleans(),
)
def test_count_when_compared_with_every_batch_then_equal(lengths, batch, epochs, steps, shuffle):
    spec = JobSpec(
        "j", ("t",), global_batch_size=batch, num_train_epochs=epochs, max_steps=steps, shuffle=shuffle, seed=5
    )
    order = BatchSchedule(len(lengths), batch, epochs, steps, 5, shuffle)
    every = [lengths[i] for step in range(order.num_steps) for i in order.batch(step)]
    assert count_tokens(spec, lengths) == sum(every)
    alike = guess_tokens(spec, len(lengths), 4 * 8 * len(lengths))
    assert alike == 8 * len(every), "a guess knows how many samples there are"
    assert guess_tokens(spec, len(lengths), 10**9) == 1024 * len(every)
