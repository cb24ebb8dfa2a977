"""Programs for pipelines: what every stage does, in its own order.

A `StagedProgram` is to several stages what `plan.types.Program` is to one. Stage s runs its list from the first to the
last instruction; a Receive waits for the matching Send of the neighbour. With `num_chunks` above 1 every stage holds
several slices of the model (interleaving): slice c of stage s is the virtual stage c · num_stages + s.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.plan.types import Microbatch


@dataclass(frozen=True, slots=True)
class Forward:
    """One microbatch forward through one slice of the model."""

    microbatch: int
    """Place in the program's `microbatches`."""
    chunk: int = 0


@dataclass(frozen=True, slots=True)
class Backward:
    """The same, backward; every job in it gains gradients for its adapters on this slice."""

    microbatch: int
    chunk: int = 0


@dataclass(frozen=True, slots=True)
class Send:
    """Hands the result of a Forward to the next virtual stage, or of a Backward to the one before."""

    microbatch: int
    chunk: int
    is_gradient: bool
    to_stage: int


@dataclass(frozen=True, slots=True)
class Receive:
    """Waits for what a neighbour sends for this microbatch and slice."""

    microbatch: int
    chunk: int
    is_gradient: bool
    from_stage: int


@dataclass(frozen=True, slots=True)
class StageStep:
    """A job's optimizer steps on this stage: its global batch has been backward here."""

    job: str
    step: int


StageInstruction = Forward | Backward | Send | Receive | StageStep


@dataclass(frozen=True, slots=True)
class StagedProgram:
    """Instruction lists of all stages over the same microbatches."""

    microbatches: tuple[Microbatch, ...]
    """An empty one is a bubble that a schedule needs to keep its distances (a no-op)."""
    stages: tuple[tuple[StageInstruction, ...], ...]
    num_chunks: int = 1

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return len(self.stages)
