"""The files that are being written of jobs while training goes on, and what became of them."""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from weft.engine.execute.protocol import AdapterWork, CheckpointWork, Executor, ReplicaFaultError, Ticket
from weft.engine.jobs.live_job import LiveJob
from weft.plan.cost.job_state import FLOAT_BYTES, best_bytes, kept_bytes

SNAPSHOT_SHARE = 8
"""All snapshots together take at most one part in so many of the machine's memory, unless one alone takes more."""


class FileKind(Enum):
    """What is written."""

    CHECKPOINT = "checkpoint"
    EXPORT = "export"
    """The adapter as it is at a checkpoint."""
    ADAPTER = "adapter"
    """The adapter at the end."""


@dataclass
class JobFile:
    """Something that is being written, or has been."""

    job: LiveJob
    kind: FileKind
    step: int
    directory: Path
    ticket: Ticket[None]
    started_s: float
    """By `time.perf_counter`, like its end."""
    ended_s: float = 0.0
    error: Exception | None = None
    """Why it could not be written."""


class JobFiles:
    """Those of all jobs, in the order in which they were asked for."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._room_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // SNAPSHOT_SHARE
        self._under_way: list[JobFile] = []
        self._ended: list[JobFile] = []
        """Nobody has heard of these yet."""

    @property
    def is_writing(self) -> bool:
        """Whether anything is under way, or has ended and nobody has heard of it."""
        return bool(self._under_way or self._ended)

    def start(self, job: LiveJob, kind: FileKind, work: CheckpointWork | AdapterWork) -> None:
        """Starts to write something of a job as it is now."""
        ticket = self._executor.start(work)
        self._under_way.append(JobFile(job, kind, job.step, work.directory, ticket, time.perf_counter()))

    def wait_for_slot(self, job: LiveJob) -> None:
        """Waits until nothing of a job is under way, and no more of others than leaves room for its snapshot."""
        self._wait([file for file in self._under_way if file.job is job])
        room = self._room_bytes - _snapshot_bytes(job)
        while self._under_way and sum(_snapshot_bytes(file.job) for file in self._under_way) > room:
            self._wait(self._under_way[:1])

    def ended(self) -> list[JobFile]:
        """Takes those that have ended, without waiting."""
        self._wait([file for file in self._under_way if self._executor.is_written(file.ticket)])
        ended, self._ended = self._ended, []
        return ended

    def wait_for_one(self) -> list[JobFile]:
        """Waits for the oldest; takes what has ended by then."""
        self._wait(self._under_way[:1])
        return self.ended()

    def finish(self, job: LiveJob) -> list[JobFile]:
        """Waits for all that is under way of a job; takes what has ended of it."""
        self._wait([file for file in self._under_way if file.job is job])
        found = [file for file in self._ended if file.job is job]
        self._ended = [file for file in self._ended if file.job is not job]
        return found

    def finish_all(self) -> None:
        """Waits for all that is under way; `ended` still tells of it."""
        self._wait(list(self._under_way))

    def _wait(self, files: list[JobFile]) -> None:
        for file in files:
            self._under_way.remove(file)
            try:
                self._executor.wait(file.ticket)
            except ReplicaFaultError:
                raise
            except Exception as error:  # whatever it is, it is this job's alone
                file.error = error
            file.ended_s = time.perf_counter()
            self._ended.append(file)


def _snapshot_bytes(job: LiveJob) -> int:
    each = FLOAT_BYTES + kept_bytes(job.spec) + best_bytes(job.spec)
    return math.ceil(each * job.num_parameters)
