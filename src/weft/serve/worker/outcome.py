"""How a job ends, in the words of the API: an error with a code, or a model and a table of results."""

from __future__ import annotations

import csv
import hashlib
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.errors import CheckpointError, ConfigError, DataError, JobError, WeftError
from weft.job_state import Reason, ReasonCode
from weft.serve.blobs import Blobs
from weft.serve.db.engine import Tx
from weft.serve.errors import OverLimit
from weft.serve.jobs.states import move
from weft.serve.records.files import RESULTS, create_file
from weft.serve.records.models import create_model, model_name
from weft.serve.records.rows import Record
from weft.serve.worker.held import Held
from weft.store import json_text

COLUMNS = ("step", "train_loss", "train_accuracy", "valid_loss", "valid_mean_token_accuracy")
"""Of the results, as OpenAI names them."""
METRICS = {
    "loss": "train_loss",
    "mean_token_accuracy": "train_accuracy",
    "eval_loss": "valid_loss",
    "eval_mean_token_accuracy": "valid_mean_token_accuracy",
}
"""Those columns by their names in metrics.jsonl; a number that was not finite or not measured stays empty."""


@dataclass(frozen=True)
class Result:
    """What a job made, in the file store and not yet in the database."""

    adapter: str
    adapter_bytes: int
    table: str
    table_bytes: int
    table_sha256: str


def error_of(error: WeftError, job: Record) -> dict[str, Any]:
    """The error object of a job that could not start."""
    if isinstance(error, DataError):
        file = job["validation_file"]
        is_validation = file is not None and file != job["training_file"] and str(error).startswith(str(file))
        param = "validation_file" if is_validation else "training_file"
        return {"code": f"invalid_{param}", "message": str(error), "param": param}
    if isinstance(error, OverLimit):
        return {"code": error.code, "message": error.message, "param": None}
    if isinstance(error, ConfigError):
        return {"code": "invalid_settings", "message": str(error), "param": error.where}
    if isinstance(error, JobError):
        return {"code": "does_not_fit", "message": f"{error.message} {error.hint or ''}".strip(), "param": None}
    code = "invalid_checkpoint" if isinstance(error, CheckpointError) else "server_error"
    return {"code": code, "message": str(error), "param": None}


TOLD_CODES = (ReasonCode.DIVERGED, ReasonCode.DOES_NOT_FIT, ReasonCode.SAMPLE_TOO_LONG)
"""Reasons that the API tells by their own code; any other is `training_failed`."""


def error_of_reason(reason: Reason) -> dict[str, Any]:
    """The error object of a job that failed while it trained."""
    code = reason.code.value if reason.code in TOLD_CODES else "training_failed"
    param = "learning_rate" if reason.code is ReasonCode.DIVERGED else None
    return {"code": code, "message": reason.text, "param": param}


def store_result(held: Held, adapter_dir: Path, metrics: Path, blobs: Blobs) -> Result:
    """Puts the adapter and the table of results into the file store."""
    table = results_table(metrics.read_bytes() if metrics.exists() else b"")
    adapter = blobs.put_dir(adapter_dir)
    name = blobs.put(table, ".csv")
    return Result(adapter, blobs.size(adapter), name, len(table), hashlib.sha256(table).hexdigest())


def results_table(lines: bytes) -> bytes:
    """The metrics of a job as CSV, one line per step."""
    rows: dict[int, dict[str, Any]] = {}
    for line in lines.splitlines():
        record = json_text.parse(line)
        row = rows.setdefault(record["step"], {"step": record["step"]})
        row |= {column: record[name] for name, column in METRICS.items() if record.get(name) is not None}
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows[step] for step in sorted(rows))
    return text.getvalue().encode()


def succeed(tx: Tx, held: Held, result: Result, tokens: int, step: int) -> None:
    """The job's end, its model and its results, in the caller's one transaction."""
    job = held.job
    model = model_name(job["model"], held.tenant, job["suffix"], held.id)
    create_model(
        tx, held.tenant, model, job=held.id, base=job["model"], blob=result.adapter, bytes=result.adapter_bytes
    )
    file = create_file(
        tx,
        held.tenant,
        filename="step_metrics.csv",
        purpose=RESULTS,
        bytes=result.table_bytes,
        sha256=result.table_sha256,
        blob=result.table,
    )
    move(
        tx,
        held.tenant,
        held.id,
        "succeeded",
        fence=held.fence,
        fine_tuned_model=model,
        result_files=[file["id"]],
        trained_tokens=tokens,
        step=step,
    )
