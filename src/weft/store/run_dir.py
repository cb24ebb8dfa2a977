"""The directory of a run: one owner at a time, and every file in it whole.

runs/x/
  .lock                 held while a process works here
  .owner-<n>            the run's n-th owner, for processes of other machines; see owner
  run.json              the resolved run and the library versions; its presence means the directory holds a run
  timeline.json         what ran when
  time.json             time by activity, over all sessions
  report.html
  <job>/job.json        the resolved job
  <job>/status.json     {"state": ..., "reason": ..., "reason_code": ..., ...}
  <job>/metrics.jsonl   one line per logged step
  <job>/checkpoints/    see checkpoint
  <job>/adapter/        see peft_files

In a run of several ranks (`RankDirectory`) a rank writes the files of its jobs, the owner all others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import platform
import secrets
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from weft import __version__
from weft.errors import StorageError
from weft.job_state import JobState, Reason
from weft.spec.job import JOB_NAME
from weft.spec.run import Capacity
from weft.store import json_text
from weft.store.atomic import (
    add_guard,
    append_line,
    forget,
    make_directories,
    make_directory,
    remove_leftovers,
    storage_errors,
    write_file,
)
from weft.store.owner import LOCK, RANKS_LOCK, Owner, Ownership, lock_file, take_lock, wait_for_ranks
from weft.store.wall_clock import TimeSplit

_RUN, _TIMELINE, _TIME, _REPORT = "run.json", "timeline.json", "time.json", "report.html"
PERMIT = ".permit-"
"""Prefix of the files that let ranks write."""
_JOB, _STATUS, _METRICS = "job.json", "status.json", "metrics.jsonl"


class RunFiles:
    """The files of a run, to read; another process may be training there."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def checkpoints_dir(self, name: str) -> Path:
        return self._job_path(name) / "checkpoints"

    def adapter_dir(self, name: str) -> Path:
        return self._job_path(name) / "adapter"

    def read_run(self) -> RunRecord:
        result = _read_json(self.path / _RUN)
        if result is None:
            raise StorageError("is missing.", where=str(self.path / _RUN))
        return RunRecord.from_json(result)

    def read_time(self) -> TimeSplit | None:
        """The recorded times; None if they cannot be read, since no run ends because of that."""
        try:
            return TimeSplit.from_json(_read_json(self.path / _TIME))
        except StorageError:
            return None

    def recorded_jobs(self) -> list[str]:
        return sorted(path.parent.name for path in self.path.glob(f"*/{_JOB}"))

    def read_job(self, name: str) -> dict[str, Any] | None:
        return _read_json(self._job_path(name) / _JOB)

    def read_status(self, name: str) -> dict[str, Any] | None:
        """The status of one job; None before the first `write_status`, or where a machine died during it."""
        path = self._job_path(name) / _STATUS
        with storage_errors(path):
            is_empty = path.exists() and path.stat().st_size == 0
        return None if is_empty else _read_json(path)

    def metrics_path(self, name: str) -> Path:
        return self._job_path(name) / _METRICS

    def _job_path(self, name: str) -> Path:
        if not JOB_NAME.fullmatch(name) or name in (_RUN, _TIMELINE, _TIME, _REPORT):
            raise StorageError(f"{name!r} cannot be the name of a job's directory.", where=str(self.path))
        return self.path / name


