"""Prepares claimed jobs for the engine: fetches their files, reads their samples and finds their checkpoint.

This happens in threads of their own, so that a long file holds up neither training nor the database. Several jobs are
prepared side by side, and no tenant has all of the threads. A file that is not small is read in a process of its own
with limits of time and memory, so that it can hurt no job but its own.
"""

from __future__ import annotations

import copy
import datetime
import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import sqlalchemy as sa

from weft.data.chat_template import Tokenizer
from weft.data.dataset import JobData
from weft.data.load import load_job_data
from weft.errors import ConfigError, DataError
from weft.serve.blobs import Blobs, unpack
from weft.serve.db.engine import Database, DbRow, Tx
from weft.serve.db.files import get_checkpoint, get_file, get_model
from weft.serve.db.tables import FILES
from weft.serve.db.usage import count_tokens, reserve
from weft.serve.errors import NotFound
from weft.serve.limited_process import FileLimits, LimitedProcess
from weft.serve.new_job import spec_of
from weft.serve.worker.checkpoint_uploads import fetch_saved
from weft.serve.worker.claim import Claim
from weft.serve.worker.directory import WorkDirectory
from weft.serve.worker.prompt_inputs import ADAPTER_FILES
from weft.spec import JobSpec
from weft.store.atomic import storage_errors
from weft.store.wall_clock import Activity, WallClock

PreparedJob = tuple[JobSpec, JobData]


NUM_PREPARERS = 2
SMALL_BYTES = 2**16
"""A file up to this size is read where it is: another process would take longer to start."""


