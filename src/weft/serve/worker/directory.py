"""A worker's own directory: each worker process has a run directory, with one directory in it for each claim.

work/<worker>/<job>.<fence>/    as in any run directory: checkpoints/, adapter/, metrics.jsonl; and data/, the files

No other process writes there, so a worker that was given up and wakes up again does no harm: the job's new worker
copies the newest sound checkpoint once, into a directory of its own. All of it may be lost: results are in the file
store, as are checkpoints for other machines, and a job without a checkpoint starts again and ends with the same bytes.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from weft.data.prepared.cache import EntryInfo, PreparedCache
from weft.errors import StorageError
from weft.job_state import FINAL_STATES
from weft.serve.db.engine import Database
from weft.serve.db.files import file_is_needed
from weft.serve.db.leases import give_up
from weft.serve.db.tables import FILES, JOBS
from weft.serve.db.workers import remove_worker
from weft.store import json_text
from weft.store.atomic import storage_errors
from weft.store.checkpoint import Checkpoint, latest_checkpoint, save_checkpoint
from weft.store.run_dir import RunDirectory, RunRecord


class WorkDirectory:
    """The directory of one worker, from which it can also read those of the others."""

    def __init__(self, data_dir: Path, worker: str, base_model: str) -> None:
        self.home = data_dir
        """The data directory of the service, which the workers of one machine share."""
        self._all = data_dir / "work"
        with storage_errors(self._all):
            self._all.mkdir(parents=True, exist_ok=True)
        self.run = RunDirectory.open(self._all / worker, resume=False)
        self.run.write_run(RunRecord(run_name=worker, base_model=base_model))

    def close(self) -> None:
        """Gives the directory up, so that other workers may clean it up."""
        self.run.close()

    def data_dir(self, name: str) -> Path:
        path = self.run.job_dir(name) / "data"
        with storage_errors(path):
            path.mkdir(exist_ok=True)
        return path

    def adopt(self, name: str, job: str) -> int | None:
        """Copies the newest checkpoint that any worker wrote of a job to a claim; returns its step, or None."""
        found: tuple[Checkpoint, Path] | None = None
        for directory in self._all.glob(f"*/{job}.*"):
            checkpoint, _ = latest_checkpoint(directory / "checkpoints")
            if checkpoint is not None and (found is None or checkpoint.step > found[0].step):
                found = checkpoint, directory
        if found is None:
            return None
        checkpoint, directory = found
        if directory != self.run.path / name:
            save_checkpoint(self.run.checkpoints_dir(name), checkpoint, keep=1)
            # Lines are written before the checkpoint they belong to; the engine drops those of later steps.
            with storage_errors(directory), contextlib.suppress(FileNotFoundError):
                shutil.copyfile(directory / "metrics.jsonl", self.run.metrics_path(name))
        return checkpoint.step

    def metrics(self, name: str, step: int) -> list[dict[str, Any]]:
        """Returns the metrics of a claim up to a step, in order; those of later steps are removed."""
        self.run.truncate_metrics(name, step)
        path = self.run.metrics_path(name)
        return [json_text.parse(line) for line in path.read_bytes().splitlines()] if path.exists() else []

    def drop(self, name: str) -> None:
        shutil.rmtree(self.run.path / name, ignore_errors=True)

    def drop_job(self, job: str) -> None:
        for claim in self.run.path.glob(f"{job}.*"):
            self.drop(claim.name)

    def abandoned(self) -> list[str]:
        """Returns the workers that have a directory here but whose process is gone."""
        return [worker.name for worker in sorted(self._all.iterdir()) if worker != self.run.path and _is_free(worker)]

    def remove_finished(self, is_over: Callable[[str], bool]) -> None:
        """Removes the files of jobs that are over, here and in directories in which no process works now."""
        for worker in sorted(self._all.iterdir()):
            if worker == self.run.path:
                _remove_finished_claims(worker, is_over)
            elif _is_free(worker) and not _remove_finished_claims(worker, is_over):
                shutil.rmtree(worker, ignore_errors=True)


def clean_up_after_dead_workers(database: Database, work: WorkDirectory) -> None:
    """Ends the leases of workers whose process is gone, and removes their files of jobs that are over."""
    gone = work.abandoned()
    if gone:
        with database.begin() as tx:
            for worker in gone:
                give_up(tx, worker)
                remove_worker(tx, worker)
    work.remove_finished(lambda job: _is_over(database, job))


def _is_over(database: Database, job: str) -> bool:
    with database.read() as tx:
        status = tx.execute(sa.select(JOBS.c.status).where(JOBS.c.id == job)).scalar_one_or_none()
    return status in (None, *FINAL_STATES)


def _remove_finished_claims(worker: Path, is_over: Callable[[str], bool]) -> int:
    """Removes claims of jobs that are over; returns how many are left."""
    left = 0
    for claim in list(_claims(worker)):
        if is_over(claim.name.rpartition(".")[0]):
            shutil.rmtree(claim, ignore_errors=True)
        else:
            left += 1
    return left


def _is_free(worker: Path) -> bool:
    """Whether no process works in a directory any more; a process that has only just begun counts as working."""
    try:
        RunDirectory.check(worker, resume=True)
    except StorageError:
        return False
    return True


def _claims(worker: Path) -> Iterator[Path]:
    with contextlib.suppress(OSError):
        yield from (path for path in sorted(worker.iterdir()) if path.is_dir() and "." in path.name.strip("."))


EVERY_S = 60.0
FILE_ID = "file-"
"""How the ids of files begin."""


class PreparedGc:
    """Looks once a minute whether files are gone of which something is kept."""

    def __init__(self, database: Database, cache: PreparedCache | None) -> None:
        self._database, self._cache = database, cache
        self._due = 0.0

    def run_if_due(self) -> None:
        """Removes what has to go if the last time was a minute ago."""
        if self._cache is not None and time.monotonic() >= self._due:
            forget_deleted_files(self._database, self._cache)
            self._due = time.monotonic() + EVERY_S


def forget_deleted_files(database: Database, cache: PreparedCache) -> int:
    """Removes the entries of files that no job needs any more; returns how many there were."""
    made_of = {file for entry in cache.entries() for file in _files(entry)}
    if not made_of:
        return 0
    with database.read() as tx:
        query = sa.select(FILES.c.id).where(FILES.c.id.in_(made_of), file_is_needed(tx))
        needed = set(tx.execute(query).scalars())
    return cache.forget(lambda entry: not needed.issuperset(_files(entry)))


def _files(entry: EntryInfo) -> list[str]:
    """The files of the service that an entry was made of; others may be in the same cache."""
    return [Path(source).stem for source in entry.sources if source.startswith(FILE_ID)]
