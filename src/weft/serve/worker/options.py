"""What an operator decides about one worker."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from pathlib import Path

from weft.errors import ConfigError
from weft.serve.jobs.claim import LEASE_S
from weft.spec import BackboneSpec
from weft.spec.run import Capacity


def _new_id() -> str:
    return f"worker-{secrets.token_hex(8)}"


@dataclass(frozen=True)
class WorkerOptions:
    """One worker: its backbone, how much it takes on, and where it keeps what it needs while it trains."""

    data_dir: Path
    """Its own directory is `work/<id>` in there; those of workers that are gone are where it finds checkpoints."""
    base_model: str = "tiny"
    """Name of the backbone in the API; jobs for it are taken."""
    backbone: BackboneSpec = field(default_factory=lambda: BackboneSpec("tiny"))
    """The backbone itself."""
    capacity: Capacity = "auto"
    """Most tokens of one microbatch, over all jobs; auto: what suits the device."""
    max_jobs: int = 32
    """Most jobs that train at a time."""
    memory_limit: float | str | None = None
    """Most GPU memory to take, such as 40GB or 0.5."""
    job_memory: int | None = None
    """Most bytes that the adapters and optimizers of all jobs together may take."""
    lease_s: float = LEASE_S
    """How long the worker may be silent before others take its jobs."""
    pulse_s: float = 0.5
    """How often it writes to the database at most, and at least while it lives."""
    stuck_s: float = 1800.0
    """How long one microbatch, evaluation or checkpoint may take before training is taken to hang."""
    grace_s: float = 30.0
    """How long it may take to leave once asked to."""
    host: str = "127.0.0.1"
    """Where it listens for prompts; whoever asks must know its token."""
    id: str = field(default_factory=_new_id)
    """New for every process: nobody else ever writes to its directory."""

    def __post_init__(self) -> None:
        for name, value, least in (("--max-jobs", self.max_jobs, 1), ("--capacity", self.capacity, 2)):
            if value != "auto" and value < least:
                raise ConfigError(f"must be at least {least}, got {value}.", where=name)
        if not 0 < self.pulse_s * 2 < self.lease_s:
            raise ConfigError(
                f"is {self.lease_s:g} s; it must be more than twice the pulse of {self.pulse_s:g} s.", where="--lease"
            )
