"""PostgreSQL may go away and come back: callers get Busy meanwhile, and work goes on after."""

from __future__ import annotations

import pytest
from postgres_server import POSTGRES, running_postgres

from weft.serve.db.engine import migrate, open_database
from weft.serve.db.tenants import create_tenant, list_tenants
from weft.serve.errors import Busy


@pytest.mark.faults
@pytest.mark.parametrize("mode", ["immediate", "fast"] if POSTGRES else [])
def test_database_when_postgres_restarts_then_busy_until_it_is_back(mode: str):
    with running_postgres() as server:
        database = open_database(server.url)
        migrate(database)
        with database.begin() as tx:
            create_tenant(tx, "acme")

        def interrupted() -> None:
            with database.begin() as tx:
                create_tenant(tx, "lost")
                server.stop(mode)
                list_tenants(tx)

        with pytest.raises(Busy):
            interrupted()
        with pytest.raises(Busy), database.read() as tx:
            list_tenants(tx)
        server.start()
        with database.begin() as tx:
            create_tenant(tx, "globex")
        with database.read() as tx:
            assert [row["id"] for row in list_tenants(tx)] == ["acme", "globex"]
        database.close()
