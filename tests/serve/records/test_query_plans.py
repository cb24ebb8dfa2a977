"""What clients poll is found by an index, however many jobs there are."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from weft.serve.db import files, jobs, tenants
from weft.serve.db.engine import Tx, migrate, open_database
from weft.serve.db.tenants import create_tenant
from weft.serve.errors import NotFound

POLLED: dict[str, Callable[[Tx], Any]] = {
    "a job": lambda tx: jobs.get_job(tx, "acme", "ftjob-1"),
    "the newest jobs": lambda tx: jobs.list_jobs(tx, "acme"),
    "jobs after one": lambda tx: jobs.list_jobs(tx, "acme", "ftjob-1"),
    "new events of a job": lambda tx: jobs.events_since(tx, "acme", "ftjob-1", 7),
    "the newest events of a job": lambda tx: jobs.list_events(tx, "acme", "ftjob-1"),
    "checkpoints of a job": lambda tx: files.list_checkpoints(tx, "acme", "ftjob-1"),
    "a file": lambda tx: files.get_file(tx, "acme", "file-1"),
    "a key": lambda tx: tenants.find_key(tx, "weft_" + "0" * 12 + "_" + "x" * 43),
}


@pytest.mark.parametrize("what", POLLED)
def test_poll_when_planned_by_the_database_then_searches_by_index_and_sorts_nothing(what, tmp_path: Path):
    database = open_database(f"sqlite:///{tmp_path}/weft.db")
    migrate(database)
    sent: list[tuple[str, Any]] = []

    def note(connection: object, cursor: object, statement: str, parameters: Any, *rest: object) -> None:
        if statement.startswith("SELECT") and "FROM" in statement:
            sent.append((statement, parameters))

    with database.begin() as tx:
        create_tenant(tx, "acme")
        tx.execute(_job("ftjob-1"))
    sa.event.listen(database.engine, "before_cursor_execute", note)
    with database.read() as tx:
        with contextlib.suppress(NotFound):
            POLLED[what](tx)
        queries = list(sent)
        plans = [
            row[-1]
            for statement, parameters in queries
            for row in tx.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)
        ]
    assert plans and all(step.startswith("SEARCH") for step in plans), plans
    database.close()


def _job(id: str) -> sa.Insert:
    from weft.serve.db.tables import JOBS

    plain = {"status": "queued", "model": "tiny", "training_file": "f", "seed": 1, "created_at": 1}
    json = {"method": {}, "settings": {}, "integrations": [], "result_files": []}
    return sa.insert(JOBS).values(id=id, tenant="acme", **plain, **json)
