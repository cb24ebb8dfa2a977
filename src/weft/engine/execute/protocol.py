"""What the engine asks of an executor, in plain data.

An executor is one replica of the backbone with the jobs on it. The engine plans, counts, records and decides; whatever
touches a tensor of the replica happens behind this protocol. Only numbers, names and tensors on the CPU cross it, and
segments name their samples by job, step and index, so that the other side may be another process.

Work is started and waited for separately: a device that works on gets the steps behind a microbatch, and the microbatch
behind those, before the first is waited for.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from weft.data.chat.chat_template import Tokenizer
from weft.data.dataset import Dataset
from weft.data.global_batch import GlobalBatches
from weft.data.prompts import Prompt
from weft.objectives.metrics import MeanScores, Score
from weft.plan.layout import Layout, ReplicaLayout, copies
from weft.plan.pipeline.append import Lists
from weft.plan.program import Program
from weft.plan.simulate.timeline import Span
from weft.plan.types import Microbatch
from weft.spec import AdapterSpec, JobSpec

if TYPE_CHECKING:
    import torch

    from weft.engine.inference.answers import Answer
    from weft.engine.inference.attach import StoredAdapter
    from weft.engine.inference.generate import Decoding
    from weft.kernels.adamw import Updated

OutcomeT = TypeVar("OutcomeT")


class ReplicaMemoryError(Exception):
    """The replica had no memory for what it was asked; gradients of the jobs concerned may be half written."""


class ReplicaFaultError(Exception):
    """The replica's device has failed: nothing on it can be trusted, whichever job met it first."""


@dataclass(frozen=True)
class ReplicaFacts:
    """What does not change about a replica."""

    base_model: str
    config: Mapping[str, Any]
    """The model's configuration as its files give it."""
    modules: tuple[str, ...]
    """Paths of the linears that adapters can adapt."""
    device: str
    """Such as `cpu` or `cuda:0`."""
    device_kind: str
    """`cpu` or `cuda`."""
    dtype: str
    """Of the frozen weights before they are quantised."""
    storage: str
    """How the frozen weights are stored, in words."""
    kernels: str
    """Which way through the model is taken and why, in words."""
    path: str
    """Which way through the model it takes: `reference` or `fused`."""
    works_on: bool
    """Whether the device works on while the host goes on, so that more can be started before results are in."""
    vocabulary: int
    max_positions: int
    backbone_bytes: int
    weight_bytes: int
    """Bytes per trainable parameter of a job that has a seat: weight, gradient, and the copy that kernels read."""
    environment: Mapping[str, Any]
    """What besides a job decides the bits of its result."""
    replica_sizes: tuple[int, ...] = (1,)
    """Stages of each replica."""
    tensor: int = 1
    """Devices that share every layer."""
    shards: tuple[int, ...] = ()
    """How many replicas, one behind the other, share each copy of the frozen weights; empty: none do."""

    @property
    def layout(self) -> Layout:
        """How it lies over devices."""
        sizes = self.replica_sizes
        return Layout(
            tuple(ReplicaLayout(self.tensor, len(own), sizes[own.start]) for own in copies(len(sizes), self.shards))
        )

    @property
    def takes_programs(self) -> bool:
        """Whether it takes whole programs for several devices, `StagedWork`, and no single microbatches."""
        return self.replica_sizes != (1,) or self.tensor > 1


@dataclass(frozen=True)
class ReplicaMemory:
    """What a replica's device holds now."""

    usable_bytes: int
    """That this process may take, those taken already included."""
    allocated_bytes: int
    """Of all tensors."""


@dataclass(frozen=True)
class AddedJob:
    """What an executor says about a job that was added to it."""

    num_parameters: int
    """That are trained."""
    lane: str
    """The job shares microbatches only with those of the same lane."""
    num_reference_parameters: int = 0
    """Of the adapter that it compares with."""
    kernel_bytes: int = 0
    """What kernels hold of it besides a copy of its parameters."""


@dataclass(frozen=True)
class NewJob:
    """A job with all that an executor has to know about it."""

    spec: JobSpec
    batches: GlobalBatches
    eval_data: Dataset | None
    start: Mapping[str, tuple[torch.Tensor, ...]] | None = None
    """The adapter it starts from, by module path; a fresh one if None."""
    start_name: str = ""
    """Where that comes from, for an error."""
    start_spec: AdapterSpec | None = None
    """What that is."""
    reference: StoredAdapter | None = None
    """The frozen adapter that its objective compares with; the bare backbone if None."""


