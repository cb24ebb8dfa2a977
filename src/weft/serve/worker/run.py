"""Runs a worker: one backbone, loaded once; one engine that trains whatever the clerk claims; prompts in between.

The thread that calls `run` trains and answers. It touches neither the database nor the file store, so neither can hold
it up.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch

import weft
from weft.engine.capacity import load_within, start_capacity
from weft.engine.engine import Engine
from weft.engine.events import (
    CheckpointSaved,
    Event,
    JobEnded,
    JobEvent,
    JobPaused,
    JobStarted,
    JobWarning,
    MicrobatchDone,
)
from weft.errors import StorageError
from weft.kernels.device import device_name, free_and_total_bytes, is_gpu
from weft.plan.pack import planner_named
from weft.serve.blobs import Blobs
from weft.serve.db.engine import Database
from weft.serve.worker.clerk import Clerk
from weft.serve.worker.directory import WorkDirectory
from weft.serve.worker.held import Heard
from weft.serve.worker.options import WorkerOptions
from weft.serve.worker.prompts import PromptServer
from weft.serve.worker.speaker import Speaker

LOG = logging.getLogger("weft.serve.worker")
IDLE_S = 0.02
"""How often an idle worker looks up."""
PROGRAM_SPANS = 60
"""Of the current program, what the dashboard shows."""
RATE_S = 5.0
"""Tokens per second are those of so long a time."""


class Worker:
    """A worker that has loaded its backbone."""

    def __init__(self, options: WorkerOptions, database: Database, blobs: Blobs) -> None:
        self._options = options
        backbone, notes = load_within(options.backbone, options.memory_limit)
        for note in notes:
            LOG.warning("%s", note)
        # A number from here on: which jobs are taken must not depend on who came first.
        capacity = start_capacity(backbone, options.capacity)
        self.engine = Engine(
            backbone,
            capacity=capacity,
            planner=planner_named("auto"),
            max_jobs=options.max_jobs,
            job_memory=options.job_memory,
        )
        self._work = WorkDirectory(options.data_dir, options.id, options.base_model)
        self.engine.keep_in(self._work.run)
        self.speaker = Speaker(backbone, capacity)
        self._server = PromptServer(self.speaker, blobs, self._work.run.path / "voices", options)
        self._has_work = threading.Event()
        address = (self._server.address, self._server.token)
        self.clerk = Clerk(options, database, blobs, self._work, self.engine, address=address, wake=self._has_work.set)
        self._is_stopping = False
        self._rate: deque[tuple[float, int]] = deque()
        self._info_due = 0.0

    @property
    def address(self) -> str:
        """Where it answers prompts."""
        return self._server.address

    def stop(self) -> None:
        """Finish the step, checkpoint everything, give the jobs back; `run` then returns. Fit for signal handlers."""
        self._is_stopping = True

    def run(self) -> None:
        """Trains and answers until asked to stop."""
        self._tell_info()
        self._server.start()
        fields = {"worker": self._options.id, "base_model": self._options.base_model, "address": self.address}
        fields["capacity"] = str(self.engine.limits.capacity)
        LOG.info("ready", extra={"fields": fields})
        try:
            self.clerk.start()
            while not self._is_stopping:
                self._has_work.clear()
                for event in self.engine.events():
                    self._hear(event)
                    self._between(event)
                while not self._is_stopping and not self._has_work.is_set():
                    self._rest()
            self._server.close()
            self.clerk.drain()
            for event in self._last_events():
                self._hear(event)
            self.clerk.leave()
        except BaseException:
            self.clerk.abandon()
            raise
        finally:
            self._server.close()
            self._work.close()

    def _last_events(self) -> list[Event]:
        """Every job at its last step boundary, saved."""
        self.engine.stop()
        return list(self.engine.events())

    def _hear(self, event: Event) -> None:
        """Passes on what happened; what the engine has no more use for is forgotten."""
        if isinstance(event, MicrobatchDone):
            self._rate.append((time.monotonic(), event.tokens))
            return
        if isinstance(event, JobWarning):
            for name in event.jobs:
                self.clerk.hear(name, Heard(event))
            LOG.warning("%s", ": ".join(filter(None, (", ".join(event.jobs), event.message))))
            return
        if not isinstance(event, JobEvent):
            return
        job = self.engine.jobs.get(event.job)
        tokens = job.num_tokens if job is not None else 0
        export = self._export(event) if isinstance(event, CheckpointSaved) else None
        is_end = isinstance(event, JobEnded)
        is_news = is_end or isinstance(event, JobStarted | JobPaused)
        self.clerk.hear(event.job, Heard(event, tokens, export), hurry=is_news)
        if is_end and job is not None:
            self.engine.forget(event.job)

    def _export(self, event: CheckpointSaved) -> Path | None:
        """The adapter as it is at a checkpoint, for the file store; not while leaving, when time is short."""
        if self._is_stopping:
            return None
        directory = self._work.run.job_dir(event.job) / f"export-{event.step}"
        try:
            self.engine.export_adapter(event.job, directory)
        except StorageError as error:
            # The checkpoint itself is there; only that nobody can try it out.
            LOG.warning("no adapter of step %d of %s: %s", event.step, event.job, error)
            return None
        return directory

    def _between(self, event: Event) -> None:
        """After each event: prompts have their turn, the clerk is looked after, and a stop is passed on."""
        if self._is_stopping:
            self.engine.stop()
        elif isinstance(event, MicrobatchDone):
            self.speaker.take_turn(event.seconds)
        self._look_after()

    def _rest(self) -> None:
        """Nothing to train: prompts have all the time there is."""
        if not self.speaker.take_turn(None):
            self._has_work.wait(IDLE_S)
        self._look_after()

    def _look_after(self) -> None:
        self.clerk.trainer_seen_at = time.monotonic()
        if self.clerk.crash is not None:
            raise self.clerk.crash
        if time.monotonic() >= self._info_due:
            self._info_due = time.monotonic() + 1.0
            self._tell_info()

    def _tell_info(self) -> None:
        """What the worker's row says about it: for the dashboard and the metrics page."""
        engine, backbone = self.engine, self.engine.backbone
        spans = list(itertools.islice(reversed(engine.timeline.spans), PROGRAM_SPANS))
        self.clerk.info = {
            "version": weft.__version__,
            "pid": os.getpid(),
            "kernels": backbone.kernels,
            "capacity": engine.limits.capacity,
            "max_jobs": self._options.max_jobs,
            **_device_info(backbone.device),
            "tokens_per_s": round(self._tokens_per_s(), 1),
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
            "prompts": {"waiting": self.speaker.num_waiting, "answered": self.speaker.num_answered},
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


def run_worker(options: WorkerOptions, database: Database, blobs: Blobs) -> None:
    """Loads the backbone and trains until the process is asked to stop."""
    Worker(options, database, blobs).run()


def _device_info(device: torch.device) -> dict[str, Any]:
    if is_gpu(device):
        free, total = free_and_total_bytes(device)
        return {
            "device": str(device),
            "device_name": device_name(device),
            "memory_bytes": total - free,
            "memory_total_bytes": total,
        }
    pages = int(Path("/proc/self/statm").read_text().split()[1]) if Path("/proc/self/statm").exists() else 0
    page = os.sysconf("SC_PAGE_SIZE")
    total = os.sysconf("SC_PHYS_PAGES") * page
    return {"device": "cpu", "device_name": "CPU", "memory_bytes": pages * page, "memory_total_bytes": total}