class JobPreparer:
    """Threads that prepare claimed jobs in the order in which they came, except that no tenant has all threads."""

    def __init__(
        self,
        database: Database,
        blobs: Blobs,
        work: WorkDirectory,
        tokenizer: Tokenizer,
        *,
        limits: FileLimits,
        on_ready: Callable[[], None],
        wall: WallClock,
    ) -> None:
        """`on_ready` is called, in a preparer's thread, after each job; `wall` counts what each one takes."""
        self._database, self._blobs, self._work, self._tokenizer = database, blobs, work, tokenizer
        self._limits, self._on_ready, self._wall = limits, on_ready, wall
        self._under_way: list[tuple[Claim, Future[PreparedJob]]] = []
        self._waiting: list[tuple[Claim, Future[PreparedJob]]] = []
        self._busy: Counter[str] = Counter()
        self._changed = threading.Condition()
        self._is_closed = False
        # Daemons: a process that must go does not wait for a long file to be read.
        self._threads = [
            threading.Thread(target=self._run, name="weft-prepare", daemon=True) for _ in range(NUM_PREPARERS)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def put(self, claim: Claim) -> None:
        future: Future[PreparedJob] = Future()
        self._under_way.append((claim, future))
        with self._changed:
            self._waiting.append((claim, future))
            self._changed.notify_all()

    @property
    def has_ready(self) -> bool:
        """Whether a job is prepared, or has turned out not to be trainable."""
        return any(future.done() for _, future in self._under_way)

    def ready(self) -> Iterator[tuple[Claim, Future[PreparedJob]]]:
        """Yields each job that is done once; its future holds the prepared job or what is wrong with it."""
        done = [pair for pair in self._under_way if pair[1].done()]
        for pair in done:
            self._under_way.remove(pair)
            yield pair

    def _run(self) -> None:
        # Threads must not share a tokenizer.
        tokenizer, process = copy.deepcopy(self._tokenizer), LimitedProcess(self._limits)
        while (taken := self._take()) is not None:
            claim, future = taken
            try:
                with self._wall.spending(Activity.PREPARING):
                    prepared = prepare(claim, self._database, self._blobs, self._work, tokenizer, process)
                future.set_result(prepared)
            except Exception as error:
                future.set_exception(error)
            with self._changed:
                self._busy[claim.tenant] -= 1
                self._changed.notify_all()
            self._on_ready()
        process.close()

    def _take(self) -> tuple[Claim, Future[PreparedJob]] | None:
        """Waits for the first job whose tenant leaves a thread to others; None once it is closed."""
        most = max(1, len(self._threads) - 1)
        with self._changed:
            while not self._is_closed:
                for pair in self._waiting:
                    if self._busy[pair[0].tenant] < most:
                        self._waiting.remove(pair)
                        self._busy[pair[0].tenant] += 1
                        return pair
                self._changed.wait()
        return None


def prepare(
    claim: Claim, database: Database, blobs: Blobs, work: WorkDirectory, tokenizer: Tokenizer, process: LimitedProcess
) -> PreparedJob:
    """Returns the job as the engine takes it, and brings its newest checkpoint, if there is one, into `work`."""
    job = claim.job
    folder = work.data_dir(claim.name)
    train = _fetch(job, "training_file", database, blobs, folder)
    evaluation = _fetch(job, "validation_file", database, blobs, folder) if job["validation_file"] else None
    spec = replace(spec_of(job, train, evaluation), name=claim.name)
    if spec.init_adapter is not None:
        spec = replace(spec, init_adapter=fetch_init_adapter(job, spec.init_adapter, database, blobs, folder))
    # Whenever and wherever a job is prepared again, it is the moment it was created to its chat template.
    created = datetime.datetime.fromtimestamp(job["created_at"], datetime.UTC)
    data = _read(spec, tokenizer, folder, created, process)
    with database.begin() as tx:
        reserve(tx, job, count_tokens(spec, data.train.group_tokens))
    step = work.adopt(claim.name, claim.id)
    if job["saved_step"] is not None and (step is None or step < job["saved_step"]):
        stored = fetch_saved(job, claim.name, blobs, work)
        step = step if stored is None else stored
    if step is not None:
        claim.earlier = work.metrics(claim.name, step)
    return spec, data


def _read(
    spec: JobSpec, tokenizer: Tokenizer, folder: Path, clock: datetime.datetime, process: LimitedProcess
) -> JobData:
    """Reads a job's samples, in the process with limits unless its files are small."""
    load = functools.partial(load_job_data, clock=clock)
    if sum(path.stat().st_size for path in folder.glob("*.jsonl")) <= SMALL_BYTES:
        return load(spec, tokenizer, folder)
    try:
        return process.call(load, spec, tokenizer, folder)
    except DataError as error:
        raise error if error.where else DataError(error.message, where=str(spec.train_data[0])) from None


def _fetch(job: DbRow, column: str, database: Database, blobs: Blobs, folder: Path) -> str:
    """Copies a file of the job into `folder`; the copy is named by the file's id, which error messages then quote."""
    name = f"{job[column]}.jsonl"
    try:
        with database.read() as tx:
            blob, sha256 = _blob_of_file(tx, job, job[column])
        blobs.fetch(blob, folder / name, sha256)
    except NotFound:
        error = DataError("the file was deleted before the job could read it.", where=str(job[column]))
        error.setting = "eval_data" if column == "validation_file" else "train_data"
        raise error from None
    return name


def _blob_of_file(tx: Tx, job: DbRow, file: str) -> tuple[str, str]:
    """Finds a file's blob and SHA-256; a job that has begun keeps its files even if they are deleted meanwhile."""
    if job["started_at"] is None:
        get_file(tx, job["tenant"], file)
    query = sa.select(FILES.c.blob, FILES.c.sha256).where(FILES.c.tenant == job["tenant"], FILES.c.id == file)
    blob, sha256 = tx.execute(query).one()
    return blob, sha256


def fetch_init_adapter(job: DbRow, model: str, database: Database, blobs: Blobs, folder: Path) -> str:
    """Unpacks the adapter from which the job starts, a model or checkpoint of its tenant; returns the directory."""
    directory = folder / "start"
    with storage_errors(directory):
        directory.mkdir(exist_ok=True)
    try:
        with database.read() as tx:
            blob = _blob_of_model(tx, job["tenant"], model)
        blobs.fetch(blob, directory / "archive")
    except NotFound:
        raise ConfigError(f"{model} was deleted before the job could start from it.", where="model") from None
    unpack(directory / "archive", directory, ADAPTER_FILES)
    return str(directory)


def _blob_of_model(tx: Tx, tenant: str, model: str) -> str:
    if ":ckpt-step-" not in model:
        return str(get_model(tx, tenant, model)["blob"])
    blob = get_checkpoint(tx, tenant, model)["blob"]
    if blob is None:
        raise NotFound(f"The model '{model}' has no weights.", where="model")
    return str(blob)
