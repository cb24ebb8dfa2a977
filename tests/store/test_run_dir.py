import json
import math
import os
import resource
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from weft.errors import StorageError
from weft.job_state import JobState, Reason, ReasonCode
from weft.store import faults
from weft.store.atomic import TEMP_PREFIX
from weft.store.faults import FaultPlan
from weft.store.run_dir import RunDirectory, RunRecord, library_versions


def start(path) -> None:
    with RunDirectory.open(path, resume=False) as run:
        run.write_run(RunRecord(base_model="tiny"))


def metrics(run, name):
    return [json.loads(line) for line in run.metrics_path(name).read_text().splitlines()]


def test_open_when_the_directory_is_new_then_it_is_made_with_its_parents(tmp_path):
    with RunDirectory.open(tmp_path / "runs" / "x", resume=False) as run:
        run.write_run(RunRecord(base_model="tiny", jobs=("a",)))
        found = run.read_run()
    assert found == RunRecord(base_model="tiny", jobs=("a",), versions=library_versions())
    assert found.versions is not None and {"weft", "python", "torch", "safetensors"} <= set(found.versions)
    stored = json.loads((tmp_path / "runs" / "x" / "run.json").read_text())
    assert list(stored) == ["base_model", "jobs", "versions"], "what is not known is not in the file"


def test_run_record_when_written_by_another_version_then_what_is_known_is_read():
    """Records may lack what came later, and may hold what this version does not know."""
    assert RunRecord.from_json({"base_model": "tiny", "speed": 3}) == RunRecord(base_model="tiny")


def test_open_when_the_path_is_relative_then_it_is_made_below_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    start("runs/x")
    assert (tmp_path / "runs" / "x" / "run.json").is_file()


def test_open_when_it_holds_a_run_then_only_resume_takes_it(tmp_path, files):
    start(tmp_path / "x")
    before = files(tmp_path)
    with pytest.raises(StorageError, match=r"already holds a run\. Use --resume .* or another --out\."):
        RunDirectory.open(tmp_path / "x", resume=False)
    assert files(tmp_path) == before
    with RunDirectory.open(tmp_path / "x", resume=True) as run:
        assert run.read_run().base_model == "tiny"


@pytest.mark.parametrize("made", [False, True])
def test_open_when_there_is_no_run_then_resume_reports_it_and_leaves_nothing(tmp_path, files, made):
    if made:
        (tmp_path / "x").mkdir()
    before = files(tmp_path)
    with pytest.raises(StorageError, match="there is no run to resume"):
        RunDirectory.open(tmp_path / "x", resume=True)
    assert files(tmp_path) == before


@pytest.mark.faults
def test_open_when_a_start_died_before_run_json_then_it_can_be_started_again(tmp_path, in_child):
    def dies():
        RunDirectory.open(tmp_path / "x", resume=False).write_job("a", {})
        os.kill(os.getpid(), signal.SIGKILL)

    assert os.WIFSIGNALED(in_child(dies))
    start(tmp_path / "x")


@pytest.mark.parametrize("made", [False, True])
def test_close_when_no_run_was_written_then_the_path_is_as_it_was_found(tmp_path, files, made):
    if made:
        (tmp_path / "x" / "a").mkdir(parents=True)
        (tmp_path / "x" / "mine").write_text("mine")
    before = files(tmp_path)
    with RunDirectory.open(tmp_path / "x", resume=False) as run:
        run.write_job("a", {"name": "a"})
        run.write_job("b", {"name": "b"})
    assert files(tmp_path) == before


@pytest.mark.faults
@pytest.mark.parametrize("action", ["raise", "enospc"])
def test_start_when_any_operation_fails_then_nothing_is_left_of_it(tmp_path, files, action):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "mine").write_text("mine")
    before = files(tmp_path)
    for n in range(1, 100):
        faults.arm(FaultPlan(action, n))
        try:
            with RunDirectory.open(tmp_path / "runs" / "x", resume=False) as run:
                run.write_job("a", {"name": "a"})
                run.write_run(RunRecord(base_model="tiny"))
        except StorageError:
            assert files(tmp_path) == before
        else:
            break
        finally:
            faults.disarm()
    assert n == 27, "two directories made, two files written"
    assert (tmp_path / "runs" / "x" / "a" / "job.json").is_file()


