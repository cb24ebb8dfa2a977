"""One owner of a run directory over machines whose locks do not see each other."""

import errno
import fcntl
import json
import os
import time
from dataclasses import replace

import pytest

from weft.errors import StorageError
from weft.job_state import JobState
from weft.store import atomic
from weft.store import owner as owner_module
from weft.store.atomic import append_line, remove_directory, remove_leftovers, staged_directory, write_file
from weft.store.owner import GONE_S, Owner, Ownership, newest_owner
from weft.store.run_dir import RankDirectory, RunDirectory, RunRecord, grant_permit, revoke_permit

ELSEWHERE = {"host": "far", "pid": 123, "boot": "other", "token": "of far"}


@pytest.fixture
def run(tmp_path):
    with RunDirectory.open(tmp_path / "x", resume=False) as opened:
        opened.write_run(RunRecord())
        yield opened


def own_elsewhere(path, *, silent_s=3.0):
    """Lets a process of another machine be the last owner of a run, as if it had gone on from here."""
    with RunDirectory.open(path, resume=RunDirectory.holds_run(path)) as run:
        run.write_run(RunRecord())
    owner = Owner(term=newest_owner(path).term + 1, **ELSEWHERE)
    record = path / f".owner-{owner.term}"
    record.write_bytes(owner.encode())
    for older in path.glob(".owner-*"):
        if older != record:
            older.unlink()
    os.utime(record, (time.time() - silent_s,) * 2)
    return record


def test_open_when_a_process_of_another_machine_gave_signs_of_life_then_it_is_refused_and_nothing_changes(
    tmp_path, files
):
    """The lock is free here, as on a file system whose locks hold on one machine only."""
    own_elsewhere(tmp_path / "x")
    before = files(tmp_path)
    message = r"x: is in use by process 123 on far, last seen \d+ s ago\. Wait for its end, or until it has been"
    for take in (RunDirectory.open, RunDirectory.check):
        with pytest.raises(StorageError, match=message):
            take(tmp_path / "x", resume=True)
    assert files(tmp_path) == before


@pytest.mark.parametrize("end", ["silent", "released"])
def test_open_when_the_owner_elsewhere_is_gone_then_the_run_is_taken_over(tmp_path, end):
    record = own_elsewhere(tmp_path / "x", silent_s=GONE_S + 5 if end == "silent" else 0.0)
    if end == "released":
        record.write_bytes(replace(Owner.parse(record.read_bytes(), 2), is_released=True).encode())
    RunDirectory.check(tmp_path / "x", resume=True)
    with RunDirectory.open(tmp_path / "x", resume=True) as run:
        assert run.owner.term == 3
        assert [path.name for path in run.path.glob(".owner-*")] == [".owner-3"]
        assert not newest_owner(run.path).is_released
    assert newest_owner(tmp_path / "x").is_released


def test_open_when_its_clock_differs_from_the_file_systems_then_only_the_latter_counts(tmp_path, monkeypatch):
    """A machine whose clock is an hour ahead does not take over a run that is alive."""
    own_elsewhere(tmp_path / "x", silent_s=0.0)
    now_s = time.time()
    monkeypatch.setattr(owner_module.time, "time", lambda: now_s + 3600)
    with pytest.raises(StorageError, match="is in use by process 123 on far"):
        RunDirectory.open(tmp_path / "x", resume=True)


def test_open_when_the_file_system_has_no_locks_then_the_record_decides(tmp_path, monkeypatch):
    def no_locks(descriptor, kind):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with RunDirectory.open(tmp_path / "x", resume=False) as first:
        first.write_run(RunRecord())
        with pytest.raises(StorageError, match=f"in use by process {os.getpid()}, last seen"):
            RunDirectory.open(tmp_path / "x", resume=True)
        RankDirectory(first.path, 0, first.owner, grant_permit(first.path)).close()
    RunDirectory.open(tmp_path / "x", resume=True).close()


def test_claim_when_another_is_quicker_then_one_of_both_is_refused(tmp_path, monkeypatch):
    Ownership.claim(tmp_path).release()
    seen = owner_module._terms(tmp_path)
    first = Ownership.claim(tmp_path)
    answers = iter([seen, [*seen, 2]])
    monkeypatch.setattr(owner_module, "_terms", lambda root: next(answers))
    with pytest.raises(StorageError, match="is in use"):
        Ownership.claim(tmp_path)
    monkeypatch.undo()
    first.check()
    # One that looked two owners ago creates a record that no process owns any more.
    first.release()
    second = Ownership.claim(tmp_path)
    answers = iter([seen, [2, 3], [2, 3]])
    monkeypatch.setattr(owner_module, "_terms", lambda root: next(answers))
    with pytest.raises(StorageError, match="is in use"):
        Ownership.claim(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".owner-3"]
    second.check()
    second.release()


