"""Prepares claimed jobs for the engine: fetches their files, reads their samples and finds their checkpoint.

This happens one job after another in a thread of its own, so that a long file holds up neither training nor the
database.
"""

from __future__ import annotations

import datetime
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import sqlalchemy as sa

from weft.data.chat.chat_template import Tokenizer
from weft.data.dataset import JobData
from weft.data.load import load_job_data
from weft.errors import ConfigError, DataError
from weft.serve.blobs import Blobs
from weft.serve.db.engine import Database, Tx
from weft.serve.db.tables import FILES
from weft.serve.errors import NotFound
from weft.serve.jobs.quota import count_tokens, reserve
from weft.serve.jobs.spec import spec_of
from weft.serve.records.checkpoints import get_checkpoint
from weft.serve.records.files import get_file
from weft.serve.records.models import get_model
from weft.serve.records.rows import DbRow
from weft.serve.worker.claim import Claim
from weft.serve.worker.directory import WorkDirectory
from weft.serve.worker.prompts.adapter_cache import unpack
from weft.spec import JobSpec
from weft.store.atomic import storage_errors

PreparedJob = tuple[JobSpec, JobData]


class JobPreparer:
    """A thread that prepares claimed jobs one after another, in the order in which they came."""

    def __init__(
        self,
        database: Database,
        blobs: Blobs,
        work: WorkDirectory,
        tokenizer: Tokenizer,
        *,
        on_ready: Callable[[], None],
    ) -> None:
        """`on_ready` is called, in the preparer's thread, after each job."""
        self._database, self._blobs, self._work, self._tokenizer = database, blobs, work, tokenizer
        self._on_ready = on_ready
        self._under_way: deque[tuple[Claim, Future[PreparedJob]]] = deque()
        self._queue: queue.SimpleQueue[tuple[Claim, Future[PreparedJob]]] = queue.SimpleQueue()
        # A daemon: a process that must go does not wait for a long file to be read.
        self._thread = threading.Thread(target=self._run, name="weft-prepare", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def put(self, claim: Claim) -> None:
        """Adds a job to those that wait to be prepared."""
        future: Future[PreparedJob] = Future()
        self._under_way.append((claim, future))
        self._queue.put((claim, future))

    @property
    def has_ready(self) -> bool:
        """Whether the first job is prepared, or has turned out not to be trainable."""
        return bool(self._under_way) and self._under_way[0][1].done()

    def ready(self) -> Iterator[tuple[Claim, Future[PreparedJob]]]:
        """Yields each job that is done once; its future holds the prepared job or what is wrong with it."""
        while self.has_ready:
            yield self._under_way.popleft()

    def _run(self) -> None:
        while True:
            claim, future = self._queue.get()
            try:
                future.set_result(prepare(claim, self._database, self._blobs, self._work, self._tokenizer))
            except Exception as error:
                future.set_exception(error)
            self._on_ready()


def prepare(claim: Claim, database: Database, blobs: Blobs, work: WorkDirectory, tokenizer: Tokenizer) -> PreparedJob:
    """Returns the job as the engine takes it, and brings its newest checkpoint, if there is one, into `work`."""
    job = claim.job
    place = work.data_dir(claim.name)
    train = _fetch(job, "training_file", database, blobs, place)
    evaluation = _fetch(job, "validation_file", database, blobs, place) if job["validation_file"] else None
    spec = replace(spec_of(job, train, evaluation), name=claim.name)
    if spec.init_adapter is not None:
        spec = replace(spec, init_adapter=fetch_init_adapter(job, spec.init_adapter, database, blobs, place))
    # Whenever and wherever a job is prepared again, it is the moment it was created to its chat template.
    created = datetime.datetime.fromtimestamp(job["created_at"], datetime.UTC)
    data = load_job_data(spec, tokenizer, place, clock=created)
    with database.begin() as tx:
        reserve(tx, job, count_tokens(spec, data.train.group_tokens))
    step = work.adopt(claim.name, claim.id)
    if step is not None:
        claim.earlier = work.metrics(claim.name, step)
    return spec, data


def _fetch(job: DbRow, column: str, database: Database, blobs: Blobs, place: Path) -> str:
    """Copies a file of the job into `place`; the copy is named by the file's id, which error messages then quote."""
    name = f"{job[column]}.jsonl"
    try:
        with database.read() as tx:
            blob = _blob_of_file(tx, job, job[column])
        blobs.fetch(blob, place / name)
    except NotFound:
        raise DataError("the file was deleted before the job could read it.", where=str(job[column])) from None
    return name


def _blob_of_file(tx: Tx, job: DbRow, file: str) -> str:
    """Finds a file's blob; a job that has begun keeps what it reads, even if the file is deleted meanwhile."""
    if job["started_at"] is None:
        return str(get_file(tx, job["tenant"], file)["blob"])
    return str(
        tx.execute(sa.select(FILES.c.blob).where(FILES.c.tenant == job["tenant"], FILES.c.id == file)).scalar_one()
    )


def fetch_init_adapter(job: DbRow, model: str, database: Database, blobs: Blobs, place: Path) -> str:
    """Unpacks the adapter from which the job starts, a model or checkpoint of its tenant; returns the directory."""
    directory = place / "start"
    with storage_errors(directory):
        directory.mkdir(exist_ok=True)
    try:
        with database.read() as tx:
            blob = _blob_of_model(tx, job["tenant"], model)
        blobs.fetch(blob, directory / "archive")
    except NotFound:
        raise ConfigError(f"{model} was deleted before the job could start from it.", where="model") from None
    unpack(directory / "archive", directory)
    return str(directory)


def _blob_of_model(tx: Tx, tenant: str, model: str) -> str:
    if ":ckpt-step-" not in model:
        return str(get_model(tx, tenant, model)["blob"])
    blob = get_checkpoint(tx, tenant, model)["blob"]
    if blob is None:
        raise NotFound(f"The model '{model}' has no weights.", where="model")
    return str(blob)
