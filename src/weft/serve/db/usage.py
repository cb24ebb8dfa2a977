"""What a tenant has used, and its quota of tokens: trained tokens are spent, those of unfinished jobs are reserved.

The worker sets a job's trained tokens and never adds to them, so a crash cannot count them twice.

Only a worker has the tokenizer, so the tokens of a job are counted twice. When the job is made, the API estimates them
from the length of its file and refuses a job that cannot fit beside the tenant's other jobs. When a worker has read the
data, it knows the number for certain; a job that would then pass the limit, beside those that came before it, fails
before it trains anything. So however many jobs come at once, together they train no more than the limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import sqlalchemy as sa

from weft.data.order import BatchSchedule
from weft.job_state import FINAL_STATES
from weft.serve.db.engine import Database, DbRow, Tx, every, first, new_id, now
from weft.serve.db.jobs import update_job
from weft.serve.db.tables import JOBS, TENANTS, USAGE
from weft.serve.errors import OverLimit
from weft.spec import JobSpec


def add_usage(
    tx: Tx, tenant: str, request: str, *, kind: str, tokens: int, model: str | None = None, job: str | None = None
) -> None:
    """Counts the tokens of one request or evaluation; one that is reported again is counted once."""
    if first(tx, sa.select(USAGE).where(USAGE.c.request == request, USAGE.c.kind == kind)) is None:
        row = {"tenant": tenant, "job": job, "model": model, "kind": kind, "tokens": tokens, "request": request}
        tx.execute(sa.insert(USAGE).values({**row, "created_at": int(now(tx))}))


def add_answer(tx: Tx, tenant: str, request: str, *, model: str, prompt: int, completion: int) -> None:
    """Counts the tokens of a prompt and of what was answered."""
    for kind, tokens in zip(ANSWERED, (prompt, completion), strict=True):
        add_usage(tx, tenant, request, kind=kind, tokens=tokens, model=model)


def usage_of(tx: Tx, tenant: str, *, start: int | None = None, end: int | None = None) -> dict[str, Any]:
    """Adds up a tenant's tokens by kind, in total and by model, of jobs and requests that began in [start, end)."""
    trained = sa.select(
        JOBS.c.model,
        sa.literal("trained").label("kind"),
        sa.func.sum(JOBS.c.trained_tokens).label("tokens"),
        sa.func.count().label("num"),
    ).where(JOBS.c.tenant == tenant, *_between(JOBS.c.created_at, start, end))
    used = sa.select(
        USAGE.c.model, USAGE.c.kind, sa.func.sum(USAGE.c.tokens).label("tokens"), sa.func.sum(USAGE.c.num).label("num")
    ).where(USAGE.c.tenant == tenant, *_between(USAGE.c.created_at, start, end))
    rows = every(tx, trained.group_by(JOBS.c.model)) + every(tx, used.group_by(USAGE.c.model, USAGE.c.kind))
    totals = {kind: sum(int(r["tokens"]) for r in rows if r["kind"] == kind) for kind in KINDS}
    by_model = [
        {"model": r["model"], "kind": r["kind"], "tokens": int(r["tokens"]), "num": int(r["num"])} for r in rows
    ]
    return {"totals": totals, "by_model": by_model}


DAY_S = 24 * 3600