class RunDirectory(RunFiles):
    """An open run directory, locked against other processes until it is closed. If it is closed before `write_run`, its
    former contents are restored."""

    def __init__(self, path: Path, lock: int, ownership: Ownership, undo: contextlib.ExitStack) -> None:
        super().__init__(path)
        self._ownership = ownership
        self._lock: int | None = lock
        self._undo = undo
        """Removes what was made, the lock last, while the directory holds no run."""
        self._holds_run = (path / _RUN).exists()

    @classmethod
    def open(cls, path: str | Path, *, resume: bool) -> RunDirectory:
        """Opens a directory for a new run, or for the run it holds; leaves no trace if that is not possible."""
        root = Path(path)
        with storage_errors(root), contextlib.ExitStack() as undo:
            # An existing lock is tried first: "in use" is the better answer while another process works there.
            lock = take_lock(root, undo) if (root / LOCK).is_file() else None
            _refuse(root, resume)
            if lock is None:
                make_directories(root, undo)
                lock = take_lock(root, undo)
                # Another process may have come and gone since the first look.
                _refuse(root, resume)
            ownership = Ownership.claim(root)
            undo.callback(ownership.withdraw)
            wait_for_ranks(root)
            _heal(root)
            return cls(root, lock, ownership, undo.pop_all())

    @staticmethod
    def holds_run(path: str | Path) -> bool:
        return (Path(path) / _RUN).exists()

    @staticmethod
    def check(path: str | Path, *, resume: bool, content: str = "run") -> None:
        """Raises the errors of `open` for a directory in the wrong state, and changes nothing. Errors call the run
        `content`."""
        root = Path(path)
        with storage_errors(root), contextlib.ExitStack() as release:
            if (root / LOCK).is_file():
                take_lock(root, release)
            _refuse(root, resume, content)

    @staticmethod
    def check_writable(path: str | Path) -> None:
        """StorageError if the directory cannot be made or written; it is made for the check, and removed again."""
        root = Path(path)
        with storage_errors(root), contextlib.ExitStack() as undo:
            make_directories(root, undo)
            tempfile.TemporaryFile(dir=root).close()

    def close(self) -> None:
        if self._lock is not None and self._holds_run:
            self._ownership.release()
            os.close(self._lock)
        elif self._lock is not None:
            self._undo.close()
        self._lock = None

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def owner(self) -> Owner:
        return self._ownership.owner

    def check_owned(self) -> None:
        self._ownership.check()

    @property
    def timeline_path(self) -> Path:
        return self.path / _TIMELINE

    def job_dir(self, name: str) -> Path:
        """The directory of one job, made when it is first used."""
        path = self._job_path(name)
        if not self._holds_run and not path.exists():
            self._undo.callback(forget, path.rmdir)
        make_directory(path)
        return path

    def write_run(self, run: RunRecord) -> None:
        """Records the resolved run and the library versions; from now on the directory holds a run."""
        self._write_new(self.path / _RUN, dataclasses.replace(run, versions=library_versions()).to_json())
        self._holds_run = True

    def write_time(self, split: TimeSplit) -> None:
        _write_json(self.path / _TIME, split.to_json())

    def write_job(self, name: str, job: Mapping[str, Any]) -> None:
        self._write_new(self.job_dir(name) / _JOB, dict(job))

    def write_status(self, name: str, state: JobState, *, reason: Reason | None = None, **fields: Any) -> None:
        """Replaces the status of one job. While the job trains its checkpoints count, and this does not wait for the
        disk."""
        text, code = (None, None) if reason is None else (reason.text, reason.code.value)
        known = {"state": state.value, "reason": text, "reason_code": code, **fields}
        _write_json(self.job_dir(name) / _STATUS, known, durable=state is not JobState.RUNNING)

    def append_metrics(self, name: str, record: Mapping[str, Any]) -> None:
        """Adds one line; it survives the death of the process. NaN and infinity become null."""
        path = self.job_dir(name) / _METRICS
        line = json.dumps(json_text.finite(dict(record)), allow_nan=False).encode() + b"\n"
        append_line(path, line, "metrics.append")

    def heal_job(self, name: str) -> None:
        """Finishes or undoes what a dead rank left unfinished of a job."""
        _heal_job(self._job_path(name))

    def truncate_metrics(self, name: str, step: int) -> None:
        """Drops the lines of later steps and an incomplete line, so that a resumed job repeats none."""
        path = self.metrics_path(name)
        with storage_errors(path):
            old = path.read_bytes() if path.exists() else b""
        new = b"".join(line for line in old.splitlines(keepends=True) if _belongs(line, step))
        if new != old:
            write_file(path, new)

    def _write_new(self, path: Path, value: dict[str, Any]) -> None:
        """Writes a file that is removed if the run is never recorded."""
        if not self._holds_run and not path.exists():
            self._undo.callback(forget, path.unlink)
        _write_json(path, value)


def refuse_mismatch(where: str, holds_run: bool, resume: bool, content: str) -> None:
    """StorageError if there is no run to resume, or one where none is expected."""
    if resume and not holds_run:
        raise StorageError(f"there is no {content} to resume.", where=where, hint="Leave out --resume to start one.")
    if holds_run and not resume:
        hint = "Use --resume to go on with it, or another --out."
        raise StorageError(f"already holds a {content}.", where=where, hint=hint)


