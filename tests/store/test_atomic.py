import errno
import os
import resource

import pytest

from weft.errors import StorageError
from weft.store import faults
from weft.store.atomic import (
    TEMP_PREFIX,
    add_guard,
    check_guards,
    make_directory,
    remove_directory,
    remove_leftovers,
    staged_directory,
    storage_error,
    write_file,
)
from weft.store.faults import FaultPlan


def fill(staged, text):
    (staged / "inner").mkdir()
    (staged / "inner" / "a").write_text(text)
    (staged / "b").write_text(text)


def test_write_file_when_it_returns_then_the_file_holds_the_data_and_nothing_else_is_there(tmp_path):
    write_file(tmp_path / "a.json", "ü")
    write_file(tmp_path / "a.json", b"new")
    write_file(tmp_path / "empty", b"")
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {"a.json": b"new", "empty": b""}


@pytest.fixture
def trace(monkeypatch):
    """The syncs and renames that happen, in order, by file name; a power cut keeps only what was synced."""
    seen = []
    fsync, rename, replace = os.fsync, os.rename, os.replace

    def name(path):
        text = os.path.basename(path)
        return "temp" if text.startswith(TEMP_PREFIX) and "aside" not in text else text

    def traced_fsync(descriptor):
        seen.append(("sync", name(os.readlink(f"/proc/self/fd/{descriptor}"))))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", traced_fsync)
    for verb, real in (("rename", rename), ("replace", replace)):
        monkeypatch.setattr(os, verb, lambda a, b, real=real: (seen.append((name(a), name(b))), real(a, b))[1])
    return seen


def test_write_file_when_traced_then_data_is_synced_before_the_rename_and_the_directory_after(tmp_path, trace):
    write_file(tmp_path / "a", b"x")
    assert trace == [("sync", "temp"), ("temp", "a"), ("sync", tmp_path.name)]


def test_staged_directory_when_traced_then_all_is_synced_before_the_rename_and_the_parent_after(tmp_path, trace):
    for _ in range(2):
        trace.clear()
        with staged_directory(tmp_path / "d") as staged:
            fill(staged, "x")
    syncs = [("sync", "b"), ("sync", "inner"), ("sync", "a"), ("sync", "temp")]
    aside = f"{TEMP_PREFIX}aside-d"
    assert trace == [*syncs, ("d", aside), ("temp", "d"), ("sync", tmp_path.name)]


def test_make_directory_when_traced_then_its_parent_is_synced(tmp_path, trace):
    make_directory(tmp_path / "d")
    assert trace == [("sync", tmp_path.name)]


def test_write_file_when_made_then_its_mode_follows_the_umask(tmp_path):
    old = os.umask(0o027)
    try:
        write_file(tmp_path / "a", b"")
    finally:
        os.umask(old)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o640


@pytest.mark.faults
@pytest.mark.parametrize("action", ["raise", "enospc"])
def test_write_file_when_any_operation_fails_then_the_file_is_old_or_new_and_no_temp_remains(tmp_path, files, action):
    path = tmp_path / "a"
    outcomes, sentences = [], set()
    for n in range(1, 100):
        write_file(path, b"old")
        faults.arm(FaultPlan(action, n))
        try:
            write_file(path, b"new!")
        except StorageError as error:
            sentences.add(str(error))
        else:
            break
        finally:
            faults.disarm()
        assert list(files(tmp_path)) == ["a"]
        outcomes.append(path.read_bytes())
    assert outcomes == sorted(outcomes, reverse=True), "once new, always new"
    assert len(outcomes) == 9
    reason = "is full" if action == "enospc" else "reported an input/output error"
    assert sentences == {f"{path}: the disk {reason}."}
    assert set(outcomes) == {b"old", b"new!"}


@pytest.mark.faults
def test_write_file_when_killed_anywhere_then_the_file_is_old_or_new(tmp_path, in_child, files):
    path = tmp_path / "a"
    num_kills = 0
    for n in range(1, 100):
        write_file(path, b"old")

        def work(n=n):
            faults.arm(FaultPlan("kill", n))
            write_file(path, b"new!")

        if not os.WIFSIGNALED(in_child(work)):
            break
        num_kills += 1
        remove_leftovers(tmp_path)
        assert list(files(tmp_path)) == ["a"]
        assert path.read_bytes() in (b"old", b"new!")
    assert num_kills == 9


def test_staged_directory_when_the_block_ends_then_it_is_in_place_with_all_files(tmp_path, files):
    final = tmp_path / "d"
    for text in ("one", "two"):
        with staged_directory(final) as staged:
            fill(staged, text)
            assert staged.parent == tmp_path
            assert staged.name.startswith(TEMP_PREFIX)
        expected = {"d": None, "d/b": text.encode(), "d/inner": None, "d/inner/a": text.encode()}
        assert files(tmp_path) == expected