@pytest.mark.parametrize("who", ["owner", "rank"])
def test_files_when_the_run_has_another_owner_then_an_earlier_process_changes_none(run, files, who):
    """A controller that was cut off, and ranks that outlive theirs, write nothing into a run that went on elsewhere."""
    rank = RankDirectory(run.path, 1, run.owner, grant_permit(run.path))
    run.write_status("a", JobState.RUNNING, step=1)
    run.append_metrics("a", {"step": 1})
    for name in ("adapter", "checkpoints"):
        (run.path / "a" / name).mkdir()
    own = run.path / ".owner-1"
    own.rename(run.path / ".owner-2")
    (run.path / ".owner-2").write_bytes(Owner(term=2, **ELSEWHERE).encode())
    if who == "rank":
        run._ownership.leave()
    before = files(run.path)
    message = r"x: was taken over by process 123 on far; this process writes nothing more there\."
    for change in (
        lambda: write_file(run.path / "a" / "status.json", b"late"),
        lambda: append_line(run.path / "a" / "metrics.jsonl", b"late\n", "metrics.append"),
        lambda: remove_directory(run.path / "a" / "checkpoints"),
        lambda: rank.write_status("a", JobState.SUCCEEDED),
        lambda: _replace(run.path / "a" / "adapter"),
    ):
        with pytest.raises(StorageError, match=message):
            change()
    assert files(run.path) == before
    rank.close()
    run.close()
    assert files(run.path) == before, "the record of the new owner is not touched"


def _replace(directory):
    with staged_directory(directory) as staged:
        (staged / "f").write_bytes(b"late")


def test_files_when_the_run_is_taken_over_right_before_they_are_put_in_place_then_they_never_appear(run, monkeypatch):
    """Even one who has just seen that the run is its own fails: its successor has removed what was unfinished."""
    successors = []

    def take_over(path):
        successors.append(Ownership.claim(run.path))
        remove_leftovers(run.path)

    monkeypatch.setattr(atomic, "check_guards", take_over)
    with pytest.raises(StorageError, match="no such"):
        _replace(run.path / "late")
    assert not (run.path / "late").exists()
    successors[0].release()


@pytest.mark.parametrize("other_run", ["nothing", "another run"])
def test_rank_when_it_does_not_see_the_run_directory_then_reports_it_and_makes_nothing(tmp_path, run, files, other_run):
    if other_run == "another run":
        with RunDirectory.open(tmp_path / "other", resume=False) as other:
            other.write_run(RunRecord())
    before = files(tmp_path)
    message = r"other: rank 2 on .* does not find the run of process \d+ on .* there; the run directory must be one"
    with pytest.raises(StorageError, match=message):
        RankDirectory(tmp_path / "other", 2, run.owner, run.path / "permit")
    assert files(tmp_path) == before


def test_rank_when_its_owner_has_given_it_up_then_it_writes_nothing_and_the_others_do(run):
    """A rank that was stopped, or cut off, may wake up when another one has its jobs."""
    permits = [grant_permit(run.path) for _ in range(2)]
    late, other = (RankDirectory(run.path, rank, run.owner, permit) for rank, permit in enumerate(permits))
    late.append_metrics("a", {"step": 1})
    revoke_permit(permits[0])
    for write in (lambda: late.append_metrics("a", {"step": 2}), lambda: late.write_status("a", JobState.PAUSED)):
        with pytest.raises(StorageError, match="the run goes on without this rank"):
            write()
    late.close()
    other.append_metrics("a", {"step": 2})
    other.close()
    assert [json.loads(line)["step"] for line in run.metrics_path("a").read_text().splitlines()] == [1, 2]


def test_owner_when_its_record_is_only_half_written_then_it_is_another_process(tmp_path):
    for data in (b"", b'{"term": 3, "ho', b"[]", b'{"speed": 3}'):
        assert str(Owner.parse(data, 3)) == "another process"
    owner = Owner.here(3)
    assert Owner.parse(owner.encode(), 3) == owner
    assert str(owner) == f"process {os.getpid()}"
