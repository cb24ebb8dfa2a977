"""The options with which an operator starts a worker."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from pathlib import Path

from weft.errors import ConfigError
from weft.serve.jobs.leases import LEASE_S
from weft.serve.limited_process import FileLimits
from weft.spec import BackboneSpec
from weft.spec.run import Capacity


def _new_id() -> str:
    return f"worker-{secrets.token_hex(8)}"


@dataclass(frozen=True)
class WorkerOptions:
    """The options of one worker: its backbone, how much it takes on, and where it keeps its files."""

    data_dir: Path
    """The worker's own directory is `work/<id>` in it; there it also finds the checkpoints of workers that are gone."""
    base_model: str = "tiny"
    """The name of the backbone in the API; the worker claims jobs for it."""
    backbone: BackboneSpec = field(default_factory=lambda: BackboneSpec("tiny"))
    """Where the backbone is and how it is loaded."""
    capacity: Capacity = "auto"
    """The most tokens of one microbatch, over all jobs; `auto` is what suits the device."""
    max_jobs: int = 32
    """The most jobs that train at a time."""
    memory_limit: float | str | None = None
    """The most GPU memory to take, such as 40GB or 0.5."""
    job_memory: int | None = None
    """The most bytes that the adapters and optimizers of all jobs may take together."""
    lease_s: float = LEASE_S
    """How long the worker may be silent before others take its jobs."""
    pulse_s: float = 0.5
    """The time between two writes to the database."""
    stuck_s: float = 1800.0
    """How long one microbatch, evaluation or checkpoint may take before training is taken to hang."""
    grace_s: float = 30.0
    """How long the worker may take to leave once it is asked to."""
    file_limits: FileLimits = FileLimits()
    """What reading the files of one job may take."""
    host: str = "127.0.0.1"
    """The address on which it listens for prompts; every prompt must bring its token."""
    id: str = field(default_factory=_new_id)
    """The id is new for every process, so that nobody else ever writes to its directory."""

    def __post_init__(self) -> None:
        for name, value, least in (("--max-jobs", self.max_jobs, 1), ("--capacity", self.capacity, 2)):
            if value != "auto" and value < least:
                raise ConfigError(f"must be at least {least}, got {value}.", where=name)
        if self.file_limits.seconds <= 0 or self.file_limits.memory_bytes <= 0:
            raise ConfigError("the limits of reading a file must be above 0.", where="--file-seconds, --file-memory")
        if not 0 < self.pulse_s * 2 < self.lease_s:
            raise ConfigError(
                f"is {self.lease_s:g} s; it must be more than twice the pulse of {self.pulse_s:g} s.", where="--lease"
            )
