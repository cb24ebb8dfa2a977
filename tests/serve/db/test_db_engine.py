"""Transactions: all or nothing, one clock, and waiting that ends."""

from __future__ import annotations

import sqlite3
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext

from weft.errors import ConfigError
from weft.serve.db.engine import SCRIPTS, Database, migrate, now, open_database, revision
from weft.serve.db.jobs import add_event
from weft.serve.db.tables import EVENTS, JOBS, METADATA, TENANTS
from weft.serve.db.tenants import create_tenant, find_key, first_key, list_tenants
from weft.serve.errors import Busy


def test_upgrade_when_fresh_then_equals_the_tables(bare: Database):
    assert migrate(bare) == migrate(bare) == "0005"
    with bare.read() as tx:
        context = MigrationContext.configure(tx, opts={"compare_type": True, "compare_server_default": True})
        assert compare_metadata(context, METADATA) == []
        names = set(sa.inspect(tx).get_table_names())
    assert names == {*METADATA.tables, "alembic_version"}


def test_upgrade_when_there_are_jobs_of_an_older_version_then_keeps_them(bare: Database):
    config = Config()
    config.set_main_option("script_location", str(SCRIPTS))
    with bare.begin() as tx:
        config.attributes["connection"] = tx
        command.upgrade(config, "0001")
        create_tenant(tx, "acme")
        job = {"id": "ftjob-1", "tenant": "acme", "status": "queued", "model": "tiny", "training_file": "file-1"}
        job |= {"seed": 1, "method": {}, "settings": {}, "integrations": [], "result_files": [], "created_at": 1}
        tx.execute(sa.insert(JOBS).values(job))
    assert migrate(bare) == "0005"
    with bare.read() as tx:
        (row,) = tx.execute(sa.select(JOBS)).mappings()
    assert (row["id"], row["planned_tokens"]) == ("ftjob-1", None)


def test_upgrade_when_run_by_many_at_once_then_happens_once(bare: Database):
    errors: list[Exception] = []

    def run() -> None:
        try:
            migrate(bare)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    with bare.read() as tx:
        assert revision(tx) == "0005"


def test_setup_when_several_processes_start_on_an_empty_database_then_one_makes_the_tenant_and_the_key(bare: Database):
    barrier = threading.Barrier(6)

    def start(_: int) -> str | None:
        barrier.wait()
        migrate(bare)
        barrier.wait()
        return first_key(bare, auth=True)

    with ThreadPoolExecutor(6) as pool:
        keys = [key for key in pool.map(start, range(6)) if key is not None]
    assert len(keys) == 1
    with bare.read() as tx:
        assert [tenant["id"] for tenant in list_tenants(tx)] == ["default"]
        assert find_key(tx, keys[0])["tenant"] == "default"


def test_upgrade_when_the_database_is_newer_then_refused_with_advice(database: Database):
    with database.begin() as tx:
        tx.execute(sa.text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(ConfigError, match="newer version of Weft"):
        migrate(database)


def test_transaction_when_it_raises_then_nothing_of_it_happened(database: Database):
    def fail() -> None:
        with database.begin() as tx:
            create_tenant(tx, "third")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    with database.read() as tx:
        assert [row["id"] for row in list_tenants(tx)] == ["acme", "globex"]


def test_clock_when_requested_then_is_unix_seconds(database: Database):
    with database.read() as tx:
        assert abs(now(tx) - time.time()) < 2


def test_writers_when_many_then_all_succeed_in_order(database: Database):
    def write() -> None:
        for _ in range(10):
            with database.begin() as tx:
                add_event(tx, "acme", "job", "info", "x")

    threads = [threading.Thread(target=write) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with database.read() as tx:
        assert tx.execute(sa.select(sa.func.count()).select_from(EVENTS)).scalar_one() == 80


def test_sqlite_when_another_process_holds_the_lock_then_waits_and_succeeds(tmp_path: Path):
    path = tmp_path / "weft.db"
    database = open_database(f"sqlite:///{path}", lock_wait_s=5)
    migrate(database)
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    other.execute("BEGIN EXCLUSIVE")
    timer = threading.Timer(0.5, lambda: other.execute("ROLLBACK"))
    timer.start()
    started = time.monotonic()
    with database.begin() as tx:
        create_tenant(tx, "acme")
    assert time.monotonic() - started > 0.4
    timer.join()
    other.close()
    database.close()


def test_sqlite_when_the_lock_is_held_too_long_then_busy_and_nothing_is_written(tmp_path: Path):
    path = tmp_path / "weft.db"
    database = open_database(f"sqlite:///{path}", lock_wait_s=0.3)
    migrate(database)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(Busy), database.begin() as tx:
        create_tenant(tx, "acme")
    with database.read() as tx:
        assert tx.execute(sa.select(TENANTS)).all() == []
    other.execute("ROLLBACK")
    other.close()
    database.close()


def test_sqlite_when_opened_then_is_durable(tmp_path: Path):
    database = open_database(f"sqlite:///{tmp_path}/weft.db")
    with database.read() as tx:
        assert tx.exec_driver_sql("PRAGMA journal_mode").scalar_one() == "wal"
        assert tx.exec_driver_sql("PRAGMA synchronous").scalar_one() == 2
        assert tx.exec_driver_sql("PRAGMA foreign_keys").scalar_one() == 1
    database.close()


@pytest.mark.parametrize("url", ["nonsense", "mysql://x/y", "", "oracle://"])
def test_url_when_not_supported_then_one_sentence(url: str):
    with pytest.raises(ConfigError, match=r"sqlite:///PATH or postgresql://…"):
        open_database(url)
