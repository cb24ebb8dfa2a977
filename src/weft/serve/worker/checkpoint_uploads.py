"""Keeps the newest training checkpoint of each job in the file store, so that a worker elsewhere can go on from it.

Workers that share a data directory find each other's checkpoints there. One on another machine finds the archive that
the job's row names (`saved_blob`): state and tensors of the checkpoint, and the metrics up to it. It is written beside
training, one at a time; of a job that saves faster than the store takes it, only the newest is copied. A store or
database that is away costs the copy and nothing else. The row is changed under the job's fence, so a worker that has
lost the job cannot put an older checkpoint in the place of a newer one.
"""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import logging
import shutil
import threading
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from weft.engine.events import CheckpointSaved, JobSucceeded, own_metrics
from weft.errors import CheckpointError, StorageError, WeftError
from weft.job_state import FINAL_STATES
from weft.serve.blobs import Blobs, unpack
from weft.serve.db.engine import Database, DbRow
from weft.serve.db.files import discard
from weft.serve.db.tables import JOBS
from weft.serve.errors import Damaged, NotFound, Unsure
from weft.serve.worker.claim import Claim, EngineNotice, StoredResult
from weft.serve.worker.directory import WorkDirectory
from weft.store import json_text
from weft.store.atomic import storage_errors
from weft.store.checkpoint import STATE_FILE, TENSORS_FILE, load_checkpoint, save_checkpoint

LOG = logging.getLogger("weft.serve.worker")
METRICS_FILE = "metrics.jsonl"


