"""How a job ends in the terms of the API: with an error that has a code, or with a model and a table of results."""

from __future__ import annotations

from typing import Any

from weft.errors import CheckpointError, ConfigError, DataError, JobError, WeftError
from weft.job_state import Reason, ReasonCode
from weft.serve.db.engine import Tx
from weft.serve.errors import OverLimit
from weft.serve.jobs.states import move
from weft.serve.records.files import RESULTS, create_file
from weft.serve.records.models import create_model, model_name
from weft.serve.worker.claim import Claim, StoredResult


def error_of(error: WeftError) -> dict[str, Any]:
    """Returns the error object of a job that could not start."""
    if isinstance(error, DataError):
        param = "validation_file" if error.setting == "eval_data" else "training_file"
        return {"code": f"invalid_{param}", "message": str(error), "param": param}
    if isinstance(error, OverLimit):
        return {"code": error.code, "message": error.message, "param": None}
    if isinstance(error, ConfigError):
        return {"code": "invalid_settings", "message": str(error), "param": error.where}
    if isinstance(error, JobError):
        return {"code": "does_not_fit", "message": f"{error.message} {error.hint or ''}".strip(), "param": None}
    code = "invalid_checkpoint" if isinstance(error, CheckpointError) else "server_error"
    return {"code": code, "message": str(error), "param": None}


PUBLIC_CODES = (ReasonCode.DIVERGED, ReasonCode.DOES_NOT_FIT, ReasonCode.SAMPLE_TOO_LONG)
"""Reasons that keep their code in the API; any other is `training_failed`."""


def error_of_reason(reason: Reason) -> dict[str, Any]:
    """Returns the error object of a job that failed while it trained; the log says more about an internal error."""
    if reason.code is ReasonCode.INTERNAL:
        message = "The job could not be trained because of an internal error; other jobs are not affected."
        return {"code": "server_error", "message": message, "param": None}
    code = reason.code.value if reason.code in PUBLIC_CODES else "training_failed"
    param = "learning_rate" if reason.code is ReasonCode.DIVERGED else None
    return {"code": code, "message": reason.text, "param": param}


def succeed(tx: Tx, claim: Claim, result: StoredResult, tokens: int, step: int) -> None:
    """Writes the job's end, its model and its result file in the caller's transaction."""
    job = claim.job
    model = model_name(job["model"], claim.tenant, job["suffix"], claim.id)
    create_model(
        tx, claim.tenant, model, job=claim.id, base=job["model"], blob=result.adapter, bytes=result.adapter_bytes
    )
    file = create_file(
        tx,
        claim.tenant,
        filename="step_metrics.csv",
        purpose=RESULTS,
        bytes=result.table_bytes,
        sha256=result.table_sha256,
        blob=result.table,
    )
    move(
        tx,
        claim.tenant,
        claim.id,
        "succeeded",
        fence=claim.fence,
        fine_tuned_model=model,
        result_files=[file["id"]],
        trained_tokens=tokens,
        step=step,
    )