def test_check_when_the_directory_is_in_use_then_reports_it_and_changes_nothing(tmp_path, files):
    RunDirectory.check(tmp_path / "x", resume=False)
    assert files(tmp_path) == {}
    with RunDirectory.open(tmp_path / "x", resume=False) as run:
        run.write_run(RunRecord())
        with pytest.raises(StorageError, match=f"is in use by process {os.getpid()}"):
            RunDirectory.check(tmp_path / "x", resume=False)
    before = files(tmp_path)
    with pytest.raises(StorageError, match="already holds a run"):
        RunDirectory.check(tmp_path / "x", resume=False)
    RunDirectory.check(tmp_path / "x", resume=True)
    assert files(tmp_path) == before
    with pytest.raises(StorageError, match="the name is too long"):
        RunDirectory.check(tmp_path / ("x" * 300), resume=False)


@pytest.mark.parametrize("path", ["file", "file/x", "file/x/y"])
def test_open_when_a_file_is_in_the_way_then_reports_it_and_keeps_it(tmp_path, files, path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(StorageError, match="is a file"):
        RunDirectory.open(tmp_path / path, resume=False)
    assert files(tmp_path) == {"file": b"mine"}


def test_open_when_not_writable_then_reports_it_and_leaves_nothing(files, in_child):
    # Not tmp_path: root ignores permissions, so the child becomes another user, who cannot enter pytest's directories.
    with tempfile.TemporaryDirectory() as name:
        top = Path(name)
        closed = [top, top / "closed", top / "run"]
        (top / "closed").mkdir()
        start(top / "run")
        (top / "run" / ".lock").chmod(0o666)
        before = files(top)

        def as_another_user():
            if os.getuid() == 0:
                os.setgid(65534)
                os.setuid(65534)
            for path, resume in (("closed", False), ("closed/a/b", False), ("new", False), ("run", True)):
                with pytest.raises(StorageError, match="not writable"):
                    RunDirectory.open(top / path, resume=resume)

        for path in closed:
            path.chmod(0o555)
        try:
            assert in_child(as_another_user) == 0
            assert files(top) == before
        finally:
            for path in closed:
                path.chmod(0o700)


OTHER = """
import sys
from weft.errors import StorageError
from weft.store.run_dir import RunDirectory
from weft.store.run_dir import RunRecord
assert "torch" not in sys.modules
try:
    RunDirectory.open(sys.argv[1], resume=sys.argv[2] == "resume")
except StorageError as error:
    print(error)
else:
    print("taken")
"""


def open_in_another_process(path, how) -> str:
    command = [sys.executable, "-c", OTHER, str(path), how]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=600).stdout.strip()


def test_open_when_another_process_has_it_then_it_is_named_until_it_closes(tmp_path):
    run = RunDirectory.open(tmp_path / "x", resume=False)
    in_use = f"{tmp_path / 'x'}: is in use by process {os.getpid()}. Wait for its end, or name another directory."
    assert open_in_another_process(tmp_path / "x", "new") == in_use
    run.write_run(RunRecord())
    assert open_in_another_process(tmp_path / "x", "resume") == in_use
    assert open_in_another_process(tmp_path / "x", "new") == in_use
    run.close()
    run.close()
    assert open_in_another_process(tmp_path / "x", "resume") == "taken"


def test_open_when_this_process_has_it_already_then_it_is_refused(tmp_path):
    with (
        RunDirectory.open(tmp_path / "x", resume=False),
        pytest.raises(StorageError, match=f"in use by process {os.getpid()}"),
    ):
        RunDirectory.open(tmp_path / "x", resume=False)


