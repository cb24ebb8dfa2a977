"""A tenant's tokens: trained ones are spent, and those that its unfinished jobs are yet to train are reserved.

How many tokens a file has is known only to whoever has the tokenizer, so a job is counted twice. When it is made, the
API guesses from the length of its files and refuses what cannot fit beside the tenant's other jobs. When a worker has
read the data, it knows the number for certain; a job that would pass the limit beside those that came before it then
fails before it trains anything. So however many jobs come at once, together they train no more than the limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import sqlalchemy as sa

from weft.data.order import BatchSchedule
from weft.serve.db.engine import Tx
from weft.serve.db.tables import JOBS, TENANTS
from weft.serve.errors import OverLimit
from weft.serve.jobs.states import FINAL, update_job
from weft.serve.records.rows import Record
from weft.spec import JobSpec

BYTES_PER_TOKEN = 4
"""Of a training file, for the first guess; English in today's vocabularies has about so many."""
_UNFINISHED = JOBS.c.status.not_in(FINAL)


@dataclass(frozen=True)
class Tokens:
    """What a tenant has spent and what is spoken for."""

    trained: int
    reserved: int
    """Of unfinished jobs, beyond what they have trained."""


def tokens_of(tx: Tx, tenant: str, *where: sa.ColumnElement[bool]) -> Tokens:
    """Tokens of a tenant's jobs; with `where` the reserved ones of some of them only."""
    rest = sa.func.coalesce(JOBS.c.planned_tokens, 0) - JOBS.c.trained_tokens
    open_ = sa.and_(_UNFINISHED, rest > 0, *where)
    query = sa.select(
        sa.func.coalesce(sa.func.sum(JOBS.c.trained_tokens), 0),
        sa.func.coalesce(sa.func.sum(sa.case((open_, rest), else_=0)), 0),
    )
    trained, reserved = tx.execute(query.where(JOBS.c.tenant == tenant)).one()
    return Tokens(int(trained), int(reserved))


def check_tokens(tx: Tx, tenant: str, limit: int | None, more: int) -> None:
    """A new job of about `more` tokens fits the limit beside all others, or OverLimit says why not.

    The caller has locked the tenant.
    """
    if limit is None:
        return
    _refuse(tokens_of(tx, tenant), limit, f"about {more:,}", more)


def reserve(tx: Tx, job: Record, tokens: int) -> None:
    """Writes down what a job is going to train; OverLimit if that is too much beside those that came before it.

    A job that has begun keeps what it was once given, whatever became of the limit.
    """
    limit = lock_tenant(tx, job["tenant"])
    if limit is not None and job["started_at"] is None:
        came_before = sa.or_(JOBS.c.seq < job["seq"], JOBS.c.worker.is_not(None), JOBS.c.started_at.is_not(None))
        found = tokens_of(tx, job["tenant"], came_before, JOBS.c.id != job["id"])
        _refuse(found, limit, f"{tokens:,}", tokens)
    update_job(tx, job["tenant"], job["id"], fence=job["fence"], planned_tokens=tokens)


def guess_tokens(spec: JobSpec, num_samples: int, num_bytes: int) -> int:
    """About how many tokens a job trains, from the length of its file."""
    schedule = _schedule(spec, num_samples)
    length = min(spec.max_length, max(1, num_bytes // max(1, num_samples * BYTES_PER_TOKEN)))
    whole, rest = divmod(schedule.num_steps, schedule.steps_per_epoch)
    return length * (whole * num_samples + min(num_samples, rest * spec.batch_size))


def count_tokens(spec: JobSpec, lengths: Sequence[int]) -> int:
    """How many tokens a job trains, by the lengths of its samples; fewer if it stops early."""
    schedule = _schedule(spec, len(lengths))
    whole, rest = divmod(schedule.num_steps, schedule.steps_per_epoch)
    first = schedule.num_steps - rest
    partial = sum(int(lengths[i]) for step in range(first, schedule.num_steps) for i in schedule.batch(step))
    return whole * sum(lengths) + partial


def _schedule(spec: JobSpec, num_samples: int) -> BatchSchedule:
    return BatchSchedule(
        num_samples=num_samples,
        batch_size=spec.batch_size,
        num_epochs=spec.num_train_epochs,
        max_steps=spec.max_steps,
        seed=spec.seed,
        shuffle=spec.shuffle,
    )


def lock_tenant(tx: Tx, tenant: str) -> int | None:
    """The tenant's limit of tokens; whoever else is about to count what the tenant has waits for this transaction."""
    query = sa.select(TENANTS.c.max_trained_tokens).where(TENANTS.c.id == tenant)
    # Not against rows that only refer to the tenant: those are being inserted all the time.
    limit = tx.execute(query.with_for_update(key_share=True)).scalar_one()
    return None if limit is None else int(limit)


def _refuse(found: Tokens, limit: int, text: str, more: int) -> None:
    if found.trained + found.reserved + more > limit:
        raise OverLimit(
            f"{found.trained:,} tokens have been trained of at most {limit:,}, {found.reserved:,} more are reserved by "
            f"jobs that have not ended, and this job needs {text}; ask the operator for more."
        )