@pytest.mark.parametrize("existed", [False, True])
def test_staged_directory_when_the_block_fails_then_nothing_has_changed(tmp_path, files, existed):
    final = tmp_path / "d"
    if existed:
        with staged_directory(final) as staged:
            fill(staged, "old")
    before = files(tmp_path)

    def half_way():
        with staged_directory(final) as staged:
            (staged / "a").write_text("new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        half_way()
    assert files(tmp_path) == before


@pytest.mark.faults
@pytest.mark.parametrize("existed", [False, True])
def test_staged_directory_when_any_operation_fails_then_it_is_old_or_new_and_no_temp_remains(tmp_path, files, existed):
    seen = set()
    for n in range(1, 200):
        root = tmp_path / str(n)
        root.mkdir()
        if existed:
            with staged_directory(root / "d") as staged:
                fill(staged, "old")
        old = files(root)
        faults.arm(FaultPlan("raise", n))
        try:
            with staged_directory(root / "d") as staged:
                fill(staged, "new")
        except StorageError:
            faults.disarm()
        else:
            break
        now = files(root)
        assert now == old or set(now.values()) == {None, b"new"}
        assert not [name for name in now if TEMP_PREFIX in name]
        seen.add(now == old)
    assert seen == {True, False}
    assert n > 12


def test_staged_directory_when_a_file_is_in_the_way_then_reports_it_and_keeps_it(tmp_path, files):
    (tmp_path / "d").write_text("mine")
    with pytest.raises(StorageError, match="a file is in the way"), staged_directory(tmp_path / "d") as staged:
        fill(staged, "new")
    assert files(tmp_path) == {"d": b"mine"}


def test_staged_directory_when_the_parent_is_missing_then_reports_it(tmp_path, files):
    with pytest.raises(StorageError, match="no such directory"), staged_directory(tmp_path / "x" / "d"):
        pass
    assert files(tmp_path) == {}


def test_remove_leftovers_when_a_swap_was_cut_short_then_the_old_directory_is_back(tmp_path, files):
    with staged_directory(tmp_path / "d") as staged:
        fill(staged, "old")
    before = files(tmp_path)
    (tmp_path / "d").rename(tmp_path / f"{TEMP_PREFIX}aside-d")
    (tmp_path / f"{TEMP_PREFIX}0123").mkdir()
    (tmp_path / f"{TEMP_PREFIX}4567").write_text("torn")
    (tmp_path / ".tmp-of-somebody-else").write_text("stays")
    remove_leftovers(tmp_path)
    assert files(tmp_path) == before | {".tmp-of-somebody-else": b"stays"}


def test_remove_directory_when_it_returns_then_only_that_directory_is_gone(tmp_path, files):
    for name in "ab":
        make_directory(tmp_path / name)
        (tmp_path / name / "f").write_text(name)
    remove_directory(tmp_path / "a")
    assert files(tmp_path) == {"b": None, "b/f": b"b"}


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (errno.ENOSPC, "the disk is full"),
        (errno.EDQUOT, "quota"),
        (errno.EFBIG, "file size limit"),
        (errno.EACCES, "not writable"),
        (errno.EROFS, "read-only"),
        (errno.ENOTDIR, "a file is in the way"),
        (errno.ENAMETOOLONG, "too long"),
        (errno.EXDEV, "cannot be written"),
    ],
)
def test_storage_error_when_the_system_gives_a_code_then_it_is_a_sentence_about_the_path(tmp_path, code, words):
    error = storage_error(OSError(code, os.strerror(code)), tmp_path)
    assert str(error).startswith(f"{tmp_path}: ")
    assert words in str(error)
    assert str(error).endswith(".")


def test_write_file_when_the_name_is_a_directory_or_too_long_then_reports_it_and_leaves_nothing(tmp_path, files):
    (tmp_path / "d").mkdir()
    with pytest.raises(StorageError, match="a directory is in the way"):
        write_file(tmp_path / "d", b"x")
    with pytest.raises(StorageError, match="too long"):
        write_file(tmp_path / ("x" * 300), b"x")
    assert files(tmp_path) == {"d": None}


@pytest.mark.faults
def test_write_file_when_the_file_size_limit_is_hit_then_reports_it_and_leaves_nothing(tmp_path, in_child, files):
    def work():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
        with pytest.raises(StorageError, match="file size limit"):
            write_file(tmp_path / "a", b"x" * 3000)
        with pytest.raises(StorageError, match="file size limit"), staged_directory(tmp_path / "d") as staged:
            (staged / "a").write_bytes(b"x" * 3000)

    assert in_child(work) == 0
    assert files(tmp_path) == {}


def test_guard_when_it_objects_then_nothing_below_its_directory_is_changed(tmp_path):
    def object_to_it() -> None:
        raise StorageError("is another owner's.", where=str(tmp_path))

    remove = add_guard(tmp_path / "run", object_to_it)
    with pytest.raises(StorageError, match="is another owner's"):
        check_guards(tmp_path / "run" / "job" / "status.json")
    check_guards(tmp_path / "runs")
    remove()
    check_guards(tmp_path / "run" / "job" / "status.json")


def test_guard_when_it_is_removed_while_it_is_called_then_its_objection_does_not_count(tmp_path):
    """One replica leaves a directory in which another one, a thread of the same process, is just writing."""

    def leave() -> None:
        remove()
        raise StorageError("the run goes on without this rank.", where=str(tmp_path))

    remove = add_guard(tmp_path, leave)
    check_guards(tmp_path / "status.json")
