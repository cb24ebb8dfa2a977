"""The made-up run all tests of the report look at."""

from __future__ import annotations

from pathlib import Path

import pytest
from synthetic_run import write_run


@pytest.fixture(scope="session")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run; tests only add report.html to it."""
    return write_run(tmp_path_factory.mktemp("runs") / "evening")
