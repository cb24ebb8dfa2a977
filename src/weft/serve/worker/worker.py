"""A worker: it loads one backbone, trains every job that is claimed on one engine, and answers prompts in between.

The thread that calls `run` trains and answers. It touches neither the database nor the file store, so neither can hold
it up.
"""

from __future__ import annotations

import itertools
import logging
import os
import tempfile
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch

import weft
from weft.engine.engine import Engine
from weft.engine.events import (
    CheckpointSaved,
    EvalDone,
    EvalSliceDone,
    Event,
    JobEnded,
    JobEvent,
    JobPaused,
    JobStarted,
    JobWarning,
    MicrobatchDone,
)
from weft.engine.execute.local import LocalExecutor
from weft.engine.execute.memory import USUAL_JOBS, load_within, start_capacity
from weft.engine.execute.protocol import Replica
from weft.engine.inference.adapter_slots import LiveAdapter
from weft.engine.inference.attach import read_stored
from weft.errors import DataError
from weft.kernels.device import free_and_total_bytes
from weft.model.backbone import Backbone
from weft.model.resolve import resolve
from weft.parallel.staged_prompts import StagedPrompts
from weft.parallel.stages.load_stages import lessened, load_for_service
from weft.parallel.stages.staged import StagedExecutor
from weft.plan.pack import planner_named
from weft.serve.blobs import Blobs
from weft.serve.db.engine import Database
from weft.serve.errors import Busy
from weft.serve.settings import WorkerOptions
from weft.serve.worker.claim import EngineNotice
from weft.serve.worker.database_sync import DatabaseSync
from weft.serve.worker.directory import WorkDirectory
from weft.serve.worker.prompt_scheduler import ADAPTER_SHARE, ADAPTER_SHARE_ALONE, PromptScheduler
from weft.serve.worker.prompt_server import PromptServer
from weft.store.atomic import storage_errors
from weft.store.wall_clock import Activity, WallClock, process_start_s

LOG = logging.getLogger("weft.serve.worker")
IDLE_S = 0.02
"""How long an idle worker waits before it looks for work again."""
PROGRAM_SPANS = 60
"""How many spans of the current program the dashboard shows."""
CLASSIFIES = "has a head for labels: it classifies and does not write."
RATE_S = 5.0
"""The seconds over which tokens per second are averaged."""