@pytest.mark.faults
def test_open_when_its_owner_was_killed_then_it_is_free(tmp_path, in_child):
    def owner():
        RunDirectory.open(tmp_path / "x", resume=False).write_run(RunRecord())
        os.kill(os.getpid(), signal.SIGKILL)

    assert os.WIFSIGNALED(in_child(owner))
    RunDirectory.open(tmp_path / "x", resume=True).close()


def test_open_when_a_crash_left_temporaries_then_they_are_gone_and_other_files_stay(tmp_path, files):
    start(tmp_path / "x")
    with RunDirectory.open(tmp_path / "x", resume=True) as run:
        run.job_dir("a")
        (run.checkpoints_dir("a") / "step-00000001").mkdir(parents=True)
    before = files(tmp_path)
    owner = before.pop("x/.owner-2")
    for folder in ("x", "x/a", "x/a/checkpoints"):
        (tmp_path / folder / f"{TEMP_PREFIX}1").write_text("torn")
        (tmp_path / folder / f"{TEMP_PREFIX}2").mkdir()
        (tmp_path / folder / f"{TEMP_PREFIX}2" / "f").write_text("torn")
    (tmp_path / "x/a/checkpoints/step-00000001").rename(tmp_path / f"x/a/checkpoints/{TEMP_PREFIX}aside-step-00000001")
    RunDirectory.open(tmp_path / "x", resume=True).close()
    after = files(tmp_path)
    assert after.pop("x/.owner-3") != owner
    assert after == before


@pytest.mark.faults
@pytest.mark.parametrize("action", ["raise", "enospc"])
def test_open_when_any_operation_fails_then_no_new_file_or_directory_is_left(tmp_path, files, action):
    for n in range(1, 100):
        faults.arm(FaultPlan(action, n))
        try:
            run = RunDirectory.open(tmp_path / "runs" / "deep" / "x", resume=False)
        except StorageError:
            assert files(tmp_path) == {}
        else:
            run.close()
            break
        finally:
            faults.disarm()
    assert n == 13, "three directories, each made and synced, with a point before and after"


@pytest.mark.faults
def test_open_when_the_lock_cannot_be_written_then_nothing_is_left(tmp_path, files, in_child):
    def work():
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        with pytest.raises(StorageError, match="file size limit"):
            RunDirectory.open(tmp_path / "x", resume=False)

    assert in_child(work) == 0
    assert files(tmp_path) == {}


@pytest.fixture
def run(tmp_path):
    with RunDirectory.open(tmp_path / "x", resume=False) as opened:
        opened.write_run(RunRecord())
        yield opened


def test_status_when_written_then_it_is_read_back(run):
    assert run.read_status("a") is None
    assert not (run.path / "a").exists(), "reading makes nothing"
    for state in JobState:
        run.write_status("a", state, reason=Reason(ReasonCode.STORAGE, "because"), step=3, loss=math.nan)
        why = {"reason": "because", "reason_code": "storage"}
        assert run.read_status("a") == {"state": state, **why, "step": 3, "loss": None}
    run.write_status("a", JobState.RUNNING)
    assert run.read_status("a") == {"state": "running", "reason": None, "reason_code": None}


def test_status_when_damaged_then_reports_it(run):
    run.write_status("a", JobState.RUNNING)
    (run.path / "a" / "status.json").write_text("{")
    with pytest.raises(StorageError, match=r"status\.json: is not valid JSON"):
        run.read_status("a")


@pytest.mark.faults
def test_status_when_killed_anywhere_then_it_is_the_old_or_the_new_one(tmp_path, in_child):
    seen = []
    for n in range(1, 100):
        with RunDirectory.open(tmp_path / "x", resume=n > 1) as run:
            run.write_run(RunRecord())
            run.write_status("a", JobState.RUNNING, step=1)

        def work(n=n):
            with RunDirectory.open(tmp_path / "x", resume=True) as run:
                faults.arm(FaultPlan("kill", n))
                run.write_status("a", JobState.SUCCEEDED, step=2)

        if not os.WIFSIGNALED(in_child(work)):
            break
        with RunDirectory.open(tmp_path / "x", resume=True) as run:
            seen.append(run.read_status("a")["state"])
            assert sorted(p.name for p in (run.path / "a").iterdir()) == ["status.json"]
    assert seen == sorted(seen)
    assert set(seen) == {"running", "succeeded"}


