"""Puts the adapters and result tables of jobs into the file store, before the transaction that names them."""

from __future__ import annotations

import csv
import hashlib
import io
import logging
from pathlib import Path
from typing import Any

from weft.engine.events import CheckpointSaved, JobSucceeded, own_metrics
from weft.errors import StorageError
from weft.serve.blobs import Blobs
from weft.serve.worker.claim import Claim, EngineNotice, StoredResult
from weft.serve.worker.directory import WorkDirectory
from weft.store import json_text

LOG = logging.getLogger("weft.serve.worker")


COLUMNS = ("step", "train_loss", "train_accuracy", "valid_loss", "valid_mean_token_accuracy")
"""The first columns of the table of results, as OpenAI names them; behind them: what only an objective measures."""
METRICS = {
    "loss": "train_loss",
    "mean_token_accuracy": "train_accuracy",
    "eval_loss": "valid_loss",
    "eval_mean_token_accuracy": "valid_mean_token_accuracy",
}
"""Names in metrics.jsonl and the columns they fill; a number that was not finite or not measured leaves it empty."""


def upload_results(claim: Claim, blobs: Blobs, work: WorkDirectory) -> None:
    """Stores the adapters of all notices of a claim that are not in the database yet.

    If the file store does not answer, only a job that has ended has to wait: its result is tried again at the next
    round. The adapter of a checkpoint is left out instead: the checkpoint itself is safe, but nobody can prompt it.
    """
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
    """The column of what only an objective measures."""
    return f"valid_{name.removeprefix('eval_')}" if name.startswith("eval_") else f"train_{name}"
