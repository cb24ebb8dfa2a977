"""Scratch folders go with their owner, however that ends."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from weft.store.owner import ScratchFolder

OWNER = """
import time
from weft.store.owner import ScratchFolder
folder = ScratchFolder("test")
print(folder.path, flush=True)
time.sleep(60)
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def test_folder_when_its_owner_was_killed_then_the_next_one_removes_it(temporary):
    """One of a living owner stays, and so does what has no owner's lock, or is of another kind."""
    (temporary / "weft-test-other").mkdir()
    (temporary / "weft-else").mkdir()
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        theirs = Path(owner.stdout.readline().strip())
        mine = ScratchFolder("test")
        assert theirs.parent == temporary and theirs.exists()
        owner.kill()
    next_one = ScratchFolder("test")
    names = {mine.path.name, next_one.path.name, "weft-test-other", "weft-else"}
    assert not theirs.exists() and {path.name for path in temporary.iterdir()} == names


def test_folder_when_it_is_closed_or_forgotten_then_it_is_gone(temporary):
    closed, forgotten = ScratchFolder("test"), ScratchFolder("test")
    paths = [closed.path, forgotten.path]
    closed.close()
    del forgotten
    assert not any(path.exists() for path in paths)
