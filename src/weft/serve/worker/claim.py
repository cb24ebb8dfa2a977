"""What a worker knows about one job it has claimed, and what the engine reported about that job."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.engine.events import Event
from weft.serve.records.rows import DbRow

GIVE_BACK = "give back"
"""What the engine was asked to do with a job that other workers are to have."""


@dataclass(frozen=True)
class EngineNotice:
    """One event of the engine, and what was true when it happened."""

    event: Event
    tokens: int = 0
    """Tokens the job had trained by then, as the engine counts them."""
    export: Path | None = None
    """The directory to which the adapter was exported at that moment."""
    error: dict[str, Any] | None = None
    """The error object for the user, where more is known than the event's reason."""


@dataclass(frozen=True)
class StoredResult:
    """The files of a finished job: they are in the file store, but no row names them yet."""

    adapter: str
    adapter_bytes: int
    table: str
    table_bytes: int
    table_sha256: str


@dataclass(eq=False)
class Claim:
    """A job as this worker claimed it, and what the worker has done with it since."""

    job: DbRow
    """The job's row at the moment of the claim."""
    is_training: bool = False
    """The engine has the job. Before that, its data is being prepared."""
    is_put_back: bool = False
    """The job goes back to the queue because this worker cannot prepare it now."""
    too_large: dict[str, Any] | None = None
    """The error object of a job that does not fit into this worker's memory; another worker may have more."""
    is_leaving: bool = False
    """The job is saved, trains no more here, and goes back to the queue once its checkpoint is in the file store."""
    leave_by: float = 0.0
    """When it goes back in any case, by the monotonic clock."""
    leave_message: str | None = None
    """What its user is told then; None says that the worker stops."""
    requested: str | None = None
    """What the engine was asked to do: cancel or pause for the user, or give back."""
    priority: int = 0
    retry_at: float | None = None
    """When a job that could not write is tried again, by the monotonic clock."""
    has_stalled: bool = False
    """The job could not write to its directory before; the user has been told."""
    notices: deque[EngineNotice] = field(default_factory=deque)
    """Notices that are not in the database yet, oldest first."""
    blobs: dict[int, str] = field(default_factory=dict)
    """Archives of checkpoints that are in the file store but not yet in a row, by step."""
    is_unstored: bool = False
    """The job has ended, and its result could not be stored yet."""
    result: StoredResult | None = None
    """The finished job's files, once they are stored."""
    first_step: tuple[int, float] | None = None
    """The first step this worker saw and its time; the estimate of the end starts there."""
    metrics: dict[str, Any] = field(default_factory=dict)
    """The latest value of each metric."""
    earlier: list[dict[str, Any]] = field(default_factory=list)
    """Metrics of the steps before the adopted checkpoint; a worker that died may not have reported all of them."""

    @property
    def id(self) -> str:
        """The job's id."""
        return str(self.job["id"])

    @property
    def tenant(self) -> str:
        """The tenant that owns the job."""
        return str(self.job["tenant"])

    @property
    def fence(self) -> int:
        """The number that proves that the job is still ours."""
        return int(self.job["fence"])

    @property
    def name(self) -> str:
        """What the engine and the directory call the claim; it is unique even among claims of the same job."""
        return f"{self.id}.{self.fence}"
