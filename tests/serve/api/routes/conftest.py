"""A worker to chat with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from chat_worker import Worker
from service_home import Home

from weft.serve.db.workers import put_worker


@pytest.fixture
def worker(home: Home) -> Iterator[Worker]:
    """A live worker of the backbone `tiny`."""
    made = Worker()
    address = f"http://127.0.0.1:{made.server.server_port}"
    with home.database.begin() as tx:
        put_worker(tx, "w1", base_model="tiny", address=address, token="secret", info={"tokens_per_s": 12.5})
    yield made
    made.server.shutdown()
    made.server.server_close()
