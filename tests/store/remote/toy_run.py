"""A run in a few lines that writes all that a real one writes, and goes on from its last checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from fsspec import register_implementation
from fsspec.implementations.memory import MemoryFileSystem

from weft.job_state import JobState
from weft.store.atomic import staged_directory, write_unsynced
from weft.store.checkpoint import Checkpoint, latest_checkpoint, save_checkpoint
from weft.store.run_dir import RunDirectory, RunRecord

NUM_STEPS = 4
URL = "fragile://bucket/run1"


class AwayError(Exception):
    """As libraries of object stores raise: no OSError."""


class KilledError(BaseException):
    """The process is gone from one moment to the next."""


class FragileStore(MemoryFileSystem):
    """Objects in memory; every change of one is counted, and may be the last thing that its process does."""

    protocol = "fragile"

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.replace("fragile://", "memory://"))

    store: dict = {}  # noqa: RUF012
    pseudo_dirs = [""]  # noqa: RUF012
    num_changes = 0
    dies_at: int | None = None
    is_away = False

    @classmethod
    def reset(cls) -> None:
        cls.store.clear()
        cls.num_changes, cls.dies_at, cls.is_away = 0, None, False

    @classmethod
    def change(cls) -> None:
        """Before and after each change: a process dies on either side of it, and then changes nothing more."""
        if cls.is_away:
            raise AwayError("the store is away")
        cls.num_changes += 1
        if cls.dies_at is not None and cls.num_changes >= cls.dies_at:
            raise KilledError

    def pipe_file(self, path, value, mode="overwrite", **options):
        self.change()
        super().pipe_file(path, value, mode=mode, **options)
        self.change()

    def put_file(self, lpath, rpath, **options):
        self.pipe_file(rpath, Path(lpath).read_bytes())

    def rm_file(self, path):
        self.change()
        super().rm_file(path)
        self.change()

    def ls(self, path, detail=True, **options):
        if self.is_away:
            raise AwayError("the store is away")
        return super().ls(path, detail=detail, **options)


register_implementation("fragile", FragileStore, clobber=True)


def tensors(step: int) -> dict[str, torch.Tensor]:
    """What a job has learnt after some steps."""
    return {"params.a": torch.arange(4.0) * step}


def train(path: Path, *, resume: bool, after_step: Callable[[], object] = lambda: None) -> None:
    """A job of four steps with a checkpoint every other step, of which one is kept."""
    with RunDirectory.open(path, resume=resume) as run:
        run.write_job("a", {"name": "a"})
        run.write_run(RunRecord(base_model="toy", jobs=("a",)))
        if (run.read_status("a") or {}).get("state") != JobState.SUCCEEDED:
            _train_job(run, "a", after_step)


def _train_job(run: RunDirectory, name: str, after_step: Callable[[], object]) -> None:
    checkpoint, rejected = latest_checkpoint(run.checkpoints_dir(name))
    assert not rejected
    done = 0 if checkpoint is None else checkpoint.step
    run.truncate_metrics(name, done)
    for step in range(done + 1, NUM_STEPS + 1):
        run.append_metrics(name, {"step": step, "loss": 1 / step})
        run.write_status(name, JobState.RUNNING, step=step)
        after_step()
        if step % 2 == 0:
            saved = Checkpoint(step, tensors(step), {"step": step}, {})
            save_checkpoint(run.checkpoints_dir(name), saved, keep=1)
            after_step()
    with staged_directory(run.adapter_dir(name)) as staged:
        write_unsynced(staged / "adapter_model.safetensors", bytes(str(tensors(NUM_STEPS)), "ascii"))
        write_unsynced(staged / "adapter_config.json", b"{}")
    after_step()
    run.write_status(name, JobState.SUCCEEDED, step=NUM_STEPS)
    after_step()


def files(path: Path) -> dict[str, bytes]:
    """All files of a run, less those that are a machine's own."""
    found = {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}
    return {name: data for name, data in found.items() if not name.startswith(".")}


def remote_files() -> dict[str, bytes]:
    """All files at the URL, except those that name its owner."""
    prefix = "/bucket/run1/"
    found = {path.removeprefix(prefix): bytes(file.getvalue()) for path, file in FragileStore.store.items()}
    return {name: data for name, data in found.items() if not name.startswith(".owner-")}


def check_complete(found: dict[str, bytes]) -> None:
    """What lies behind a URL speaks of nothing that is not there."""
    status = json.loads(found.get("a/status.json", b"{}"))
    if status.get("state") == "succeeded":
        assert {"a/adapter/adapter_config.json", "a/adapter/adapter_model.safetensors"} <= found.keys()
    steps = [name.split("/")[2] for name in found if name.startswith("a/checkpoints/") and name.endswith("/state.json")]
    for step in steps:
        assert f"a/checkpoints/{step}/tensors.safetensors" in found
        assert found["a/metrics.jsonl"].count(b"\n") >= int(step.removeprefix("step-"))
    if status.get("step", 0) > 2:
        assert steps, "there is something to go on from"