class CheckpointUploads:
    def __init__(self, database: Database, blobs: Blobs, work: WorkDirectory) -> None:
        self._database, self._blobs, self._work = database, blobs, work
        # Workers that read a store inside the data directory also read the checkpoints there.
        self._is_needed = not blobs.is_within(work.home)
        self._waiting: dict[str, tuple[Claim, int]] = {}
        """The newest checkpoint of each claim that is not copied yet, by the claim's name."""
        self._in_flight: str | None = None
        self._changed = threading.Condition()
        self._is_closed = False
        # A daemon: a process that must end does not wait for a store that is away.
        self._thread = threading.Thread(target=self._run, name="weft-checkpoint-uploads", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def offer(self, claim: Claim, step: int) -> None:
        """Has a checkpoint copied in the place of an older one that still waits; this returns at once."""
        if self._is_needed:
            with self._changed:
                self._waiting[claim.name] = claim, step
                self._changed.notify_all()

    def is_busy_with(self, claim: Claim) -> bool:
        """Whether a checkpoint of this claim waits to be copied or is being copied."""
        with self._changed:
            return claim.name in self._waiting or claim.name == self._in_flight

    @property
    def is_idle(self) -> bool:
        with self._changed:
            return not self._waiting and self._in_flight is None

    def forget(self, claim: Claim) -> None:
        with self._changed:
            self._waiting.pop(claim.name, None)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                if self._is_closed:
                    return
                name = next(iter(self._waiting))
                claim, step = self._waiting.pop(name)
                self._in_flight = name
            try:
                self._copy(claim, step)
            except Exception as error:
                # The job loses nothing by it: if its machine is lost as well, it goes on from an older checkpoint.
                fields = {"job": claim.id, "tenant": claim.tenant, "step": step}
                LOG.warning("a checkpoint was not stored: %s", error, extra={"fields": fields})
            with self._changed:
                self._in_flight = None

    def _copy(self, claim: Claim, step: int) -> None:
        checkpoint = self._work.run.checkpoints_dir(claim.name) / f"step-{step:08d}"
        metrics = self._work.run.metrics_path(claim.name)
        files = [checkpoint / STATE_FILE, checkpoint / TENSORS_FILE, *([metrics] if metrics.exists() else [])]
        blob = self._blobs.put_files(files)
        try:
            replaced = self._database.run(lambda tx: record_saved(tx, claim, step, blob))
        except Unsure:
            # A row may name it; if none does, the daily clean-up deletes it.
            raise
        except WeftError:
            discard(self._blobs, [blob])
            raise
        discard(self._blobs, replaced)


def record_saved(tx: sa.Connection, claim: Claim, step: int, blob: str) -> list[str]:
    """Names a checkpoint in the row of its job; returns the blobs that no row names then. The blob itself is among them
    if the job has ended, or if another worker has taken it."""
    mine = sa.and_(JOBS.c.tenant == claim.tenant, JOBS.c.id == claim.id, JOBS.c.fence == claim.fence)
    row = tx.execute(sa.select(JOBS.c.status, JOBS.c.saved_blob).where(mine).with_for_update()).first()
    if row is None or row.status in FINAL_STATES:
        return [blob]
    tx.execute(sa.update(JOBS).where(mine).values(saved_step=step, saved_blob=blob))
    return [row.saved_blob] if row.saved_blob else []


def fetch_saved(job: DbRow, name: str, blobs: Blobs, work: WorkDirectory) -> int | None:
    """Brings the checkpoint that a job's row names into the directory of a claim; returns its step. An archive that is
    gone or damaged is passed over: the job goes on from what else there is."""
    folder = work.data_dir(name) / "saved"
    try:
        with storage_errors(folder):
            folder.mkdir(exist_ok=True)
        blobs.fetch(job["saved_blob"], folder / "archive")
        unpack(folder / "archive", folder, (STATE_FILE, TENSORS_FILE, METRICS_FILE))
        checkpoint = load_checkpoint(folder)
        save_checkpoint(work.run.checkpoints_dir(name), checkpoint, keep=1)
        metrics = work.run.metrics_path(name)
        with storage_errors(metrics), contextlib.suppress(FileNotFoundError):
            shutil.copyfile(folder / METRICS_FILE, metrics)
        return checkpoint.step
    except (NotFound, CheckpointError, Damaged) as error:
        LOG.warning("a stored checkpoint cannot be used: %s", error, extra={"fields": {"job": job["id"]}})
        return None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


COLUMNS = ("step", "train_loss", "train_accuracy", "valid_loss", "valid_mean_token_accuracy")
"""The first columns of the table of results, as OpenAI names them; after them: metrics of the objective."""
METRICS = {
    "loss": "train_loss",
    "mean_token_accuracy": "train_accuracy",
    "eval_loss": "valid_loss",
    "eval_mean_token_accuracy": "valid_mean_token_accuracy",
}
"""Names in metrics.jsonl and the columns they fill; a number that was not finite or not measured leaves it empty."""


def upload_results(claim: Claim, blobs: Blobs, work: WorkDirectory) -> None:
    """Stores the adapters of all notices of a claim that are not in the database yet. If the file store does not
    answer, only a job that has ended has to wait: its result is tried again at the next round. The adapter of a
    checkpoint is left out instead: the checkpoint itself is safe, but cannot be prompted."""
    claim.is_unstored = False
    for notice in claim.notices:
        try:
            _store(claim, notice, blobs, work)
        except StorageError as error:
            LOG.warning("not stored: %s", error, extra={"fields": {"job": claim.id, "tenant": claim.tenant}})
            claim.is_unstored |= isinstance(notice.event, JobSucceeded)


def _store(claim: Claim, notice: EngineNotice, blobs: Blobs, work: WorkDirectory) -> None:
    event = notice.event
    if isinstance(event, JobSucceeded) and claim.result is None:
        assert event.adapter_dir is not None
        claim.result = _store_result(Path(event.adapter_dir), work.run.metrics_path(claim.name), blobs)
    elif isinstance(event, CheckpointSaved) and notice.export and event.step not in claim.blobs:
        claim.blobs[event.step] = blobs.put_dir(notice.export)


def _store_result(adapter_dir: Path, metrics: Path, blobs: Blobs) -> StoredResult:
    table = results_table(metrics.read_bytes() if metrics.exists() else b"")
    adapter = blobs.put_dir(adapter_dir)
    name = blobs.put(table, ".csv")
    return StoredResult(adapter, blobs.size(adapter), name, len(table), hashlib.sha256(table).hexdigest())


def results_table(lines: bytes) -> bytes:
    """Makes a CSV table, with one line per step, of the lines of a metrics.jsonl file."""
    rows: dict[int, dict[str, Any]] = {}
    columns = dict.fromkeys(COLUMNS)
    for line in lines.splitlines():
        record = json_text.parse(line)
        row = rows.setdefault(record["step"], {"step": record["step"]})
        row |= {column: record[name] for name, column in METRICS.items() if record.get(name) is not None}
        own = {_own_column(name): value for name, value in own_metrics(record).items()}
        columns |= dict.fromkeys(own)
        row |= {column: value for column, value in own.items() if value is not None}
    text = io.StringIO()
    writer = csv.DictWriter(text, list(columns), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows[step] for step in sorted(rows))
    return text.getvalue().encode()


def _own_column(name: str) -> str:
    return f"valid_{name.removeprefix('eval_')}" if name.startswith("eval_") else f"train_{name}"