class Worker:
    def __init__(self, options: WorkerOptions, database: Database, blobs: Blobs, wall: WallClock | None = None) -> None:
        self._options = options
        self._wall = wall or WallClock(process_start_s())
        # The capacity is a number from here on: which jobs are taken must not depend on who came first.
        replica: Backbone | StagedExecutor
        notes: tuple[str, ...] = ()
        if options.layout is None:
            replica, notes = load_within(options.backbone, options.memory_limit, USUAL_JOBS)
            capacity, planner = start_capacity(replica, options.capacity), planner_named("auto")
        else:
            replica, planner, capacity = load_for_service(
                resolve(options.backbone), options.layout, options.memory_limit, options.capacity
            )
        self._wall.add_start(Activity.LOADING)
        self.engine = Engine(
            replica,
            capacity=capacity,
            planner=planner,
            max_jobs=max(1, options.max_jobs),
            job_memory=options.job_memory,
            wall=self._wall,
        )
        if options.layout is not None:
            notes = lessened(self.engine, 0, options.layout.num_lessened)
        for note in notes:
            LOG.warning("%s", note)
        self._job_bytes = self.engine.budget(()).usable_bytes
        """What jobs may take together, before any has come; by it workers are compared."""
        self._work = WorkDirectory(options.data_dir, options.id, options.base_model)
        self.engine.keep_in(self._work.run)
        self.engine.export_checkpoints(self._export_to)
        adapter_share = ADAPTER_SHARE if options.max_jobs else ADAPTER_SHARE_ALONE
        prompts = replica if isinstance(replica, Backbone) else StagedPrompts(replica, self.engine.sync_progress)
        self.scheduler = PromptScheduler(prompts, capacity, options.sampling_share, adapter_share, self._live_adapter)
        self._server = PromptServer(self.scheduler, blobs, self._work.run.path / "adapters", options)
        self._has_work = threading.Event()
        address = (self._server.address, self._server.token)
        self.sync = DatabaseSync(
            options, database, blobs, self._work, self.engine, address=address, wake=self._has_work.set
        )
        self._is_stopping = False
        self._rate: deque[tuple[float, int]] = deque()
        self._info_due = 0.0

    @property
    def address(self) -> str:
        return self._server.address

    def stop(self) -> None:
        """Makes `run` finish the step, save everything, give the jobs back and return; fit for signal handlers."""
        self._is_stopping = True

    def run(self) -> None:
        self._update_info()
        self._server.start()
        fields = {"worker": self._options.id, "base_model": self._options.base_model, "address": self.address}
        fields["capacity"] = str(self.engine.limits.capacity)
        LOG.info("ready", extra={"fields": fields})
        try:
            self.sync.start()
            while not self._is_stopping:
                self._has_work.clear()
                for event in self.engine.events():
                    self._pass_on(event)
                    self._after(event)
                while not self._is_stopping and not self._has_work.is_set():
                    self._idle()
            self._server.close()
            self.sync.drain()
            # Every job is saved at its last step boundary.
            self.engine.stop()
            for event in list(self.engine.events()):
                self._pass_on(event)
            self.sync.leave()
        except BaseException:
            self.sync.abandon()
            raise
        finally:
            self._server.close()
            self.engine.finish_files()
            self.engine.close()
            self._work.close()

    def _pass_on(self, event: Event) -> None:
        """Passes an event on; the engine forgets a job that has ended."""
        if isinstance(event, MicrobatchDone):
            self._rate.append((time.monotonic(), event.tokens))
            return
        if isinstance(event, JobWarning):
            for name in event.jobs:
                self.sync.add_notice(name, EngineNotice(event))
            LOG.warning("%s", ": ".join(filter(None, (", ".join(event.jobs), event.message))))
            return
        if not isinstance(event, JobEvent):
            return
        job = self.engine.jobs.get(event.job)
        tokens = job.num_tokens if job is not None else 0
        export = self._exported(event) if isinstance(event, CheckpointSaved) else None
        data = job.data.eval if job is not None and isinstance(event, EvalDone) else None
        evaluated = 0 if data is None else data.summary.num_tokens
        is_end = isinstance(event, JobEnded)
        is_news = is_end or isinstance(event, JobStarted | JobPaused)
        self.sync.add_notice(event.job, EngineNotice(event, tokens, evaluated, export), hurry=is_news)
        if is_end and job is not None:
            self.engine.forget(event.job)

    def _live_adapter(self, job: str) -> LiveAdapter:
        """The adapter of a job that trains here, at its last step boundary: no step is half done between turns."""
        name = next((name for name in self.engine.jobs if name.rpartition(".")[0] == job), None)
        if name is None:
            raise Busy("the job does not train here at the moment; try again.")
        executor = self.engine.executor
        if not isinstance(executor, LocalExecutor):
            return self._exported_now(job, name)
        executed = executor.jobs[name]
        if executed.weights.adapter.head is not None:
            raise DataError(CLASSIFIES, where="model")
        return LiveAdapter(f"{job}@{name}.{executed.weights.adapter.version}", *executed.weights.shown())

    def _exported_now(self, job: str, name: str) -> LiveAdapter:
        """The same where its tensors are in other processes: through files."""
        with storage_errors(self._work.run.path), tempfile.TemporaryDirectory(dir=self._work.run.path) as folder:
            self.engine.export_adapter(name, Path(folder) / "adapter")
            stored = read_stored(Path(folder) / "adapter")
        if stored.head is not None:
            raise DataError(CLASSIFIES, where="model")
        return LiveAdapter(f"{job}@{name}.{self.engine.jobs[name].step}", stored.spec, stored.tensors)

    def _export_to(self, job: str, step: int) -> Path | None:
        """Where the adapter at a checkpoint is exported for the file store; nowhere while leaving: time is short."""
        return None if self._is_stopping else self._work.run.job_dir(job) / f"export-{step}"

    def _exported(self, event: CheckpointSaved) -> Path | None:
        """The adapter that was exported at a checkpoint; without it the checkpoint cannot be prompted, but is safe."""
        directory = self._work.run.job_dir(event.job) / f"export-{event.step}"
        return directory if directory.is_dir() else None

    def _after(self, event: Event) -> None:
        """After each event, gives prompts their turn, checks the database thread and passes a stop on."""
        if self._is_stopping:
            self.engine.stop()
        elif isinstance(event, MicrobatchDone | EvalSliceDone):
            self._answer_prompts(event.seconds)
        self._check_sync()

    def _idle(self) -> None:
        if not self._answer_prompts(None):
            self._has_work.wait(IDLE_S)
        if isinstance(self.engine.executor, StagedExecutor):
            self.engine.executor.stages.check()
        self._check_sync()

    def _answer_prompts(self, trained_s: float | None) -> bool:
        begun_s = time.perf_counter()
        is_busy = self.scheduler.take_turn(trained_s)
        if is_busy:
            ended_s = time.perf_counter()
            self._wall.add(Activity.COMPUTING, ended_s - begun_s, ended_s)
        return is_busy

    def _check_sync(self) -> None:
        self.sync.trainer_seen_at = time.monotonic()
        if self.sync.crash is not None:
            raise self.sync.crash
        if self.sync.is_dismissed:
            self.stop()
        if time.monotonic() >= self._info_due:
            self._info_due = time.monotonic() + 1.0
            self._update_info()

    def _update_info(self) -> None:
        engine = self.engine
        spans = list(itertools.islice(reversed(engine.timeline.spans), PROGRAM_SPANS))
        self.sync.info = {
            "version": weft.__version__,
            "pid": os.getpid(),
            "kernels": engine.executor.facts.kernels,
            "capacity": engine.limits.capacity,
            "max_length": min(engine.limits.capacity, engine.executor.facts.max_positions),
            "max_jobs": self._options.max_jobs,
            "job_bytes": self._job_bytes,
            **_device_info(engine.executor),
            "tokens_per_s": round(self._tokens_per_s(), 1),
            "time": engine.time_split.to_json(),
            "jobs": [
                {
                    "id": name.rpartition(".")[0],
                    "tenant": job.spec.tenant,
                    "state": str(job.state),
                    "step": job.step,
                    "total_steps": job.num_steps,
                    "trained_tokens": job.num_tokens,
                    "priority": job.spec.priority,
                }
                for name, job in list(engine.jobs.items())
            ],
            "adapters": self._server.adapters,
            "prompts": {"waiting": self.scheduler.num_waiting, "answered": self.scheduler.num_answered},
            "program": [
                {
                    "name": span.name,
                    "start_s": round(span.start_s, 4),
                    "duration_s": round(span.duration_s, 4),
                    "jobs": {name.rpartition(".")[0]: tokens for name, tokens in span.args.get("jobs", {}).items()},
                }
                for span in reversed(spans)
            ],
        }

    def _tokens_per_s(self) -> float:
        at = time.monotonic()
        while self._rate and self._rate[0][0] < at - RATE_S:
            self._rate.popleft()
        return sum(tokens for _, tokens in self._rate) / RATE_S


def _device_info(replica: Replica) -> dict[str, Any]:
    facts = replica.facts
    found = {"device": facts.device, "device_name": facts.environment["device"]}
    if facts.device_kind != "cpu" and facts.takes_programs:
        memory = replica.account.memory()
        held, usable = sum(each.allocated_bytes for each in memory), sum(each.usable_bytes for each in memory)
        return {**found, "memory_bytes": held, "memory_total_bytes": usable}
    if facts.device_kind != "cpu":
        free, total = free_and_total_bytes(torch.device(facts.device))
        return {**found, "memory_bytes": total - free, "memory_total_bytes": total}
    pages = int(Path("/proc/self/statm").read_text().split()[1]) if Path("/proc/self/statm").exists() else 0
    page = os.sysconf("SC_PAGE_SIZE")
    total = os.sysconf("SC_PHYS_PAGES") * page
    return {"device": "cpu", "device_name": "CPU", "memory_bytes": pages * page, "memory_total_bytes": total}
