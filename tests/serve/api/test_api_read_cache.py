"""What is kept between requests is never older than the database, in whichever process it was changed."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import sqlalchemy as sa
from service_home import Home

from weft.serve.api import service
from weft.serve.db import tenants
from weft.serve.db.engine import Database, open_database
from weft.serve.db.jobs import move, watched_job
from weft.serve.db.tables import JOBS as JOBS_TABLE

JOBS = "/v1/fine_tuning/jobs"


@pytest.fixture
def other(home: Home) -> Iterator[Database]:
    """The same database as another process has it open."""
    database = open_database(home.settings.db_url)
    yield database
    database.close()


@contextmanager
def statements(database: Database) -> Iterator[list[str]]:
    """What is sent to the database through its engine."""
    sent: list[str] = []

    def note(connection: object, cursor: object, statement: str, *rest: object) -> None:
        sent.append(statement)

    sa.event.listen(database.engine, "before_cursor_execute", note)
    yield sent
    sa.event.remove(database.engine, "before_cursor_execute", note)


@pytest.mark.parametrize("path", ["", "?limit=3", "/{job}"])
def test_poll_when_nothing_has_changed_then_sends_the_database_no_query(home, path):
    path = JOBS + path.format(job=home.job())
    before = home.call("GET", path)
    with statements(home.database) as sent:
        after = home.call("GET", path)
    assert sent == []
    assert before.status_code == after.status_code == 200 and before.content == after.content


@pytest.mark.parametrize("path", ["", "/{job}"])
def test_poll_when_only_others_have_changed_then_no_answer_is_made_again(home, other, path):
    """What a worker commits twice a second is about a few jobs; polls of the others are answered from the cache."""
    mine, theirs = home.job(), home.job("globex")
    path = JOBS + path.format(job=mine)
    before = home.call("GET", path)
    for state in ("paused", "cancelled"):
        with other.begin() as tx:
            move(tx, "globex", theirs, state)
        with statements(home.database) as sent:
            after = home.call("GET", path)
        assert sent == [] and after.status_code == 200 and after.content == before.content
    with other.begin() as tx:
        move(tx, "acme", mine, "paused")
    assert b'"paused"' in home.call("GET", path).content


def test_poll_when_a_change_is_taken_back_while_the_answer_is_made_then_answers_and_rows_are_of_one_moment(home, other):
    """An answer is later compared with the rows it was made of."""
    job = home.job()
    kept = home.app.state.service.read_cache

    def look(tx):
        with other.begin() as change:
            change.execute(sa.update(JOBS_TABLE).values(step=7))
        seen = tx.execute(sa.select(JOBS_TABLE.c.step)).scalar_one()
        with other.begin() as change:
            change.execute(sa.update(JOBS_TABLE).values(step=0))
        return seen

    read = functools.partial(kept.read, "step", look, watched_job("acme", job))
    assert asyncio.run(read()) == asyncio.run(read()) == 0


def test_poll_when_another_process_moves_the_job_then_the_next_answer_reports_it(home, other):
    job = home.job()
    for path in (f"{JOBS}/{job}", JOBS):
        assert b'"queued"' in home.call("GET", path).content
    with other.begin() as tx:
        move(tx, "acme", job, "paused")
    for path in (f"{JOBS}/{job}", JOBS):
        assert b'"paused"' in home.call("GET", path).content


def test_poll_when_the_same_path_was_answered_to_another_tenant_then_is_not_found(home):
    job = home.job("acme")
    # Its first request writes down that its key is used, and what was kept before that is forgotten.
    assert home.call("GET", JOBS, "globex").json()["data"] == []
    assert home.call("GET", f"{JOBS}/{job}", "acme").status_code == 200
    assert home.call("GET", f"{JOBS}/{job}", "globex").status_code == 404
    assert home.call("GET", JOBS, "acme").json()["data"] and not home.call("GET", JOBS, "globex").json()["data"]


def test_key_when_revoked_by_another_process_then_the_next_request_is_refused(home, other):
    assert home.call("GET", JOBS).status_code == 200
    with other.begin() as tx:
        tenants.revoke_key(tx, "acme", tenants.key_id(home.keys["acme"]))
    assert home.call("GET", JOBS).status_code == 401
    assert home.call("GET", JOBS, "globex").status_code == 200


def test_tenant_when_disabled_or_limited_by_another_process_then_it_holds_for_the_next_request(home, other):
    assert home.call("GET", JOBS).status_code == 200
    with other.begin() as tx:
        tenants.update_tenant(tx, "acme", max_requests_per_minute=1)
    assert [home.call("GET", JOBS).status_code for _ in range(2)] == [200, 429]
    with other.begin() as tx:
        tenants.update_tenant(tx, "acme", is_disabled=True)
    assert home.call("GET", JOBS).status_code == 401


def test_key_when_wrong_then_stays_wrong_and_a_right_one_beside_it_stays_right(home):
    wrong = home.keys["acme"][:-1] + ("A" if home.keys["acme"][-1] != "A" else "B")
    for _ in range(2):
        assert home.http.get(JOBS, headers={"authorization": f"Bearer {wrong}"}).status_code == 401
        assert home.call("GET", JOBS).status_code == 200


def test_answers_when_many_are_requested_then_only_so_many_are_kept(home, monkeypatch):
    monkeypatch.setattr(service, "MAX_KEPT", 5)
    home.job()
    for limit in range(1, 20):
        assert home.call("GET", f"{JOBS}?limit={limit}").status_code == 200
        assert 0 < len(home.app.state.service.read_cache._kept) <= 5


def test_list_when_metadata_is_requested_then_is_right_after_every_change(home):
    home.job(metadata={"team": "a"})
    path = f"{JOBS}?metadata[team]=a"
    assert len(home.call("GET", path).json()["data"]) == 1
    home.job(metadata={"team": "a"})
    assert len(home.call("GET", path).json()["data"]) == 2
    assert len(home.call("GET", JOBS).json()["data"]) == 2


def test_key_when_many_requests_come_at_once_then_one_of_them_writes_that_it_is_used(home):
    with statements(home.database) as sent:
        for _ in range(5):
            assert home.call("GET", JOBS).status_code == 200
    assert sum("last_used_at" in text for text in sent if text.startswith("UPDATE")) == 1


def test_file_when_used_for_many_jobs_then_is_read_once_and_a_bad_one_is_refused_every_time(home, monkeypatch):
    opened: list[str] = []
    real = home.blobs.open
    monkeypatch.setattr(home.blobs, "open", lambda blob: opened.append(blob) or real(blob))
    good = home.upload()
    bad = home.upload(data=b'{"neither": "a chat", "nor": "a prompt"}\n')
    opened.clear()
    for _ in range(3):
        home.job(file=good)
        answer = home.call("POST", JOBS, json={"model": "tiny", "training_file": bad})
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "invalid_training_file"
    assert len(set(opened)) == 2 and len(opened) == 8, "each time for its SHA-256 and for its lines"
