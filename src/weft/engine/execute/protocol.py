"""The interface between the engine and an executor, in plain data.

An executor is one replica of the backbone with the jobs on it. The engine plans, counts, records and decides; the
executor alone touches tensors of the replica. Only numbers, names and tensors on the CPU cross the interface, and
segments name their samples by job, step and index, so an executor may be another process.

Work is started and waited for separately: an asynchronous device gets the steps after a microbatch, and the microbatch
after those, before the first is waited for.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, runtime_checkable

from weft.data.chat_template import Tokenizer
from weft.data.dataset import Dataset, GlobalBatches
from weft.data.load import Prompt
from weft.errors import ConfigError
from weft.objectives.objective import MeanScores, MetricTotals, Score
from weft.plan.layout import Layout, ReplicaLayout, copies
from weft.plan.types import Microbatch
from weft.spec import AdapterSpec, JobSpec

if TYPE_CHECKING:
    import torch

    from weft.engine.inference.attach import StoredAdapter
    from weft.engine.inference.generate import Answer
    from weft.engine.program_run import ProgramRun
    from weft.kernels.adamw import Updated
    from weft.spec.sampling import Decoding

OutcomeT = TypeVar("OutcomeT")


class ReplicaMemoryError(Exception):
    """The replica had no memory for some work; gradients of its jobs may be half written."""


class ReplicaFaultError(Exception):
    """The replica's device has failed: nothing on it can be trusted, whichever job met it first."""


@dataclass(frozen=True)
class ReplicaFacts:
    base_model: str
    config: Mapping[str, Any]
    modules: tuple[str, ...]
    device: str
    device_kind: str
    dtype: str
    storage: str
    kernels: str
    path: str
    works_on: bool
    """True if the device works asynchronously, so that more can be started before results are in."""
    vocabulary: int
    max_positions: int
    backbone_bytes: int
    weight_bytes: int
    environment: Mapping[str, Any]
    replica_sizes: tuple[int, ...] = (1,)
    tensor: tuple[int, ...] = (1,)
    """Devices that share every layer, of each replica."""
    shards: tuple[int, ...] = ()
    """Numbers of consecutive replicas that share one copy of the frozen weights; empty: none do."""

    @property
    def layout(self) -> Layout:
        sizes = self.replica_sizes
        return Layout(
            tuple(
                ReplicaLayout(self.tensor[own.start], len(own), sizes[own.start])
                for own in copies(len(sizes), self.shards)
            )
        )

    @property
    def takes_programs(self) -> bool:
        """True if the executor takes whole programs for several devices (`StagedWork`) instead of single
        microbatches."""
        return self.replica_sizes != (1,) or self.tensor != (1,)


@dataclass(frozen=True)
class ReplicaMemory:
    usable_bytes: int
    allocated_bytes: int


@dataclass(frozen=True)
class MicrobatchMemory:
    """What a device is estimated to hold of full microbatches."""

    num_bytes: int
    """Most bytes of one between forward and backward."""
    num_held: int
    """Most of them at a time."""


@dataclass(frozen=True)
class MemoryPeak:
    """Most memory of a device while it trained."""

    num_bytes: int
    tokens: int
    """Most tokens between forward and backward at a time."""


class MemoryAccount(Protocol):
    """Memory of an executor's devices; all results are in their order."""

    def memory(self) -> Sequence[ReplicaMemory]:
        """Of each device; empty where it is not counted."""
        ...

    def microbatches(self, capacity: int, adapters: Collection[AdapterSpec]) -> Sequence[MicrobatchMemory]:
        """With any of these adapters."""
        ...

    def shares(self, job_bytes: Mapping[str, int]) -> Sequence[float]:
        """What each device has of the bytes of these jobs."""
        ...

    def pop_peaks(self) -> Sequence[Sequence[MemoryPeak]]:
        """Peaks of each device since the last call; none where they are not counted, or where nothing has trained."""
        ...


@dataclass(frozen=True)
class AddedJob:
    num_parameters: int
    lane: str
    """Lane of the job; only jobs of the same lane share microbatches."""
    num_reference_parameters: int = 0
    kernel_bytes: int = 0
    trained: str | None = None
    """Sentence about what is trained and what stays frozen; None where all linears are alike."""


