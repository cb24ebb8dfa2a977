"""Where a job stands, and why: a state, and a reason that is a code for programs with a text for people."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from weft.errors import WeftError


class JobState(enum.StrEnum):
    """Where a job stands."""

    QUEUED = "queued"
    RUNNING = "running"
    PAUSED = "paused"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        """Nothing follows."""
        return self in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)


FINAL_STATES = tuple(state.value for state in JobState if state.is_final)
"""The names of the states that nothing follows."""


class ReasonCode(enum.StrEnum):
    """Why a job does not train; the codes of errors stand for the errors themselves."""

    RUN_STOPPED = "run_stopped"
    """The whole run was asked to stop; the job goes on when the run is resumed."""
    CANCELLED = "cancelled"
    NO_PLACE = "no_place"
    """As many jobs train as max_jobs allows."""
    NO_MEMORY_NOW = "no_memory_now"
    """Other jobs hold the memory that it needs."""
    GAVE_WAY = "gave_way"
    """Jobs that come before it took its place."""
    DIVERGED = "diverged"
    DOES_NOT_FIT = "does_not_fit"
    """There is no memory for its adapter, even alone."""
    SAMPLE_TOO_LONG = "sample_too_long"
    """A microbatch of its longest sample alone ran out of memory."""
    CONFIG = "config"
    DATA = "data"
    MODEL = "model"
    ADAPTER_FILE = "adapter_file"
    STORAGE = "storage"
    CHECKPOINT = "checkpoint"
    JOB = "job"
    ERROR = "error"
    """Any other error raised on purpose."""
    INTERNAL = "internal"
    """An error that nobody raised on purpose, in work for this job alone."""


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a job is in its state."""

    code: ReasonCode
    text: str
    """One sentence for the job's owner."""

    @classmethod
    def of(cls, error: WeftError) -> Reason:
        """The reason that an error gives."""
        codes = {code.value: code for code in ReasonCode}
        return cls(codes.get(error.code, ReasonCode.ERROR), str(error))

    @classmethod
    def of_bug(cls, error: Exception) -> Reason:
        """The reason that an error gives which nobody raised on purpose."""
        return cls(ReasonCode.INTERNAL, f"internal error: {type(error).__name__}: {error}")

    def __str__(self) -> str:
        return self.text