def test_job_when_written_then_it_is_read_back(run):
    assert run.read_job("a") is None
    run.write_job("a", {"name": "a", "learning_rate": 1e-4})
    assert run.read_job("a") == {"name": "a", "learning_rate": 1e-4}
    assert run.adapter_dir("a") == run.path / "a" / "adapter"


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "/a", ".lock", "run.json", "report.html", "timeline.json", "a\n"]
)
def test_job_dir_when_the_name_could_leave_or_spoil_the_directory_then_it_is_refused(run, files, name):
    before = files(run.path)
    with pytest.raises(StorageError, match="cannot be the name"):
        run.job_dir(name)
    assert files(run.path) == before


def test_metrics_when_appended_then_each_is_one_line_of_strict_json(run):
    run.append_metrics("a", {"step": 1, "loss": 0.5})
    run.append_metrics("a", {"step": 2, "loss": math.nan, "text": "two\nlines"})
    assert metrics(run, "a") == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": None, "text": "two\nlines"}]


@pytest.mark.faults
def test_metrics_when_the_disk_is_full_then_no_part_of_a_line_is_left(run, in_child):
    run.append_metrics("a", {"step": 1})
    before = run.metrics_path("a").read_bytes()
    for n in (1, 2):
        faults.arm(FaultPlan("enospc", n, "metrics.append"))
        with pytest.raises(StorageError, match="the disk is full"):
            run.append_metrics("a", {"step": 2})
        faults.disarm()
        assert run.metrics_path("a").read_bytes() == before

    def limited():
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 5, resource.RLIM_INFINITY))
        with pytest.raises(StorageError):
            run.append_metrics("a", {"step": 2})

    assert in_child(limited) == 0
    assert run.metrics_path("a").read_bytes() == before


@pytest.mark.parametrize("tail", [b"", b'{"step": 4, "lo', b'{"step": 2}', b"\xff\xfe\n", b"\0" * 40, b"[]\n", b"\n"])
def test_truncate_metrics_when_resuming_then_later_and_torn_lines_are_gone(run, tail):
    for step in (1, 2, 3, 3):
        run.append_metrics("a", {"step": step})
    run.append_metrics("a", {"event": "no step"})
    with run.metrics_path("a").open("ab") as file:
        file.write(tail)
    run.truncate_metrics("a", 2)
    assert metrics(run, "a") == [{"step": 1}, {"step": 2}, {"event": "no step"}]
    run.append_metrics("a", {"step": 3})
    assert metrics(run, "a")[-1] == {"step": 3}


def test_truncate_metrics_when_there_is_nothing_to_drop_then_the_file_is_not_touched(run):
    run.truncate_metrics("none", 3)
    assert not run.metrics_path("none").exists()
    run.append_metrics("a", {"step": 1})
    inode = run.metrics_path("a").stat().st_ino
    run.truncate_metrics("a", 1)
    assert run.metrics_path("a").stat().st_ino == inode


@pytest.mark.faults
def test_truncate_metrics_when_any_operation_fails_then_the_file_is_old_or_new(run):
    old = b'{"step": 1}\n{"step": 2}\n{"st'
    new = b'{"step": 1}\n'
    run.job_dir("a")
    for n in range(1, 100):
        run.metrics_path("a").write_bytes(old)
        faults.arm(FaultPlan("raise", n))
        try:
            run.truncate_metrics("a", 1)
        except StorageError:
            assert run.metrics_path("a").read_bytes() in (old, new)
        else:
            break
        finally:
            faults.disarm()
    assert run.metrics_path("a").read_bytes() == new
    assert n == 10