@dataclass(frozen=True)
class Work(Generic[OutcomeT]):
    """Something that a replica can be asked to start."""


@dataclass(frozen=True)
class MicrobatchOutcome:
    """What became of a microbatch."""

    scores: Sequence[Score]
    """Of its segments, in order."""
    num_rows: int
    """Rows computed, padding included."""
    seconds: float
    ended_s: float
    """When that was first known, by `time.perf_counter`."""
    num_reference_rows: int = 0
    """Of the rows, those that went through references, forward only."""


@dataclass(frozen=True)
class MicrobatchWork(Work[MicrobatchOutcome]):
    """One microbatch forward and back: every segment's gradients go to its own job."""

    microbatch: Microbatch
    row_tile: int


@dataclass(frozen=True)
class Ticket(Generic[OutcomeT]):
    """Work that has been started."""

    number: int


@dataclass(frozen=True)
class StepOrder:
    """The optimizer step of one job whose global batch is complete."""

    job: str
    learning_rate: float
    is_finite: bool
    """Whether the losses are that have been counted; one that is not leaves the step out."""


@dataclass(frozen=True)
class StepsWork(Work[Sequence["Updated"]]):
    """The optimizer steps of some jobs; each job steps as if it were alone."""

    steps: tuple[StepOrder, ...]
    behind: Ticket[MicrobatchOutcome] | None = None
    """A microbatch that nobody has waited for: whether its losses are finite, the steps learn on the device."""


@dataclass(frozen=True)
class StagedOutcome:
    """What became of a program of several stages."""

    microbatches: Sequence[MicrobatchOutcome]
    """In the program's order; one without segments has no scores."""
    steps: Mapping[tuple[str, int], Updated]
    """By job and step."""
    spans: Sequence[Span]
    """What ran when on which stage, by `time.perf_counter`."""


@dataclass(frozen=True)
class StagedWork(Work[StagedOutcome]):
    """A program of several stages from its beginning to its end; only a replica that has as many runs it.

    One that goes on has ended once the rest of it has been started, with the next one or by itself.
    """

    program: Program
    row_tile: int
    rates: Mapping[tuple[str, int], float]
    """The learning rate of each step, by job and step."""
    lists: Lists | None = None
    """Where programs go on: what every stage runs now, the rest of the program before and the beginning of this one."""
    first: int = 0
    """In the lists, the number of its first microbatch."""
    kept: Mapping[tuple[str, int], int] = field(default_factory=dict)
    """Jobs and steps behind which a copy of the job's state is kept for a checkpoint, each with the first step of which
    such a copy may still be wanted."""
    hears: bool = False
    """Whether a job of it compares with a reference: devices in step then ask each other who has one to hear."""


@dataclass(frozen=True)
class MoveWork(Work[None]):
    """Brings the jobs of a program that goes on to where it runs them; nothing of those that move is under way."""

    program: Program


@dataclass(frozen=True)
class FinishWork(Work[None]):
    """The rest of the last program that goes on, where nothing follows it."""

    lists: Lists


@dataclass(frozen=True)
class EvaluationOutcome:
    """What became of an evaluation."""

    means: Sequence[MeanScores]
    """Of its jobs, in order."""
    seconds: float
    ended_s: float
    """When that was first known, by `time.perf_counter`."""


@dataclass(frozen=True)
class EvaluationWork(Work[EvaluationOutcome]):
    """The evaluation of some jobs in the same microbatches; a job without a seat gets one for as long as it takes."""

    jobs: tuple[str, ...]
    capacity: int
    row_tile: int


@dataclass(frozen=True)
class AnswersWork(Work[dict[str, list["Answer"]]]):
    """What jobs answer to prompts as they are now, all decoded together."""

    prompts: Mapping[str, Sequence[Prompt]]
    """By job."""
    decoding: Decoding
    is_bare: bool = False
    """Whether the bare backbone answers in the jobs' stead."""


@dataclass(frozen=True)
class StateWork(Work[dict[str, "torch.Tensor"]]):
    """All tensors of a job at its last step boundary, copied to the CPU."""

    job: str