@dataclass(frozen=True)
class NewJob:
    spec: JobSpec
    batches: GlobalBatches
    eval_data: Dataset | None
    start: Mapping[str, tuple[torch.Tensor, ...]] | None = None
    """Initial adapter by module path; None: a new one."""
    start_name: str = ""
    start_spec: AdapterSpec | None = None
    reference: StoredAdapter | None = None
    """Frozen adapter that its objective compares with; None: the bare backbone."""


@dataclass(frozen=True)
class Work(Generic[OutcomeT]):
    """Work that a replica can start."""


@dataclass(frozen=True)
class MicrobatchOutcome:
    scores: Sequence[Score]
    num_rows: int
    """Rows computed, with padding."""
    seconds: float
    ended_s: float
    """Time at which the end was first noticed, by `time.perf_counter`."""
    num_reference_rows: int = 0
    """Number of those rows that belong to reference passes."""


@dataclass(frozen=True)
class MicrobatchWork(Work[MicrobatchOutcome]):
    """One microbatch forward and back: every segment's gradients go to its own job."""

    microbatch: Microbatch
    row_tile: int


@dataclass(frozen=True)
class Ticket(Generic[OutcomeT]):
    number: int


@dataclass(frozen=True)
class StepOrder:
    """The optimizer step of one job whose global batch is complete."""

    job: str
    learning_rate: float
    is_finite: bool
    """True if every counted loss is finite; otherwise the step is skipped."""


@dataclass(frozen=True)
class StepsWork(Work[Sequence["Updated"]]):
    steps: tuple[StepOrder, ...]
    behind: Ticket[MicrobatchOutcome] | None = None
    """Microbatch that still runs; the steps read on the device whether its losses are finite."""


@dataclass(frozen=True)
class EvaluatedPart:
    """The groups of a job's evaluation data that have been evaluated: always the first ones."""

    num_groups: int = 0
    sums: Score = field(default_factory=dict)
    """Scores of their samples, added up in order."""

    @property
    def means(self) -> MeanScores:
        return MetricTotals(self.sums).means()


@dataclass(frozen=True)
class EvaluationOutcome:
    parts: Sequence[EvaluatedPart]
    seconds: float
    ended_s: float


@dataclass(frozen=True)
class EvaluationWork(Work[EvaluationOutcome]):
    """Evaluation of some jobs in the same microbatches; a job without a seat gets one meanwhile."""

    jobs: tuple[str, ...]
    capacity: int
    row_tile: int
    after: Mapping[str, EvaluatedPart] = field(default_factory=dict)
    """Parts evaluated before, by job; sums continue from theirs, so that slices have the bits of one evaluation."""
    max_microbatches: int | None = None
    """Microbatches of this slice, on each replica; None: all that are left."""


@dataclass(frozen=True)
class AnswersWork(Work[dict[str, list["Answer"]]]):
    """Answers of jobs to prompts with their current weights, all decoded together."""

    prompts: Mapping[str, Sequence[Prompt]]
    decoding: Decoding
    is_bare: bool = False
    """True: the bare backbone answers instead of the jobs."""


@dataclass(frozen=True)
class StateWork(Work[dict[str, "torch.Tensor"]]):
    """All tensors of a job at its last step boundary, copied to the CPU."""

    job: str


@dataclass(frozen=True)
class CheckpointWork(Work[None]):
    """A checkpoint of a job at its last step boundary, written in the background; StorageError on failure. Files of one
    job are written in the order of their start."""

    job: str
    directory: Path
    step: int
    state: Mapping[str, Any]
    environment: Mapping[str, Any]
    keep: int


@dataclass(frozen=True)
class AdapterWork(Work[None]):
    """A job's adapter as a PEFT directory, written in the background; StorageError on failure."""

    job: str
    directory: Path
    best: bool
    """True: the best weights, where early stopping kept any."""
    step: int | None = None


@dataclass(frozen=True)
class MemoryTrial:
    seconds: float
    held_bytes: int


