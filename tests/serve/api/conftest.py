"""A fresh service for every test of the API."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from service_home import Home, make_home


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    """A service with the tenants `acme` and `globex`."""
    made = make_home(tmp_path / "data")
    with made.http:
        yield made
    made.database.close()
