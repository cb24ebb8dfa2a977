"""Writes what the engine said of a job into the database, in order, inside one transaction that holds the job.

Said twice is written once: after a takeover the same steps come again, with the same numbers, and `jobs.step` knows
which are there already. Tokens are set, never added up, from the engine's own count at what is durable.
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
)
from weft.serve.db.engine import Tx
from weft.serve.db.tables import CHECKPOINTS, EVENTS
from weft.serve.jobs.states import move, update_job
from weft.serve.records.checkpoints import add_checkpoint
from weft.serve.records.events import add_event
from weft.serve.records.models import model_name
from weft.serve.records.rows import Record, every, first, new_id
from weft.serve.worker.held import Heard, Held
from weft.serve.worker.outcome import error_of_reason, succeed
from weft.store import json_text

KEPT_CHECKPOINTS = 3
"""Checkpoints of a job that can be used as models: the newest."""


class Fate(enum.Enum):
    """What becomes of a claim after what was heard."""

    HELD = "held"
    ENDED = "ended"
    PAUSED = "paused"
    RELEASED = "released"
    GOES_ON = "goes on"
    """It was paused for a user who has changed their mind."""
    STALLED = "stalled"
    """It could not write to its directory; it is tried again later."""


class Journal:
    """One job's entries in one transaction."""

    def __init__(self, tx: Tx, held: Held, row: Record, at: float) -> None:
        """`row` is the job as this transaction holds it."""
        self.held = held
        self._tx = tx
        self._row = row
        self._at = at
        self._told = int(row["step"])
        self._events: list[Record] = []
        self._changes: dict[str, Any] = {}
        self.fate = Fate.HELD
        self.unused: list[str] = []
        """Blobs that no row names any more, to be deleted after the transaction."""

    def write(self) -> None:
        """Writes all that was heard; stops where the claim ends."""
        for heard in self.held.heard:
            if self.fate in (Fate.ENDED, Fate.PAUSED):
                break
            self._write(heard)
        self._flush()

    def _write(self, heard: Heard) -> None:
        event, held, tx = heard.event, self.held, self._tx
        if isinstance(event, StepDone):
            self._note_step(event)
        elif isinstance(event, EvalDone):
            self._note_eval(event)
        elif isinstance(event, JobStarted):
            self._note_start(event)
        elif isinstance(event, CheckpointSaved):
            # It got this far without losing its worker, so nothing that was lost before is its fault.
            self._changes |= {"trained_tokens": heard.tokens, "attempts": 0}
            self._note_checkpoint(event.step)
        elif isinstance(event, JobSucceeded):
            self._flush()
            succeed(tx, held, held.result, heard.tokens, event.step)
            self.fate = Fate.ENDED
        elif isinstance(event, JobFailed):
            self._flush()
            error = heard.error or error_of_reason(event.reason)
            counts: dict[str, Any] = {"trained_tokens": heard.tokens} if held.is_training else {}
            move(tx, held.tenant, held.id, "failed", fence=held.fence, message=error["message"], error=error, **counts)
            self.fate = Fate.ENDED
        elif isinstance(event, JobCancelled):
            self._flush()
            move(tx, held.tenant, held.id, "cancelled", fence=held.fence, trained_tokens=heard.tokens)
            self.fate = Fate.ENDED
        elif isinstance(event, JobPaused):
            self._note_pause(event, heard.tokens)
        elif isinstance(event, JobWarning):
            self._say("warn", event.message)
        elif isinstance(event, JobWaiting | JobPreempted):
            self._say("info", f"The job {event.reason}")
        elif isinstance(event, JobResumed):
            self._say("info", f"The job goes on from step {event.step}")

    def _note_start(self, event: JobStarted) -> None:
        held, tx = self.held, self._tx
        text = f"Goes on from step {event.step} of {event.num_steps}" if event.step else None
        if self._row["status"] == "running":
            update_job(tx, held.tenant, held.id, fence=held.fence, total_steps=event.num_steps)
            self._say("info", text or f"Starts again at step 0 of {event.num_steps}")
            self._tell_earlier(event.num_steps)
            return
        started_at = self._row["started_at"] or int(self._at)
        move(
            tx, held.tenant, held.id, "running",
            fence=held.fence, message=text, total_steps=event.num_steps, started_at=started_at,
        )  # fmt: skip
        self._row = {**self._row, "status": "running"}
        self._tell_earlier(event.num_steps)

    def _tell_earlier(self, num_steps: int) -> None:
        """Tells of steps that are done for good and of which the worker that did them had no time to tell."""
        for record in self.held.earlier:
            if "eval_loss" in record:
                self._tell_eval(record)
            else:
                self._tell_step({**record, "num_steps": num_steps})

    def _note_step(self, event: StepDone) -> None:
        if self.held.first_step is None:
            self.held.first_step = (event.step, self._at)
        if self._tell_step(event.fields()):
            self._changes["estimated_finish"] = self._finish_estimate(event)

    def _tell_step(self, done: dict[str, Any]) -> bool:
        """A metrics event for a step, unless it has been told of; True if it has not."""
        step, num_steps, loss = done["step"], done["num_steps"], done["loss"]
        # Metrics on disk may be older than their accuracy.
        scores = {"train_loss": loss, "train_mean_token_accuracy": done.get("mean_token_accuracy")}
        self.held.metrics |= {"step": step, **scores}
        if step <= self._told:
            return False
        self._told = self._changes["step"] = step
        every_nth = int(self.held.job["settings"].get("logging_steps", 1))
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
            told = "not finite, skipped" if loss is None or done.get("skipped") else f"{loss:.4f}"
            self._note(f"Step {step}/{num_steps}: training loss={told}", data)
        return True

    def _note_eval(self, event: EvalDone) -> None:
        self._tell_eval(event.fields())

    def _tell_eval(self, done: dict[str, Any]) -> None:
        step, loss = done["step"], done["eval_loss"]
        scores = {"valid_loss": loss, "valid_mean_token_accuracy": done.get("eval_mean_token_accuracy")}
        # Every evaluation here is of the whole validation file.
        scores |= {f"full_{name}": value for name, value in scores.items()}
        self.held.metrics |= scores
        text = f"Step {step}: validation loss={'not finite' if loss is None else f'{loss:.4f}'}"
        if step <= int(self._row["step"]) and self._is_there(text):
            return
        self._note(text, {"step": step, **scores, "epoch": done["epoch"]})

    def _is_there(self, text: str) -> bool:
        mine = sa.and_(EVENTS.c.job == self.held.id, EVENTS.c.type == "metrics", EVENTS.c.message == text)
        return first(self._tx, sa.select(EVENTS.c.seq).where(mine)) is not None

    def _note_checkpoint(self, step: int) -> None:
        """A row for the checkpoint if its adapter is in the file store; older ones than the newest few go."""
        held, tx = self.held, self._tx
        blob = held.blobs.get(step)
        if blob is None:
            return
        mine = sa.and_(CHECKPOINTS.c.tenant == held.tenant, CHECKPOINTS.c.job == held.id)
        before = first(tx, sa.select(CHECKPOINTS).where(mine, CHECKPOINTS.c.step == step))
        if before is not None:
            self.unused.append(blob)
            return
        model = f"{model_name(held.job['model'], held.tenant, held.job['suffix'], held.id)}:ckpt-step-{step}"
        add_checkpoint(tx, held.tenant, held.id, step, model=model, metrics=json_text.finite(held.metrics), blob=blob)
        for old in every(tx, sa.select(CHECKPOINTS).where(mine).order_by(CHECKPOINTS.c.step.desc()))[KEPT_CHECKPOINTS:]:
            tx.execute(sa.delete(CHECKPOINTS).where(CHECKPOINTS.c.seq == old["seq"]))
            if old["blob"]:
                self.unused.append(old["blob"])

    def _note_pause(self, event: JobPaused, tokens: int) -> None:
        held = self.held
        if held.asked == "pause" and self._row["wanted"] == "pause":
            self._flush()
            move(self._tx, held.tenant, held.id, "paused", fence=held.fence, trained_tokens=tokens)
            self.fate = Fate.PAUSED
        elif held.asked == "pause":
            self.fate = Fate.GOES_ON
        elif not event.is_asked_for:
            if not held.has_stalled:
                self._say("warn", f"The job waits: {event.reason}")
            self.fate = Fate.STALLED

    def _finish_estimate(self, event: StepDone) -> int | None:
        assert self.held.first_step is not None
        step, at = self.held.first_step
        if event.step == step or self._at <= at:
            return None
        return int(self._at + (self._at - at) / (event.step - step) * (event.num_steps - event.step))

    def _note(self, message: str, data: dict[str, Any]) -> None:
        """A metrics event, written with the others at once."""
        self._events.append(
            {
                "id": new_id("ftevent-"),
                "tenant": self.held.tenant,
                "job": self.held.id,
                "created_at": int(self._at),
                "level": "info",
                "type": "metrics",
                "message": message,
                "data": json_text.finite(data),
            }
        )

    def _say(self, level: str, message: str) -> None:
        self._flush()
        add_event(self._tx, self.held.tenant, self.held.id, level, message)

    def _flush(self) -> None:
        """Writes what was gathered, so that it comes before what follows."""
        if self._events:
            self._tx.execute(sa.insert(EVENTS), self._events)
        if self._changes:
            update_job(self._tx, self.held.tenant, self.held.id, fence=self.held.fence, **self._changes)
        self._events, self._changes = [], {}