def fold_usage(database: Database) -> int:
    """Makes one row of all requests of a tenant to a model on a day (UTC) before yesterday; returns how many rows it
    replaced. Sums over whole days, and numbers of requests, stay as they are."""
    day = USAGE.c.created_at - USAGE.c.created_at % DAY_S
    columns = (USAGE.c.tenant, USAGE.c.model, USAGE.c.kind, day.label("day"))
    with database.read() as tx:
        end = (int(now(tx)) // DAY_S - 1) * DAY_S
        old = sa.select(*columns).where(USAGE.c.created_at < end, USAGE.c.kind.in_(ANSWERED))
        groups = every(tx, old.group_by(*columns).having(sa.func.count() > 1))
    num_rows = 0
    for row in groups:
        same = [USAGE.c[name].is_not_distinct_from(row[name]) for name in ("tenant", "model", "kind")]
        whole_day = sa.and_(USAGE.c.created_at >= row["day"], USAGE.c.created_at < row["day"] + DAY_S)
        folded = {**row, "request": new_id("day-"), "created_at": row["day"]}
        with database.begin() as tx:
            # Only what this transaction deletes is added up, so that two processes count nothing twice.
            gone = tx.execute(sa.delete(USAGE).where(*same, whole_day).returning(USAGE.c.tokens, USAGE.c.num)).all()
            folded |= {"tokens": sum(each.tokens for each in gone), "num": sum(each.num for each in gone)}
            if gone:
                tx.execute(sa.insert(USAGE).values({name: folded[name] for name in folded if name != "day"}))
        num_rows += len(gone)
    return num_rows


EVALUATED = "evaluated"
ANSWERED = ("prompt", "completion")
KINDS = ("trained", EVALUATED, *ANSWERED)


def _between(column: Any, start: int | None, end: int | None) -> list[sa.ColumnElement[bool]]:
    where = []
    if start is not None:
        where.append(column >= start)
    if end is not None:
        where.append(column < end)
    return where


BYTES_PER_TOKEN = 4
"""Bytes of a training file per token, for the first estimate; about right for English text."""
_UNFINISHED = JOBS.c.status.not_in(FINAL_STATES)


@dataclass(frozen=True)
class TokenUsage:
    """The tokens that a tenant has spent and those that are reserved."""

    trained: int
    reserved: int


def token_usage(tx: Tx, tenant: str, *where: sa.ColumnElement[bool]) -> TokenUsage:
    """Returns the tokens of a tenant's jobs; `where` restricts which jobs count as reserved."""
    rest = sa.func.coalesce(JOBS.c.planned_tokens, 0) - JOBS.c.trained_tokens
    open_ = sa.and_(_UNFINISHED, rest > 0, *where)
    query = sa.select(
        sa.func.coalesce(sa.func.sum(JOBS.c.trained_tokens), 0),
        sa.func.coalesce(sa.func.sum(sa.case((open_, rest), else_=0)), 0),
    )
    trained, reserved = tx.execute(query.where(JOBS.c.tenant == tenant)).one()
    return TokenUsage(int(trained), int(reserved))


def check_tokens(tx: Tx, tenant: str, limit: int | None, more: int) -> None:
    """Raises OverLimit if a new job of about `more` tokens does not fit beside all others; the tenant is locked."""
    if limit is None:
        return
    _refuse(token_usage(tx, tenant), limit, f"about {more:,}", more)


def reserve(tx: Tx, job: DbRow, tokens: int) -> None:
    """Reserves a job's tokens; raises OverLimit if they are too many beside the jobs that came before it. A job that
    has begun keeps its tokens even if the limit was lowered since."""
    limit = lock_tenant(tx, job["tenant"])
    if limit is not None and job["started_at"] is None:
        came_before = sa.or_(JOBS.c.seq < job["seq"], JOBS.c.worker.is_not(None), JOBS.c.started_at.is_not(None))
        found = token_usage(tx, job["tenant"], came_before, JOBS.c.id != job["id"])
        _refuse(found, limit, f"{tokens:,}", tokens)
    update_job(tx, job["tenant"], job["id"], fence=job["fence"], planned_tokens=tokens)


def guess_tokens(spec: JobSpec, num_samples: int, num_bytes: int) -> int:
    length = min(spec.max_length, max(1, num_bytes // max(1, num_samples * BYTES_PER_TOKEN)))
    return length * BatchSchedule.of(spec, num_samples).num_trained_samples


def count_tokens(spec: JobSpec, lengths: Sequence[int] | npt.NDArray[np.int64]) -> int:
    """Counts the tokens a job trains, from the lengths of its samples; if it stops early, they are fewer."""
    return BatchSchedule.of(spec, len(lengths)).num_tokens(lengths)


def lock_tenant(tx: Tx, tenant: str) -> int | None:
    """Locks the tenant, so that its tokens are not counted elsewhere meanwhile, and returns its token limit."""
    query = sa.select(TENANTS.c.max_trained_tokens).where(TENANTS.c.id == tenant)
    # This lock does not stop inserts of rows that refer to the tenant.
    limit = tx.execute(query.with_for_update(key_share=True)).scalar_one()
    return None if limit is None else int(limit)


def _refuse(found: TokenUsage, limit: int, text: str, more: int) -> None:
    if found.trained + found.reserved + more > limit:
        raise OverLimit(
            f"{found.trained:,} tokens have been trained of at most {limit:,}, {found.reserved:,} more are reserved by "
            f"jobs that have not ended, and this job needs {text}; the operator can raise the limit."
        )
