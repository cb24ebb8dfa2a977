"""A worker's own directory: one run directory per process, one directory per claim in it.

work/<worker>/<job>.<fence>/    as in any run directory: checkpoints/, adapter/, metrics.jsonl; and data/, the files

Nobody else ever writes there, so a worker that was given up and wakes up again disturbs nobody: the job's new worker
reads the newest sound checkpoint once, into a directory of its own. All of it may be lost: results are in the file
store, and a job without a checkpoint starts again and ends with the same bytes.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from weft.errors import StorageError
from weft.store import json_text
from weft.store.atomic import storage_errors
from weft.store.checkpoint import Checkpoint, latest_checkpoint, save_checkpoint
from weft.store.run_dir import RunDirectory, RunRecord


class WorkDirectory:
    """The directory of one worker, and the way to those of the others."""

    def __init__(self, data_dir: Path, worker: str, base_model: str) -> None:
        self._all = data_dir / "work"
        with storage_errors(self._all):
            self._all.mkdir(parents=True, exist_ok=True)
        self.run = RunDirectory.open(self._all / worker, resume=False)
        self.run.write_run(RunRecord(run_name=worker, base_model=base_model))

    def close(self) -> None:
        """Lets others clean up what is left here."""
        self.run.close()

    def data_dir(self, name: str) -> Path:
        """Where the files of a claim go."""
        path = self.run.job_dir(name) / "data"
        with storage_errors(path):
            path.mkdir(exist_ok=True)
        return path

    def adopt(self, name: str, job: str) -> int | None:
        """Brings the newest checkpoint any worker here has written of a job; its step, or None if there is none."""
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
        """The metrics of a claim up to a step, in order."""
        self.run.truncate_metrics(name, step)
        path = self.run.metrics_path(name)
        return [json_text.parse(line) for line in path.read_bytes().splitlines()] if path.exists() else []

    def drop(self, name: str) -> None:
        """Removes what is left of a claim."""
        shutil.rmtree(self.run.path / name, ignore_errors=True)

    def drop_job(self, job: str) -> None:
        """Removes what is left here of a job that is over, earlier claims included."""
        for claim in self.run.path.glob(f"{job}.*"):
            self.drop(claim.name)

    def abandoned(self) -> list[str]:
        """Workers that worked here and whose process is gone, however it went."""
        return [worker.name for worker in sorted(self._all.iterdir()) if worker != self.run.path and _is_free(worker)]

    def sweep(self, held: Iterable[str], is_over: Callable[[str], bool]) -> None:
        """Removes what nobody needs any more: of jobs that are over, here and where no process works now."""
        keep = set(held)
        for worker in sorted(self._all.iterdir()):
            if worker == self.run.path:
                self._sweep_jobs(worker, keep, is_over)
                continue
            if _is_free(worker) and not self._sweep_jobs(worker, set(), is_over):
                shutil.rmtree(worker, ignore_errors=True)

    def _sweep_jobs(self, worker: Path, keep: set[str], is_over: Callable[[str], bool]) -> int:
        """Removes claims of jobs that are over; returns how many are left."""
        left = 0
        for claim in list(_claims(worker)):
            if claim.name in keep or not is_over(claim.name.rpartition(".")[0]):
                left += 1
            else:
                shutil.rmtree(claim, ignore_errors=True)
        return left


def _is_free(worker: Path) -> bool:
    """Whether no process works there any more; one that has only just begun to does."""
    try:
        RunDirectory.check(worker, resume=True)
    except StorageError:
        return False
    return True


def _claims(worker: Path) -> Iterator[Path]:
    with contextlib.suppress(OSError):
        yield from (path for path in sorted(worker.iterdir()) if path.is_dir() and "." in path.name.strip("."))
