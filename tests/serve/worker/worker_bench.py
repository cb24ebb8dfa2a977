"""A service without an API: database, file store, tenants and jobs; workers in threads; the result to expect."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from weft.engine.events import Event, StepDone
from weft.engine.train import execute_run, prepare_run
from weft.job_state import FINAL_STATES
from weft.serve.blobs import Blobs
from weft.serve.db.engine import Database, DbRow, open_database
from weft.serve.db.files import create_file, get_model
from weft.serve.db.jobs import create_job, request_change
from weft.serve.db.tables import CHECKPOINTS, EVENTS, FILES, JOBS, METADATA, MODELS
from weft.serve.db.tenants import create_tenant, find_tenant
from weft.serve.new_job import build_spec
from weft.serve.settings import WorkerOptions
from weft.serve.worker.worker import Worker
from weft.spec import RunSpec
from weft.store.run_dir import RunDirectory

CAPACITY = 96
PATIENCE_S = 600.0
"""How long a test waits for what must happen; it matters only if it does not."""
STEP_S = 0.03
"""The least time of a step: a job of twenty does not end, on any machine, between two looks at the database."""
WORDS = ("warp", "Weft", "loom", "Yarn", "shed", "Reed", "heddle", "Shuttle", "selvage", "Twill")
SETTINGS: dict[str, Any] = {
    "max_length": 48,
    "global_batch_size": 4,
    "learning_rate": 2e-3,
    "max_steps": 6,
    "save_steps": 2,
    "adapter": {"r": 4, "target_modules": ["q_proj", "down_proj"], "lora_dropout": 0.2},
}


def rows_of(suffix: str) -> bytes:
    rows = [{"prompt": f"{word}\n", "completion": word.upper() + suffix} for word in WORDS]
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@dataclass
class Bench:
    """Where everything is."""

    folder: Path
    database: Database
    blobs: Blobs
    backbone: str = "tiny"

    @classmethod
    def at(cls, folder: Path, **options: Any) -> Bench:
        database = open_database(f"sqlite:///{folder / 'weft.db'}")
        METADATA.create_all(database.engine)
        return cls(folder, database, Blobs(str(folder / "blobs")), **options)

    def submit(self, tenant: str = "default", *, data: bytes | None = None, priority: int = 0, seed: int = 7,
               suffix: str | None = None, validation: bytes | None = None, **settings: Any) -> str:  # fmt: skip
        """A job in the queue."""
        with self.database.begin() as tx:
            if find_tenant(tx, tenant) is None:
                create_tenant(tx, tenant)
            files = []
            for content in (data or rows_of(tenant), validation):
                if content is None:
                    files.append(None)
                    continue
                blob = self.blobs.put(content, ".jsonl")
                made = create_file(
                    tx,
                    tenant,
                    filename="train.jsonl",
                    purpose="fine-tune",
                    bytes=len(content),
                    sha256=hashlib.sha256(content).hexdigest(),
                    blob=blob,
                )
                files.append(made["id"])
            job = create_job(
                tx, tenant, model="tiny", training_file=str(files[0]), validation_file=files[1],
                settings={**SETTINGS, **settings}, seed=seed, suffix=suffix, priority=priority,
            )  # fmt: skip
            return str(job["id"])

    def job(self, id: str) -> DbRow:
        with self.database.read() as tx:
            return dict(tx.execute(sa.select(JOBS).where(JOBS.c.id == id)).mappings().one())

    def request(self, id: str, wish: str) -> None:
        tenant = self.job(id)["tenant"]
        with self.database.begin() as tx:
            request_change(tx, tenant, id, wish)

    def set(self, id: str, **columns: Any) -> None:
        with self.database.begin() as tx:
            tx.execute(sa.update(JOBS).where(JOBS.c.id == id).values(columns))

    def events(self, id: str, type: str | None = None) -> list[DbRow]:
        query = sa.select(EVENTS).where(EVENTS.c.job == id).order_by(EVENTS.c.seq)
        with self.database.read() as tx:
            found = [dict(row) for row in tx.execute(query).mappings()]
        return [event for event in found if type in (None, event["type"])]

    def wait(self, *ids: str, until: tuple[str, ...] = FINAL_STATES, timeout: float = PATIENCE_S) -> list[DbRow]:
        """The jobs once all of them are in one of the states."""
        deadline = time.monotonic() + timeout
        while True:
            jobs = [self.job(id) for id in ids]
            if all(job["status"] in until for job in jobs):
                return jobs
            assert time.monotonic() < deadline, [(job["id"], job["status"], job["error"]) for job in jobs]
            time.sleep(0.02)

    def wait_for_step(self, id: str, step: int, timeout: float = PATIENCE_S) -> None:
        deadline = time.monotonic() + timeout
        while self.job(id)["step"] < step:
            assert time.monotonic() < deadline, self.job(id)
            time.sleep(0.01)

    def adapter(self, id: str) -> dict[str, bytes]:
        """The files of the model a job has made."""
        job = self.job(id)
        assert job["status"] == "succeeded", job["error"]
        with self.database.read() as tx:
            blob = get_model(tx, job["tenant"], job["fine_tuned_model"])["blob"]
        with self.blobs.open(blob) as stream, zipfile.ZipFile(io.BytesIO(stream.read())) as archive:
            return {name: archive.read(name) for name in archive.namelist()}

    def expected(self, id: str) -> tuple[dict[str, bytes], int]:
        """What `weft train` makes of the same job alone, and the tokens it trains."""
        job = self.job(id)
        folder = self.folder / f"expected-{id}"
        folder.mkdir()
        (folder / "train.jsonl").write_bytes(self._content(job["training_file"]))
        if job["validation_file"]:
            (folder / "eval.jsonl").write_bytes(self._content(job["validation_file"]))
        spec = build_spec(
            job["settings"], name="twin", train_data="train.jsonl", seed=job["seed"],
            eval_data="eval.jsonl" if job["validation_file"] else None,
        )  # fmt: skip
        run = prepare_run(RunSpec(self.backbone, (spec,), capacity=CAPACITY, device="cpu"), base_dir=folder)
        with RunDirectory.open(folder / "run", resume=False) as directory:
            execute_run(run, directory, on_event=lambda _: None)
            status = directory.read_status("twin")
            assert status is not None
            adapter = directory.adapter_dir("twin")
            return {path.name: path.read_bytes() for path in adapter.iterdir()}, status["trained_tokens"]

    def stored_blobs(self) -> set[str]:
        """What is in the file store."""
        root = self.folder / "blobs"
        return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}

    def named_blobs(self) -> set[str]:
        """What rows name is in the file store."""
        columns = (FILES.c.blob, MODELS.c.blob, CHECKPOINTS.c.blob, JOBS.c.saved_blob)
        with self.database.read() as tx:
            return {blob for column in columns for blob in tx.scalars(sa.select(column)) if blob is not None}

    def _content(self, file: str) -> bytes:
        with self.database.read() as tx:
            blob = tx.execute(sa.select(FILES.c.blob).where(FILES.c.id == file)).scalar_one()
        with self.blobs.open(blob) as stream:
            return stream.read()

    def options(self, **changes: Any) -> WorkerOptions:
        options = WorkerOptions(self.folder / "data", capacity=CAPACITY, pulse_s=0.1, lease_s=5.0, max_jobs=8)
        return replace(options, backbone=replace(options.backbone, base_model=self.backbone, device="cpu"), **changes)

    @contextlib.contextmanager
    def worker(self, **changes: Any) -> Iterator[Worker]:
        """A worker in a thread; stopped, and checked to have ended well, when the block ends."""
        worker = Worker(self.options(**changes), self.database, self.blobs)
        failed: list[BaseException] = []
        events = worker.engine.events

        def unhurried() -> Iterator[Event]:
            for event in events():
                if isinstance(event, StepDone):
                    time.sleep(STEP_S)
                yield event

        worker.engine.events = unhurried  # type: ignore[method-assign]

        def run() -> None:
            try:
                worker.run()
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=run, name="worker")
        thread.start()
        try:
            yield worker
        finally:
            worker.stop()
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
            if failed:
                raise failed[0]


def wait_until(happens: Callable[[], Any]) -> None:
    """Returns once it happens; looks again and again."""
    pause = threading.Event()
    for _ in range(int(PATIENCE_S / 0.02)):
        if happens():
            return
        pause.wait(0.02)
    raise AssertionError("timed out while waiting")
