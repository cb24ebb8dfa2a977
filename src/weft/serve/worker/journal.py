"""Writes the engine's notices about a job into the database, in order, in one transaction that holds the job's row.

A step that is reported twice is written once: after a takeover the same steps come again, with the same numbers, and
`jobs.step` shows which are written already. Tokens are set, never added up: they are the engine's own count at the last
durable state. A job ends in the terms of the API: with an error and its code, or with a model and a table of results.
"""

from __future__ import annotations

import enum
from typing import Any

import sqlalchemy as sa

from weft.engine.events import (
    CheckpointSaved,
    EvalDone,
    JobCancelled,
    JobFailed,
    JobPaused,
    JobPreempted,
    JobResumed,
    JobStarted,
    JobSucceeded,
    JobWaiting,
    JobWarning,
    StepDone,
    own_metrics,
)
from weft.errors import CheckpointError, ConfigError, DataError, JobError, WeftError
from weft.job_state import Reason, ReasonCode
from weft.objectives.objective import HEADLINES
from weft.serve.db.engine import DbRow, Tx, every, first
from weft.serve.db.files import RESULTS, add_checkpoint, create_file, create_model, model_name
from weft.serve.db.jobs import add_event, event_row, move, update_job
from weft.serve.db.tables import CHECKPOINTS, EVENTS
from weft.serve.db.usage import EVALUATED, add_usage
from weft.serve.errors import Damaged, OverLimit
from weft.serve.worker.claim import GIVE_BACK, Claim, EngineNotice, StoredResult
from weft.store import json_text

KEPT_CHECKPOINTS = 3
"""Number of a job's newest checkpoints that can be used as models."""


class Fate(enum.Enum):
    HELD = "held"
    ENDED = "ended"
    PAUSED = "paused"
    RELEASED = "released"
    GOES_ON = "goes on"
    """The job was paused for a user who has changed their mind."""
    LEAVING = "leaving"
    """The job is saved and trains no more here; it goes back to the queue when its checkpoint is in the file store."""
    STALLED = "stalled"
    """The job could not write to its directory; it is tried again later."""


