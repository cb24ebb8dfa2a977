"""The real app on a database of scripted jobs, with a stand-in for the worker: a dashboard without training.

Run as a script, with a port, it serves until stopped and prints the address and the keys of a user and an operator.
"""

from __future__ import annotations

import copy
import hashlib
import http.server
import itertools
import json
import math
import random
import socket
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sqlalchemy as sa
import uvicorn

from weft.serve.api.app import make_app
from weft.serve.blobs import Blobs
from weft.serve.dashboard import router
from weft.serve.db.engine import migrate, new_id, now, open_database
from weft.serve.db.files import add_checkpoint, create_file, create_model, model_name
from weft.serve.db.jobs import add_event, create_job, move
from weft.serve.db.tables import JOBS
from weft.serve.db.tenants import SCOPES, create_key, create_tenant
from weft.serve.db.usage import add_usage
from weft.serve.db.workers import put_worker
from weft.serve.settings import Settings
from weft.store.wall_clock import Activity, TimeSplit

SPENT = TimeSplit({a: round(s * 1e9) for a, s in zip(Activity, (3600, 240, 0, 60, 30, 15, 555), strict=True)})
"""Where the worker's hour and a quarter went."""
GIB = 2**30
_GUESTS = itertools.count()
ANSWER = "The warp stays where it is and the weft runs through it."
NUM_FIRST = 3
"""Words of an answer that come at once."""


