"""A service for tests: database and files in a directory, tenants with keys, and the real SDK talking to the app."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
from fastapi import FastAPI
from migrated import sqlite_file
from starlette.testclient import TestClient

from weft.serve.api.app import make_app
from weft.serve.blobs import Blobs
from weft.serve.db import files, tenants
from weft.serve.db.engine import Database, migrate, open_database
from weft.serve.db.jobs import move
from weft.serve.settings import ServiceLimits, Settings

TENANTS = ("acme", "globex")


def chat_lines(num: int = 12) -> bytes:
    """A training file of chats."""
    turns = ({"role": "user", "content": "hi"}, {"role": "assistant", "content": "HI"})
    return b"".join(json.dumps({"messages": turns, "n": i}).encode() + b"\n" for i in range(num))


def _archive() -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("adapter_config.json", "{}")
        archive.writestr("adapter_model.safetensors", bytes(range(256)))
    return stream.getvalue()


ADAPTER, RESULTS = _archive(), b"step,train_loss\n1,2.5\n"
"""What a job makes here: an adapter's archive and a table."""


@dataclass
class Home:
    """One service and what its tests need of it."""

    settings: Settings
    database: Database
    blobs: Blobs
    app: FastAPI
    http: TestClient
    keys: dict[str, str] = field(default_factory=dict)

    def sdk(self, tenant: str = "acme", **options: Any) -> openai.OpenAI:
        """The openai SDK as a tenant's client, without retries."""
        options = {"max_retries": 0, "api_key": self.keys.get(tenant, tenant), **options}
        return openai.OpenAI(base_url="http://testserver/v1", http_client=self.http, **options)

    def headers(self, tenant: str = "acme") -> dict[str, str]:
        return {"authorization": f"Bearer {self.keys[tenant]}"}

    def call(self, method: str, path: str, tenant: str = "acme", **options: Any) -> Any:
        headers = {**self.headers(tenant), **options.pop("headers", {})}
        return self.http.request(method, path, headers=headers, **options)

    def upload(self, tenant: str = "acme", data: bytes | None = None, name: str = "train.jsonl") -> str:
        content = chat_lines() if data is None else data
        return self.sdk(tenant).files.create(file=(name, content), purpose="fine-tune").id

    def job(self, tenant: str = "acme", file: str | None = None, **options: Any) -> str:
        file = file or self.upload(tenant)
        return self.sdk(tenant).fine_tuning.jobs.create(model="tiny", training_file=file, **options).id

    def limit(self, tenant: str = "acme", **limits: Any) -> None:
        with self.database.begin() as tx:
            tenants.update_tenant(tx, tenant, **limits)

    def finish(self, job: str, tenant: str = "acme") -> str:
        """What a worker does: trains the job, writes a checkpoint, a model and a result file; returns the model."""
        adapter, results = self.blobs.put(ADAPTER, ".zip"), self.blobs.put(RESULTS)
        name = files.model_name("tiny", tenant, "x", job)
        with self.database.begin() as tx:
            move(tx, tenant, job, "running", fence=0, worker="w")
            step = f"{name}:ckpt-step-1"
            files.add_checkpoint(tx, tenant, job, 1, model=step, metrics={"step": 1}, blob=adapter)
            files.create_model(tx, tenant, name, job=job, base="tiny", blob=adapter, bytes=10)
            result = files.create_file(
                tx,
                tenant,
                filename="results.csv",
                purpose=files.RESULTS,
                bytes=22,
                sha256=hashlib.sha256(RESULTS).hexdigest(),
                blob=results,
            )
            done = {"fine_tuned_model": name, "trained_tokens": 120, "result_files": [result["id"]]}
            move(tx, tenant, job, "succeeded", **done)
        return name

    def count(self, table: Any) -> int:
        with self.database.read() as tx:
            return len(tx.execute(table.select()).all())

    def num_blobs(self) -> int:
        return sum(1 for path in Path(self.blobs.url).rglob("*") if path.is_file())


def make_home(directory: Path, **options: Any) -> Home:
    """A fresh service in a directory."""
    limits = {"file_bytes": 100_000, "line_bytes": 20_000, "disk_floor_bytes": 0, **options.pop("limits", {})}
    settings = Settings(data_dir=directory, limits=ServiceLimits(**limits), **options)
    directory.mkdir(exist_ok=True)
    (directory / "weft.db").write_bytes(sqlite_file())
    database, blobs = open_database(settings.db_url), Blobs(settings.store_url)
    if not database.is_sqlite:
        migrate(database)
    app = make_app(settings, database, blobs)
    home = Home(settings, database, blobs, app, TestClient(app, raise_server_exceptions=False))
    with database.begin() as tx:
        for tenant in ("default", *TENANTS):
            tenants.create_tenant(tx, tenant)
            home.keys[tenant] = tenants.create_key(tx, tenant, scopes=tenants.SCOPES)
    return home
