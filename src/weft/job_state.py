"""The state of a job and its reason: a code for programs with a text for people."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from weft.errors import WeftError


class JobState(enum.StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    PAUSED = "paused"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        """Whether no state follows."""
        return self in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)


FINAL_STATES = tuple(state.value for state in JobState if state.is_final)


class ReasonCode(enum.StrEnum):
    """Why a job does not train; error codes stand for the errors themselves."""

    RUN_STOPPED = "run_stopped"
    """The whole run was stopped; the job continues when the run is resumed."""
    CANCELLED = "cancelled"
    NO_SEAT = "no_place"
    """max_jobs jobs are training."""
    NO_MEMORY_NOW = "no_memory_now"
    GAVE_WAY = "gave_way"
    DIVERGED = "diverged"
    DOES_NOT_FIT = "does_not_fit"
    """Its adapter does not fit in memory, even alone."""
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
    INTERNAL = "internal"


@dataclass(frozen=True, slots=True)
class Reason:
    code: ReasonCode
    text: str

    @classmethod
    def of(cls, error: WeftError) -> Reason:
        codes = {code.value: code for code in ReasonCode}
        return cls(codes.get(error.code, ReasonCode.ERROR), str(error))

    @classmethod
    def of_bug(cls, error: Exception) -> Reason:
        return cls(ReasonCode.INTERNAL, f"internal error: {type(error).__name__}: {error}")

    def __str__(self) -> str:
        return self.text