class Stage:
    """A service of two tenants, `acme` with jobs and `rival`; keys of a user, an operator and a rival."""

    def __init__(self, folder: Path, *, auth: bool = True) -> None:
        self.settings = Settings(data_dir=folder, auth=auth)
        self.database = open_database(self.settings.db_url)
        migrate(self.database)
        self.blobs = Blobs(self.settings.store_url)
        self.app = make_app(self.settings, self.database, self.blobs)
        if not any(getattr(route, "path", "") == "/dashboard/overview" for route in self.app.routes):
            self.app.include_router(router)
        self._let_in("acme" if auth else "default", "rival")
        self.worker = AnsweringWorker()

    def guest(self) -> Stage:
        """The same service seen by two tenants that have nothing yet."""
        made = copy.copy(self)
        number = next(_GUESTS)
        made._let_in(f"acme-{number}", f"rival-{number}")
        return made

    def _let_in(self, tenant: str, other: str) -> None:
        self.tenant, self.other = tenant, other
        with self.database.begin() as tx:
            create_tenant(tx, tenant, "Acme", max_stored_bytes=8 * GIB, max_active_jobs=20)
            create_tenant(tx, other, "Rival")
            self.key = create_key(tx, tenant, "laptop")
            self.admin = create_key(tx, tenant, "operator", scopes=SCOPES)
            self.rival = create_key(tx, other, "theirs")

    def close(self) -> None:
        self.worker.close()
        self.database.close()

    def job(
        self, suffix: str, *, tenant: str | None = None, model: str = "tiny", start: str | None = None, **columns: Any
    ) -> str:
        """A queued job, which goes on from the model `start`."""
        tenant = tenant or self.tenant
        with self.database.begin() as tx:
            content = b'{"prompt":"a","completion":"b"}\n'
            blob, sha256 = self.blobs.put(content), hashlib.sha256(content).hexdigest()
            file = create_file(
                tx, tenant, filename=f"{suffix}.jsonl", purpose="fine-tune", bytes=3200, sha256=sha256, blob=blob
            )
            settings = {"num_train_epochs": 3, "global_batch_size": 8, "learning_rate": 2e-4, "adapter": {"r": 16}}
            settings |= {"init_adapter": start} if start else {}
            job = create_job(
                tx, tenant, model=model, training_file=file["id"], suffix=suffix, settings=settings, **columns
            )
        return str(job["id"])

    def start(self, job: str, total: int, *, tenant: str | None = None) -> None:
        """The worker has taken the job."""
        with self.database.begin() as tx:
            columns = {
                "total_steps": total,
                "started_at": int(now(tx)),
                "worker": "worker-1",
                "lease_until": now(tx) + 1e6,
            }
            move(tx, tenant or self.tenant, job, "running", **columns)

    def train(self, job: str, first: int, last: int, total: int, *, floor: float = 0.6) -> None:
        """Metrics of some steps, with a validation every 20."""
        noise = random.Random(job)
        with self.database.begin() as tx:
            for step in range(first, last + 1):
                loss = floor + 2.4 * math.exp(-step / (0.25 * total)) + noise.gauss(0, 0.05)
                data = {"step": step, "total_steps": total, "train_loss": loss, "grad_norm": 1 / (1 + step / 9)}
                data |= {"learning_rate": 2e-4 * (1 - step / total), "trained_tokens": 2048 * step}
                data |= {"train_mean_token_accuracy": step / total}
                add_event(
                    tx, self.tenant, job, "info", f"Step {step}/{total}: training loss={loss:.4f}", "metrics", data
                )
                if step % 20 == 0:
                    valid = {"step": step, "valid_loss": loss + 0.1, "valid_mean_token_accuracy": 0.5 * step / total}
                    add_event(
                        tx, self.tenant, job, "info", f"Step {step}: validation loss={loss:.4f}", "metrics", valid
                    )
                    name = f"{model_name('tiny', self.tenant, 'x', job)}:ckpt-step-{step}"
                    add_checkpoint(tx, self.tenant, job, step, model=name, metrics={"train_loss": loss, **valid})
            finish = int(now(tx)) + 130
            changes = {"step": last, "trained_tokens": 2048 * last, "estimated_finish": finish}
            tx.execute(sa.update(JOBS).where(JOBS.c.id == job).values(changes))

    def succeed(self, job: str, suffix: str) -> str:
        """The job ends as a model."""
        with self.database.begin() as tx:
            model = model_name("tiny", self.tenant, suffix, job)
            blob = self.blobs.put(b"PK\x05\x06" + bytes(18), ".zip")
            create_model(tx, self.tenant, model, job=job, base="tiny", blob=blob, bytes=22)
            move(tx, self.tenant, job, "succeeded", fine_tuned_model=model)
        return model

    def beat(self, jobs: dict[str, str], speed: float = 18_400.0, worker: str = "worker-0a1b2c3d") -> None:
        """A sign of life of the worker; `jobs` are ids and their tenants."""
        shares = {job: 400 + 150 * i for i, job in enumerate(jobs)}
        program = []
        for i in range(12):
            program.append(
                {"name": "forward_backward", "start_s": i, "duration_s": 0.09 + 0.01 * (i % 3), "jobs": shares}
            )
            program.append({"name": "step", "start_s": i, "duration_s": 0.012, "jobs": dict.fromkeys(jobs, 0)})
        info = {
            "device": "cuda:0", "device_name": "NVIDIA H200",
            "memory_bytes": int(61.5 * GIB), "memory_total_bytes": 139 * GIB,
            "max_length": 2048, "max_jobs": 32, "tokens_per_s": speed, "capacity": 2048,
            "program": program, "time": SPENT.to_json(),
            "jobs": [{"id": id, "tenant": tenant, "state": "running"} for id, tenant in jobs.items()],
        }  # fmt: skip
        with self.database.begin() as tx:
            put_worker(
                tx, worker, base_model="tiny", address=self.worker.address, token="t", info=info, machine="loom-1"
            )

    def full(self) -> dict[str, str]:
        """Jobs in every state, a live worker and some usage; the jobs' ids by name."""
        ids = {}
        for name, floor in (("support-tone", 0.5), ("sql-writer", 0.9)):
            ids[name] = self.job(name)
            self.start(ids[name], 120)
            self.train(ids[name], 1, 120, 120, floor=floor)
            self.succeed(ids[name], name)
        ids["broken"] = self.job("broken")
        self.start(ids["broken"], 60)
        self.train(ids["broken"], 1, 14, 60)
        error = {"code": "diverged", "message": "The loss was not finite for 8 steps in a row.", "param": None}
        with self.database.begin() as tx:
            move(tx, self.tenant, ids["broken"], "failed", message=error["message"], error=error)
        ids["stopped"] = self.job("a-very-long-name-" + "x" * 45)
        with self.database.begin() as tx:
            add_event(tx, self.tenant, ids["stopped"], "warn", "no-place-to-break-" + "x" * 90)
            move(tx, self.tenant, ids["stopped"], "cancelled")
        ids["resting"] = self.job("resting", start=f"{model_name('tiny', self.tenant, 'sql-writer', 'ftjob-0')}")
        with self.database.begin() as tx:
            move(tx, self.tenant, ids["resting"], "paused")
        for name, steps in (("summaries", 73), ("extract-fields", 31)):
            ids[name] = self.job(name)
            self.start(ids[name], 160)
            self.train(ids[name], 1, steps, 160)
        ids["theirs"] = self.job("theirs", tenant="rival")
        self.start(ids["theirs"], 10, tenant="rival")
        ids["waiting"] = self.job("waiting")
        with self.database.begin() as tx:
            for kind, tokens in (("prompt", 31_000), ("completion", 52_000)):
                add_usage(tx, self.tenant, new_id("req_"), kind=kind, tokens=tokens, model="tiny")
        running = {ids["summaries"]: self.tenant, ids["extract-fields"]: self.tenant, ids["theirs"]: "rival"}
        self.beat(running)
        return ids

    def fill_history(self, num_points: int = 120) -> None:
        """As if the app had watched the worker for a while."""
        from weft.serve.dashboard.overview import SAMPLE_S, History

        history = self.app.state.dashboard_history = History()
        for i in range(num_points):
            info = {"tokens_per_s": 17_000 + 2500 * math.sin(i / 9), "memory_bytes": int((58 + i / 30) * GIB)}
            at = time.time() - SAMPLE_S * (num_points - i)
            history.add([{"id": "worker-0a1b2c3d", "seen_at": at, "info": info}])