class Journal:
    def __init__(self, tx: Tx, claim: Claim, row: DbRow, at: float) -> None:
        """`row` is the job's row as this transaction holds it; `at` is the database's time."""
        self.claim = claim
        self._tx = tx
        self._row = row
        self._at = at
        self._last_step = int(row["step"])
        self._events: list[DbRow] = []
        self._changes: dict[str, Any] = {}
        self.fate = Fate.HELD
        self.unused: list[str] = []
        """Blobs that no row names any more; they are deleted after the transaction."""

    def write(self) -> None:
        for notice in self.claim.notices:
            if self.fate in (Fate.ENDED, Fate.PAUSED):
                break
            self._write(notice)
        self._flush()

    def _write(self, notice: EngineNotice) -> None:
        event, claim, tx = notice.event, self.claim, self._tx
        counts: dict[str, Any]
        if isinstance(event, StepDone):
            self._note_step(event)
        elif isinstance(event, EvalDone):
            self._write_eval(event.fields())
            counts = {"kind": EVALUATED, "tokens": notice.evaluated, "model": claim.job["model"], "job": claim.id}
            add_usage(tx, claim.tenant, f"{claim.id}:{event.step}", **counts)
        elif isinstance(event, JobStarted):
            self._note_start(event)
        elif isinstance(event, CheckpointSaved):
            # The job got this far without losing its worker, so earlier losses were not its fault.
            self._changes |= {"trained_tokens": notice.tokens, "attempts": 0}
            self._note_checkpoint(event.step)
        elif isinstance(event, JobSucceeded):
            self._flush()
            assert claim.result is not None
            succeed(tx, claim, claim.result, notice.tokens, event.step)
            self.fate = Fate.ENDED
        elif isinstance(event, JobFailed):
            self._flush()
            error = notice.error or error_of_reason(event.reason)
            counts = {"trained_tokens": notice.tokens} if claim.is_training else {}
            counts |= {"message": error["message"], "error": error}
            move(tx, claim.tenant, claim.id, "failed", fence=claim.fence, **counts)
            self.fate = Fate.ENDED
        elif isinstance(event, JobCancelled):
            self._flush()
            move(tx, claim.tenant, claim.id, "cancelled", fence=claim.fence, trained_tokens=notice.tokens)
            self.fate = Fate.ENDED
        elif isinstance(event, JobPaused):
            self._note_pause(event, notice.tokens)
        elif isinstance(event, JobWarning):
            self._add_message("warn", event.message)
        elif isinstance(event, JobWaiting | JobPreempted):
            self._add_message("info", f"The job {event.reason}")
        elif isinstance(event, JobResumed):
            self._add_message("info", f"The job goes on from step {event.step}")

    def _note_start(self, event: JobStarted) -> None:
        claim, tx = self.claim, self._tx
        text = f"Goes on from step {event.step} of {event.num_steps}" if event.step else None
        if self._row["status"] == "running":
            update_job(tx, claim.tenant, claim.id, fence=claim.fence, total_steps=event.num_steps)
            self._add_message("info", text or f"Starts again at step 0 of {event.num_steps}")
            self._note_earlier(event.num_steps)
            return
        started_at = self._row["started_at"] or int(self._at)
        move(
            tx, claim.tenant, claim.id, "running",
            fence=claim.fence, message=text, total_steps=event.num_steps, started_at=started_at,
        )  # fmt: skip
        self._row = {**self._row, "status": "running"}
        self._note_earlier(event.num_steps)

    def _note_earlier(self, num_steps: int) -> None:
        """Writes steps that are durable but that the worker which trained them had no time to write."""
        for record in self.claim.earlier:
            if "eval_loss" in record:
                self._write_eval(record)
            else:
                self._write_step({**record, "num_steps": num_steps})

    def _note_step(self, event: StepDone) -> None:
        if self.claim.first_step is None:
            self.claim.first_step = (event.step, self._at)
        if self._write_step(event.fields()):
            self._changes["estimated_finish"] = self._finish_estimate(event)

    def _write_step(self, done: dict[str, Any]) -> bool:
        """Writes the metrics event of a step unless it is written already; returns whether it did."""
        step, num_steps, loss = done["step"], done["num_steps"], done["loss"]
        # Metrics files of older versions have no accuracy.
        own = own_metrics(done)
        scores = {"train_loss": loss, "train_mean_token_accuracy": done.get("mean_token_accuracy")}
        scores |= {f"train_{name}": value for name, value in own.items()}
        self.claim.metrics |= {"step": step, **scores}
        if step <= self._last_step:
            return False
        self._last_step = self._changes["step"] = step
        every_nth = int(self.claim.job["settings"].get("logging_steps", 1))
        if step % every_nth == 0 or step == num_steps:
            data = {
                "step": step,
                "total_steps": num_steps,
                **scores,
                "learning_rate": done["learning_rate"],
                "grad_norm": done["grad_norm"],
                "epoch": done["epoch"],
                "trained_tokens": done["num_tokens"],
            }
            shown = "not finite, skipped" if loss is None or done.get("skipped") else f"{loss:.4f}"
            self._add_metrics(f"Step {step}/{num_steps}: training loss={shown}{_headlines(own)}", data)
        return True

    def _write_eval(self, done: dict[str, Any]) -> None:
        step, loss = done["step"], done["eval_loss"]
        own = {name.removeprefix("eval_"): value for name, value in own_metrics(done).items()}
        scores = {"valid_loss": loss, "valid_mean_token_accuracy": done.get("eval_mean_token_accuracy")}
        scores |= {f"valid_{name}": value for name, value in own.items()}
        # Every evaluation covers the whole validation file.
        scores |= {f"full_{name}": value for name, value in scores.items()}
        self.claim.metrics |= scores
        text = f"Step {step}: validation loss={'not finite' if loss is None else f'{loss:.4f}'}{_headlines(own)}"
        if step <= int(self._row["step"]) and self._is_written(text):
            return
        self._add_metrics(text, {"step": step, **scores, "epoch": done["epoch"]})

    def _is_written(self, text: str) -> bool:
        mine = sa.and_(EVENTS.c.job == self.claim.id, EVENTS.c.type == "metrics", EVENTS.c.message == text)
        return first(self._tx, sa.select(EVENTS.c.seq).where(mine)) is not None

    def _note_checkpoint(self, step: int) -> None:
        """Adds a row for the checkpoint if its adapter is in the file store; only the newest few rows are kept."""
        claim, tx = self.claim, self._tx
        blob = claim.blobs.get(step)
        if blob is None:
            return
        mine = sa.and_(CHECKPOINTS.c.tenant == claim.tenant, CHECKPOINTS.c.job == claim.id)
        before = first(tx, sa.select(CHECKPOINTS).where(mine, CHECKPOINTS.c.step == step))
        if before is not None:
            self.unused.append(blob)
            return
        model = f"{model_name(claim.job['model'], claim.tenant, claim.job['suffix'], claim.id)}:ckpt-step-{step}"
        metrics = json_text.finite(claim.metrics)
        add_checkpoint(tx, claim.tenant, claim.id, step, model=model, metrics=metrics, blob=blob)
        for old in every(tx, sa.select(CHECKPOINTS).where(mine).order_by(CHECKPOINTS.c.step.desc()))[KEPT_CHECKPOINTS:]:
            tx.execute(sa.delete(CHECKPOINTS).where(CHECKPOINTS.c.seq == old["seq"]))
            if old["blob"]:
                self.unused.append(old["blob"])

    def _note_pause(self, event: JobPaused, tokens: int) -> None:
        claim = self.claim
        if claim.requested == GIVE_BACK:
            self.fate = Fate.LEAVING
        elif claim.requested == "pause" and self._row["wanted"] == "pause":
            self._flush()
            move(self._tx, claim.tenant, claim.id, "paused", fence=claim.fence, trained_tokens=tokens)
            self.fate = Fate.PAUSED
        elif claim.requested == "pause":
            self.fate = Fate.GOES_ON
        elif not event.is_requested:
            if not claim.has_stalled:
                self._add_message("warn", f"The job waits: {event.reason}")
            self.fate = Fate.STALLED

    def _finish_estimate(self, event: StepDone) -> int | None:
        assert self.claim.first_step is not None
        step, at = self.claim.first_step
        if event.step == step or self._at <= at:
            return None
        return int(self._at + (self._at - at) / (event.step - step) * (event.num_steps - event.step))

    def _add_metrics(self, message: str, data: dict[str, Any]) -> None:
        """Gathers a metrics event; all gathered events are inserted at once."""
        values = json_text.finite(data)
        self._events.append(event_row(self.claim.tenant, self.claim.id, self._at, "info", message, "metrics", values))

    def _add_message(self, level: str, message: str) -> None:
        self._flush()
        add_event(self._tx, self.claim.tenant, self.claim.id, level, message)

    def _flush(self) -> None:
        """Writes what was gathered, so that it comes before whatever is written next."""
        if self._events:
            self._tx.execute(sa.insert(EVENTS), self._events)
        if self._changes:
            update_job(self._tx, self.claim.tenant, self.claim.id, fence=self.claim.fence, **self._changes)
        self._events, self._changes = [], {}


