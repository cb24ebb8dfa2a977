"""Guards speak for whoever set them, and for as long as they are set."""

from __future__ import annotations

import pytest

from weft.errors import StorageError
from weft.store.atomic import add_guard, check_guards


def test_guard_when_it_objects_then_nothing_below_its_directory_is_changed(tmp_path):
    def object_to_it() -> None:
        raise StorageError("is somebody else's.", where=str(tmp_path))

    remove = add_guard(tmp_path / "run", object_to_it)
    with pytest.raises(StorageError, match="is somebody else's"):
        check_guards(tmp_path / "run" / "job" / "status.json")
    check_guards(tmp_path / "runs")
    remove()
    check_guards(tmp_path / "run" / "job" / "status.json")


def test_guard_when_it_is_taken_away_while_it_is_asked_then_its_objection_does_not_count(tmp_path):
    """One replica leaves a directory in which another one, a thread of the same process, is just writing."""

    def leave() -> None:
        remove()
        raise StorageError("the run goes on without this rank.", where=str(tmp_path))

    remove = add_guard(tmp_path, leave)
    check_guards(tmp_path / "status.json")
