"""What the tests of the store share: a look at a directory, and a child process that may die."""

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from weft.store import faults


@pytest.fixture(autouse=True)
def _disarmed():
    yield
    faults.disarm()


@pytest.fixture
def files():
    """Everything below a directory: relative path -> bytes, directories -> None."""

    def look(directory: Path) -> dict[str, bytes | None]:
        return {
            str(path.relative_to(directory)): None if path.is_dir() else path.read_bytes()
            for path in sorted(directory.rglob("*"))
        }

    return look


@pytest.fixture
def in_child():
    """Runs a function in a forked child and returns the child's wait status; the child never returns to pytest."""

    def run(work: Callable[[], None]) -> int:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                work()
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        _, status = os.waitpid(child, 0)
        return status

    return run