@dataclass(frozen=True)
class CheckpointWork(Work[None]):
    """A checkpoint of a job at its last step boundary, written beside training; StorageError if it could not be.

    The files of one job are written in the order in which they were asked for.
    """

    job: str
    directory: Path
    """Of the job's checkpoints."""
    step: int
    state: Mapping[str, Any]
    environment: Mapping[str, Any]
    keep: int
    """How many of its checkpoints are kept."""


@dataclass(frozen=True)
class AdapterWork(Work[None]):
    """A job's adapter as a PEFT directory, written beside training; StorageError if it could not be."""

    job: str
    directory: Path
    best: bool
    """Whether the best weights are wanted, where early stopping kept any."""
    step: int | None = None
    """Of a checkpoint beside which it is written."""


@dataclass(frozen=True)
class MemoryTrial:
    """The time and memory of a microbatch that was only tried out."""

    seconds: float
    held_bytes: int


class Executor(Protocol):
    """One replica and the jobs on it."""

    facts: ReplicaFacts
    tokenizer: Tokenizer
    """Of the base model; data is read with it on the engine's side."""

    def beside(self) -> Executor:
        """Another executor on the same replica, with jobs of its own."""
        ...

    def check_adapter(self, adapter: AdapterSpec) -> None:
        """ConfigError if an adapter does not fit the backbone."""
        ...

    def row_tile(self, capacity: int) -> int:
        """Rows that every frozen product is computed in: a fact of the device, never of the batch's contents."""
        ...

    def activation_bytes(self, capacity: int, adapters: Collection[AdapterSpec]) -> int:
        """What a microbatch may hold between forward and backward, whichever of these adapters takes part."""
        ...

    def memory(self) -> ReplicaMemory | None:
        """What the device holds; None where jobs' memory has no limit of its own."""
        ...

    def peak_bytes(self) -> int:
        """Most that tensors took since `reset_peak`; 0 where nobody counts."""
        ...

    def reset_peak(self) -> None:
        """Starts a new account of the peak."""
        ...

    def release_memory(self) -> None:
        """Gives back what failed work held."""
        ...

    def compiling_s(self) -> float:
        """Seconds in which work that was started here has waited for kernels and captures, so far."""
        ...

    def add(self, job: NewJob) -> AddedJob:
        """Makes a job's state, without a seat; ConfigError or AdapterFileError if it does not fit the backbone."""
        ...

    def drop(self, job: str) -> None:
        """Forgets a job that has no seat."""
        ...

    def seat(self, job: str) -> None:
        """Takes a job's state beside the backbone; ReplicaMemoryError leaves it where it was."""
        ...

    def unseat(self, job: str) -> None:
        """Takes a job's state of the last step boundary off the device; no bit of it changes."""
        ...

    def restore(self, job: str, tensors: dict[str, torch.Tensor]) -> None:
        """Gives a job the state that `StateWork` once brought."""
        ...

    def rewind(self, job: str) -> None:
        """Forgets the gradients of a job's current global batch."""
        ...

    def keep_best(self, job: str) -> None:
        """Keeps a copy of a job's weights as the best so far; ReplicaMemoryError changes nothing."""
        ...

    def use_best(self, job: str) -> None:
        """Puts the copy that was kept into the adapter, if there is one."""
        ...

    def adapter_of(self, job: str) -> dict[str, tuple[torch.Tensor, ...]]:
        """The adapter's tensors of a job by module path, on the CPU; LoRA's are (A, B)."""
        ...

    def target_names(self, job: str) -> list[str]:
        """The adapted modules in the words of PEFT's target_modules."""
        ...

    def prepare(self, work: MicrobatchWork) -> None:
        """Makes ready what is likely to be started next; changes no job."""
        ...

    def start(self, work: Work[OutcomeT]) -> Ticket[OutcomeT]:
        """Starts work behind all that was started before; ReplicaMemoryError says that it could not be."""
        ...

    def wait(self, ticket: Ticket[OutcomeT]) -> OutcomeT:
        """Waits for what was started, once, and says what came of it."""
        ...

    def is_written(self, ticket: Ticket[None]) -> bool:
        """Whether waiting for files would take no time."""
        ...

    def try_out(self, work: MicrobatchWork) -> MemoryTrial:
        """Runs a microbatch with stand-ins for its jobs, which stay as they are."""
        ...

    def close(self) -> None:
        """Ends what else belongs to the replica, such as other processes."""
        ...