class AnsweringWorker:
    """Answers prompts as a worker does, a few words at a time."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()
        """Whether it sends more than the first words of an answer."""
        self.goes_on.set()
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                words = (ANSWER if body["model_blob"] else "I do not know what a loom is.").split(" ")
                self.send_response(200)
                self.end_headers()
                for i, word in enumerate(words):
                    if i == NUM_FIRST:
                        outer.goes_on.wait(60)
                    done = i == len(words) - 1
                    piece = {
                        "text": word if done else f"{word} ",
                        "done": done,
                        "prompt_tokens": 9,
                        "completion_tokens": i + 1,
                    }
                    try:
                        self.wfile.write(f"data: {json.dumps(piece)}\n\n".encode())
                        self.wfile.flush()
                    except ConnectionError:
                        return  # the client has stopped listening
                    time.sleep(0.01)

            def log_message(self, *args: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@dataclass(frozen=True)
class House:
    """A service without workers, shared by tests that each come with a tenant of their own."""

    stage: Stage
    live: Live


class Live:
    """The stage's app on a port of its own, in a thread."""

    def __init__(self, stage: Stage, port: int = 0) -> None:
        self._socket = socket.create_server(("127.0.0.1", port))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        config = uvicorn.Config(stage.app, log_level="error", timeout_graceful_shutdown=1)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), daemon=True)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(10)
        self._socket.close()


@dataclass(frozen=True)
class Busy:
    """A service with jobs in every state, shared by tests that only look."""

    stage: Stage
    live: Live
    ids: dict[str, str]

    @property
    def running(self) -> dict[str, str]:
        """Jobs on the worker, with their tenants."""
        mine = {self.ids[name]: self.stage.tenant for name in ("summaries", "extract-fields")}
        return {**mine, self.ids["theirs"]: "rival"}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        play = Stage(Path(folder), auth="--no-auth" not in sys.argv)
        names = play.full()
        play.fill_history()
        live = Live(play, int(sys.argv[1]) if len(sys.argv) > 1 else 0)
        print(live.url, play.key, play.admin, flush=True)
        done = 73
        while True:
            time.sleep(1)
            done = min(done + 1, 159)
            play.train(names["summaries"], done, done, 160)
            play.beat({names["summaries"]: play.tenant, names["theirs"]: "rival"}, 17_000 + random.random() * 3000)