class Replica(Protocol):
    """One copy of the backbone: its facts, what fits it, and its memory."""

    facts: ReplicaFacts
    tokenizer: Tokenizer

    @property
    def account(self) -> MemoryAccount: ...

    def check_adapter(self, adapter: AdapterSpec) -> None: ...

    def row_tile(self, capacity: int) -> int:
        """Rows that every frozen product is computed in: a fact of the device, never of the batch's contents."""
        ...

    def activation_bytes(self, capacity: int, adapters: Collection[AdapterSpec]) -> int:
        """Maximum number of bytes that a microbatch holds between forward and backward, with any of these adapters."""
        ...

    def release_memory(self) -> None: ...

    def close(self) -> None: ...


class Seats(Protocol):
    def add(self, job: NewJob) -> AddedJob:
        """Makes a job's state, without a seat; ConfigError or AdapterFileError if it does not fit the backbone."""
        ...

    def drop(self, job: str) -> None: ...

    def seat(self, job: str) -> None:
        """Moves a job's state to the backbone's device; ReplicaMemoryError leaves it where it was."""
        ...

    def unseat(self, job: str) -> None:
        """Takes a job's state of the last step boundary off the device; no bit of it changes."""
        ...

    def restore(self, job: str, tensors: dict[str, torch.Tensor]) -> None:
        """Gives a job the state that an earlier `StateWork` returned."""
        ...

    def rewind(self, job: str) -> None: ...

    def keep_best(self, job: str) -> None:
        """Keeps a copy of a job's weights as the best so far; ReplicaMemoryError changes nothing."""
        ...

    def use_best(self, job: str) -> None: ...

    def adapter_of(self, job: str) -> dict[str, tuple[torch.Tensor, ...]]:
        """The tensors of a job's adapter by module path, on the CPU; LoRA's are (A, B)."""
        ...

    def target_names(self, job: str) -> list[str]:
        """The adapted modules as PEFT's target_modules names them."""
        ...


class Worker(Protocol):
    """Work on a replica: started, and waited for later."""

    def start(self, work: Work[OutcomeT]) -> Ticket[OutcomeT]:
        """Starts work after all earlier work; ReplicaMemoryError if there is no memory for it."""
        ...

    def wait(self, ticket: Ticket[OutcomeT]) -> OutcomeT:
        """Waits for started work and returns its outcome; once per ticket."""
        ...

    def is_written(self, ticket: Ticket[None]) -> bool:
        """True if files are written, so that `wait` returns at once."""
        ...

    def compiling_s(self) -> float:
        """Seconds in which started work has waited for kernels and captures so far."""
        ...


class Executor(Replica, Seats, Worker, Protocol):
    """One replica and the jobs on it; either a `MicrobatchExecutor` or a `ProgramExecutor`."""


@runtime_checkable
class MicrobatchExecutor(Executor, Protocol):
    """An executor on one device, which takes single microbatches (`MicrobatchWork`, `StepsWork`)."""

    def prepare(self, work: MicrobatchWork) -> None:
        """Prepares a microbatch that is likely to start next; changes no job."""
        ...

    def try_out(self, work: MicrobatchWork) -> MemoryTrial:
        """Runs a microbatch on copies of its jobs, which stay as they are."""
        ...

    def beside(self) -> Executor:
        """Another executor on the same replica, with jobs of its own."""
        ...


@runtime_checkable
class ProgramExecutor(Executor, Protocol):
    """An executor over several devices, which takes whole programs."""

    run_kind: type[ProgramRun]
    """Class that starts its programs and counts what they did."""

    def in_flight(
        self, capacity: int, adapters: Collection[AdapterSpec], job_bytes: Mapping[str, int]
    ) -> tuple[int, ...]:
        """Full microbatches that each stage has memory for, at least one, beside weights and these seated jobs; empty
        if that is not known."""
        ...


def executor_beside(executor: Executor) -> Executor:
    if not isinstance(executor, MicrobatchExecutor):
        raise ConfigError("jobs beside others need a whole replica; train without stages.", where="--layout")
    return executor.beside()
