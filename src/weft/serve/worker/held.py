"""A job that this worker has, from the claim to its end here."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from weft.data.dataset import JobData, load_job_data
from weft.data.template import Tokenizer
from weft.engine.events import Event
from weft.errors import DataError
from weft.serve.blobs import Blobs
from weft.serve.db.engine import Database, Tx
from weft.serve.db.tables import FILES
from weft.serve.errors import NotFound
from weft.serve.jobs.quota import count_tokens, reserve
from weft.serve.jobs.spec import spec_of
from weft.serve.records.files import get_file
from weft.serve.records.rows import Record
from weft.serve.worker.directory import WorkDirectory
from weft.serve.worker.start import fetch_start
from weft.spec import JobSpec


@dataclass(frozen=True)
class Heard:
    """What the engine said of a job, and what was true when it said so."""

    event: Event
    tokens: int = 0
    """Trained so far, by the engine's own count."""
    export: Path | None = None
    """Where the adapter was written as it was then."""
    error: dict[str, Any] | None = None
    """What the user is told of a failure, where more is known than the reason."""


@dataclass(eq=False)
class Held:
    """A claim: the job as it was taken, and what this worker has done with it since."""

    job: Record
    """The row at the claim."""
    is_training: bool = False
    """The engine has it; before that its data is being prepared."""
    is_put_back: bool = False
    """It goes back to the queue because this worker cannot prepare it now."""
    asked: str | None = None
    """What was asked of the engine for the user's sake: cancel or pause."""
    priority: int = 0
    retry_at: float | None = None
    """When a job that could not write is tried again, by the monotonic clock."""
    has_stalled: bool = False
    heard: deque[Heard] = field(default_factory=deque)
    """What is not in the database yet, oldest first."""
    blobs: dict[int, str] = field(default_factory=dict)
    """Archives that are in the file store and in no row yet, by place in `heard`'s life: the step they belong to."""
    is_unstored: bool = False
    """It has ended, and its result could not be stored yet."""
    result: Any = None
    """The finished job's blobs, once they are stored."""
    first_step: tuple[int, float] | None = None
    """The first step seen here and when, for the estimate of the end."""
    metrics: dict[str, Any] = field(default_factory=dict)
    """The latest of each metric."""
    earlier: list[dict[str, Any]] = field(default_factory=list)
    """Metrics of the steps before the checkpoint it goes on from: a worker that died may not have told of all."""

    @property
    def id(self) -> str:
        """The job."""
        return str(self.job["id"])

    @property
    def tenant(self) -> str:
        """Its owner."""
        return str(self.job["tenant"])

    @property
    def fence(self) -> int:
        """What shows that it is still ours."""
        return int(self.job["fence"])

    @property
    def name(self) -> str:
        """What engine and directory call it: no two claims of a job are ever mistaken for each other."""
        return f"{self.id}.{self.fence}"


def prepare(
    held: Held, database: Database, blobs: Blobs, work: WorkDirectory, tokenizer: Tokenizer
) -> tuple[JobSpec, JobData]:
    """The job as the engine takes it: its files from the file store, its checkpoint if there is one, its samples."""
    job = held.job
    place = work.data_dir(held.name)
    train = _fetch(job, "training_file", database, blobs, place)
    evaluation = _fetch(job, "validation_file", database, blobs, place) if job["validation_file"] else None
    spec = replace(spec_of(job, train, evaluation), name=held.name)
    if spec.init_adapter is not None:
        spec = replace(spec, init_adapter=fetch_start(job, spec.init_adapter, database, blobs, place))
    data = load_job_data(spec, tokenizer, place)
    with database.begin() as tx:
        reserve(tx, job, count_tokens(spec, [sample.length for sample in data.train.samples]))
    step = work.adopt(held.name, held.id)
    if step is not None:
        held.earlier = work.metrics(held.name, step)
    return spec, data


def _fetch(job: Record, column: str, database: Database, blobs: Blobs, place: Path) -> str:
    """Copies a file of the job here; its name is its id, which is how mistakes in it are reported."""
    name = f"{job[column]}.jsonl"
    try:
        with database.read() as tx:
            blob = _blob_of(tx, job, job[column])
        blobs.fetch(blob, place / name)
    except NotFound:
        raise DataError("the file was deleted before the job could read it.", where=str(job[column])) from None
    return name


def _blob_of(tx: Tx, job: Record, file: str) -> str:
    """Where a file's bytes are; a job that has begun keeps what it reads, whatever becomes of the file."""
    if job["started_at"] is None:
        return str(get_file(tx, job["tenant"], file)["blob"])
    return str(
        tx.execute(sa.select(FILES.c.blob).where(FILES.c.tenant == job["tenant"], FILES.c.id == file)).scalar_one()
    )
