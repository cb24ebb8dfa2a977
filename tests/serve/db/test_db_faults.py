"""What is wrong with the database and not with the request: tried again or Busy, and never half done or done twice."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa
from postgres_server import POSTGRES

from weft.serve.db.engine import Database, Tx, migrate, open_database
from weft.serve.db.jobs import add_event
from weft.serve.db.tables import EVENTS, TENANTS
from weft.serve.db.tenants import create_tenant, list_tenants, update_tenant
from weft.serve.errors import Busy, Unsure

pytestmark = pytest.mark.faults
on_postgres = pytest.mark.parametrize("kind", POSTGRES, indirect=True)


def names(database: Database) -> list[str]:
    with database.read() as tx:
        return [row["name"] for row in list_tenants(tx)]


def rename(tx: Tx, tenant: str, name: str) -> None:
    tx.execute(sa.update(TENANTS).where(TENANTS.c.id == tenant).values(name=name))


def kill_connection(database: Database, tx: Tx) -> None:
    """The server ends the connection of a transaction, as when it fails over."""
    pid = tx.exec_driver_sql("SELECT pg_backend_pid()").scalar_one()
    with database.read() as other:
        other.execute(sa.text("SELECT pg_terminate_backend(:pid)"), {"pid": pid})


@on_postgres
def test_run_when_two_transactions_wait_for_each_other_then_both_are_done(database: Database):
    meet = threading.Barrier(2)
    tries: list[str] = []
    failed: list[BaseException] = []

    def work(first: str, second: str) -> None:
        def both(tx: Tx) -> None:
            tries.append(first)
            tx.exec_driver_sql("SET LOCAL deadlock_timeout = '20ms'")
            rename(tx, first, f"by {first}")
            if len(tries) <= 2:
                meet.wait(600)
            rename(tx, second, f"by {first}")

        try:
            database.run(both)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=pair) for pair in (("acme", "globex"), ("globex", "acme"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    assert failed == []
    assert len(tries) == 3, "one of the two was undone and done again"
    assert len(set(names(database))) == 1, "each of them changed both rows or neither"


@on_postgres
def test_run_when_rows_changed_under_it_then_it_is_done_again_with_what_is_there_now(database: Database):
    seen: list[str] = []

    def extend(tx: Tx) -> None:
        tx.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL SERIALIZABLE")
        name = tx.execute(sa.select(TENANTS.c.name).where(TENANTS.c.id == "acme")).scalar_one()
        seen.append(name)
        if len(seen) == 1:
            with database.begin() as other:
                rename(other, "acme", "x")
        rename(tx, "acme", name + "y")

    database.run(extend)
    assert seen == ["acme", "x"]
    assert names(database)[0] == "xy"


@on_postgres
def test_run_when_the_connection_breaks_before_the_commit_then_it_is_done_once_on_another(database: Database):
    tries: list[Tx] = []

    def work(tx: Tx) -> str:
        tries.append(tx)
        add_event(tx, "acme", "job", "info", "x")
        if len(tries) == 1:
            kill_connection(database, tx)
        create_tenant(tx, "third")
        return "done"

    assert database.run(work) == "done"
    assert len(tries) == 2
    with database.read() as tx:
        assert tx.execute(sa.select(sa.func.count()).select_from(EVENTS)).scalar_one() == 1


@on_postgres
def test_begin_when_the_transaction_is_undone_then_busy(database: Database):
    def undone() -> None:
        with database.begin() as tx:
            tx.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            list_tenants(tx)
            with database.begin() as other:
                rename(other, "acme", "theirs")
            rename(tx, "acme", "ours")

    with pytest.raises(Busy, match="in the way"):
        undone()
    assert names(database)[0] == "theirs"


@on_postgres
def test_run_when_deadlocks_do_not_end_then_busy_after_the_wait(postgres: Any, bare: Database, monkeypatch: Any):
    database = open_database(postgres.url, lock_wait_s=0.3)
    pauses: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: sum(pauses), sleep=pauses.append)
    monkeypatch.setattr("weft.serve.db.engine.time", clock)

    def always(tx: Tx) -> None:
        tx.exec_driver_sql("DO $$ BEGIN RAISE EXCEPTION USING ERRCODE = '40P01'; END $$")

    with contextlib.closing(database), pytest.raises(Busy):
        database.run(always)
    assert sum(pauses[:-1]) <= 0.3 < sum(pauses)


@on_postgres
@pytest.mark.parametrize("code", ["53100", "53300", "57014", "57P01", "57P03", "58030", "25006", "08006"])
def test_begin_when_the_server_is_in_trouble_then_busy(bare: Database, code: str):
    with pytest.raises(Busy), bare.begin() as tx:
        tx.exec_driver_sql(f"DO $$ BEGIN RAISE EXCEPTION USING ERRCODE = '{code}'; END $$")


@on_postgres
@pytest.mark.parametrize("code", ["23505", "22P02", "42P01"])
def test_begin_when_the_request_is_wrong_then_the_error_is_not_hidden(bare: Database, code: str):
    with pytest.raises(sa.exc.DBAPIError), bare.begin() as tx:
        tx.exec_driver_sql(f"DO $$ BEGIN RAISE EXCEPTION USING ERRCODE = '{code}'; END $$")


@on_postgres
def test_run_when_the_connection_breaks_during_the_commit_then_unsure_and_not_done_again(
    database: Database, monkeypatch: pytest.MonkeyPatch
):
    tries: list[Tx] = []
    commit = database.engine.dialect.do_commit

    def unheard(connection: Any) -> None:
        """Commits, and the connection breaks before the answer comes."""
        commit(connection)
        monkeypatch.undo()
        pid = connection.execute("SELECT pg_backend_pid()").fetchone()[0]
        with database.read() as other:
            other.execute(sa.text("SELECT pg_terminate_backend(:pid)"), {"pid": pid})
        connection.execute("SELECT 1")

    def work(tx: Tx) -> None:
        tries.append(tx)
        create_tenant(tx, "third")

    monkeypatch.setattr(database.engine.dialect, "do_commit", unheard)
    with pytest.raises(Unsure):
        database.run(work)
    assert len(tries) == 1
    assert len(names(database)) == 3


def test_sqlite_when_its_disk_is_full_then_busy_and_nothing_of_the_transaction_is_there(tmp_path: Path):
    database = open_database(f"sqlite:///{tmp_path}/weft.db")
    migrate(database)
    with database.begin() as tx:
        create_tenant(tx, "acme")

    def fill() -> None:
        with database.begin() as tx:
            pages = tx.exec_driver_sql("PRAGMA page_count").scalar_one()
            tx.exec_driver_sql(f"PRAGMA max_page_count = {pages + 4}")
            update_tenant(tx, "acme", weight=7.0)
            for _ in range(100):
                add_event(tx, "acme", "job", "info", "x" * 4096)

    with contextlib.closing(database):
        with pytest.raises(Busy, match="disk is full"):
            fill()
        with database.begin() as tx:
            tx.exec_driver_sql("PRAGMA max_page_count = 1000000")
            assert list_tenants(tx)[0]["weight"] == 1.0
            assert tx.execute(sa.select(EVENTS)).all() == []
            add_event(tx, "acme", "job", "info", "x")