def _headlines(own: dict[str, Any]) -> str:
    """The objective's main metrics in the message of a step; a number that is not finite is None in a file."""
    found = {name: own[name] for name in HEADLINES if own.get(name) is not None}
    return "".join(f", {name}={value:.4f}" for name, value in found.items())


def error_of(error: WeftError) -> dict[str, Any]:
    if isinstance(error, DataError):
        param = "validation_file" if error.setting == "eval_data" else "training_file"
        return {"code": f"invalid_{param}", "message": str(error), "param": param}
    if isinstance(error, OverLimit):
        return {"code": error.code, "message": error.message, "param": None}
    if isinstance(error, ConfigError):
        return {"code": "invalid_settings", "message": str(error), "param": error.where}
    if isinstance(error, JobError):
        return {"code": "does_not_fit", "message": f"{error.message} {error.hint or ''}".strip(), "param": None}
    if isinstance(error, Damaged):
        message = "A stored file or adapter of the job is damaged; upload it again, or have a backup restored."
        return {"code": error.code, "message": message, "param": None}
    code = "invalid_checkpoint" if isinstance(error, CheckpointError) else "server_error"
    # Its own text may name directories of the server, which are for the log alone.
    message = "The job could not be prepared because of an error of the server; its operator finds it in the log."
    return {"code": code, "message": message, "param": None}


PUBLIC_CODES = (ReasonCode.DIVERGED, ReasonCode.DOES_NOT_FIT, ReasonCode.SAMPLE_TOO_LONG)
"""Reasons that keep their code in the API; any other is `training_failed`."""


def error_of_reason(reason: Reason) -> dict[str, Any]:
    """Returns the error object of a job that failed while it trained; the log has more about an internal error."""
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