def _refuse(root: Path, resume: bool, content: str = "run") -> None:
    """Raises if the directory cannot be opened as requested; changes nothing."""
    if root.exists() and not root.is_dir():
        raise StorageError("is a file; name a directory.", where=str(root))
    refuse_mismatch(str(root), RunDirectory.holds_run(root), resume, content)
    existing = next(path for path in (root, *root.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise StorageError(f"{existing} is a file; a directory is needed there.", where=str(root))
    if not os.access(existing, os.W_OK | os.X_OK):
        raise StorageError(f"{existing} is not writable.", where=str(root))


def _heal(root: Path) -> None:
    """Finishes or undoes unfinished changes of a killed process."""
    for permit in root.glob(f"{PERMIT}*"):
        permit.unlink(missing_ok=True)
    remove_leftovers(root)
    for job in sorted(root.iterdir()):
        if job.is_dir() and not job.is_symlink():
            _heal_job(job)


def _heal_job(job: Path) -> None:
    for directory in (job, job / "checkpoints"):
        if directory.is_dir():
            remove_leftovers(directory)


def _belongs(line: bytes, step: int) -> bool:
    if not line.endswith(b"\n"):
        return False
    try:
        record = json_text.parse(line)
    except ValueError:
        return False
    return isinstance(record, dict) and not (isinstance(record.get("step"), int) and record["step"] > step)


def _write_json(path: Path, value: dict[str, Any], *, durable: bool = True) -> None:
    write_file(path, json_text.dump(json_text.finite(value)), durable=durable)


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageError(f"cannot be read ({error.strerror}).", where=str(path)) from None
    try:
        value = json_text.parse(data)
    except ValueError as error:
        raise StorageError(f"is not valid JSON: {error}.", where=str(path)) from None
    if not isinstance(value, dict):
        raise StorageError("does not hold a JSON object.", where=str(path))
    return value


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """The contents of run.json; fields that were unknown when it was written are left out of the file."""

    run_name: str | None = None
    base_model: str | None = None
    device: str | None = None
    dtype: str | None = None
    quantize: str | None = None
    kernels: str | None = None
    """Execution path: `reference` or `fused`."""
    capacity: Capacity | None = None
    layouts: tuple[str, ...] = ()
    """Layouts it was trained in, in order, in the notation of `--layout`; stages:1 is one device. Earlier versions
    wrote replicas:N for N replicas with an engine each."""
    jobs: tuple[str, ...] = ()
    started_at: str | None = None
    template_clock: str | None = None
    """Time for the run's chat templates, also after a resume: when it began, in local time."""
    template_digest: str | None = None
    versions: Mapping[str, str] | None = None
    """Versions of the libraries by name; `write_run` fills them in."""

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> RunRecord:
        """The record as any version of Weft wrote it."""
        names = [field.name for field in dataclasses.fields(cls)]
        known = {name: value[name] for name in names if name in value}
        return cls(**{**known, "layouts": tuple(value.get("layouts", ())), "jobs": tuple(value.get("jobs", ()))})

    def in_layout(self, layout: str) -> RunRecord:
        """The same run, continued in a layout."""
        return self if self.layouts[-1:] == (layout,) else dataclasses.replace(self, layouts=(*self.layouts, layout))

    def to_json(self) -> dict[str, Any]:
        known = {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
        return known if self.layouts else {name: value for name, value in known.items() if name != "layouts"}


def library_versions() -> dict[str, str]:
    """Versions of Python and of the libraries that numbers depend on, without importing them."""
    versions = {"weft": __version__, "python": platform.python_version()}
    for package in ("torch", "transformers", "safetensors", "numpy"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions


class RankDirectory(RunDirectory):
    def __init__(self, path: Path, rank: int, owner: Owner, permit: Path) -> None:
        """Writes as long as the owner leaves the permit there. StorageError if this is not the directory that the owner
        has, such as on a machine that does not share it."""
        ownership = Ownership.join(path, owner, f"rank {rank}")
        with storage_errors(path):
            lock = os.open(path / RANKS_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            lock_file(lock, fcntl.LOCK_SH)
        super().__init__(path, lock, ownership, contextlib.ExitStack())
        self._holds_run = True
        self._rank = rank
        self._permit = permit
        self._unguard = add_guard(path, self._check_permit)

    def close(self) -> None:
        self._ownership.leave()
        self._unguard()
        if self._lock is not None:
            os.close(self._lock)
        self._lock = None

    def _check_permit(self) -> None:
        try:
            # Opened, because only then does a network file system query its server.
            self._permit.open("rb").close()
        except FileNotFoundError:
            gone = "the run goes on without this rank, which writes nothing more there"
            raise StorageError(f"{gone}.", where=str(self.path)) from None

    @property
    def timeline_path(self) -> Path:
        return self.path / f".timeline-{self._rank}.json"

    def write_time(self, split: TimeSplit) -> None: ...

    def read_time(self) -> TimeSplit | None:
        return None


def grant_permit(path: Path) -> Path:
    """Lets one more rank write into a run directory; the file represents that."""
    permit = path / f"{PERMIT}{secrets.token_hex(8)}"
    with storage_errors(path):
        permit.touch()
    return permit


def revoke_permit(permit: Path | None) -> None:
    """Ends a rank's right to write, wherever it is."""
    if permit is not None:
        with contextlib.suppress(OSError):
            permit.unlink()


def take_timelines(path: Path, first_bands: Mapping[int, int]) -> list[Any]:
    """The spans of all ranks, which are removed there; `first_bands`: the number of each rank's first band."""
    events: list[Any] = []
    for part in sorted(path.glob(".timeline-*.json")):
        rank = int(part.stem.rpartition("-")[2])
        found = json.loads(part.read_bytes())["traceEvents"]
        events += [{**event, "pid": event["pid"] + first_bands.get(rank, rank)} for event in found]
        part.unlink()
    return events
