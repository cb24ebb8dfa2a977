"""The executor of a replica whose layers are divided into stages.

It holds no tensor of a model: it asks all stages, and puts together what they answer, so that checkpoints and adapters
are those of one device.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from weft.adapters.method import ModuleTensors
from weft.data.chat.chat_template import Tokenizer
from weft.errors import ConfigError, StorageError
from weft.execute.protocol import (
    AdapterWork,
    AddedJob,
    CheckpointWork,
    EvaluationOutcome,
    EvaluationWork,
    Executor,
    MicrobatchOutcome,
    MicrobatchWork,
    NewJob,
    OutcomeT,
    ReplicaFacts,
    ReplicaMemory,
    StagedOutcome,
    StagedWork,
    StateWork,
    Ticket,
    TrialRun,
    Work,
)
from weft.execute.stages.gradient import JobShare
from weft.execute.stages.interpreter import StageOutcome, StepOf
from weft.execute.stages.stage_group import StageGroup
from weft.execute.stages.state_parts import cut_state, join_state
from weft.kernels.adamw import Updated
from weft.spec import AdapterSpec
from weft.store.checkpoint import Checkpoint, save_checkpoint
from weft.store.peft_files import write_adapter


@dataclass(frozen=True)
class _StagedJob:
    """A job, and what each stage holds of it."""

    given: NewJob
    shares: list[JobShare]


class StagedExecutor:
    """Runs the engine's work on all stages of a replica, at once when it is started."""

    def __init__(self, stages: StageGroup, tokenizer: Tokenizer) -> None:
        self.stages = stages
        self.tokenizer = tokenizer
        self.facts = _facts_of(stages.ask("facts"))
        self._jobs: dict[str, _StagedJob] = {}
        self._done: dict[int, Callable[[], Any]] = {}
        self._num_started = 0

    def beside(self) -> Executor:
        """Is not to be had: jobs of stages are known by their names."""
        raise ConfigError("jobs beside others need a whole replica; train without stages.", where="--layout")

    def check_adapter(self, adapter: AdapterSpec) -> None:
        """ConfigError if an adapter does not fit the backbone."""
        self.stages.ask("check_adapter", adapter)

    def row_tile(self, capacity: int) -> int:
        """Rows that every frozen product is computed in."""
        return int(self.stages.ask("row_tile", capacity)[0])

    def activation_bytes(self, capacity: int, adapters: Collection[AdapterSpec]) -> int:
        """What a microbatch may hold on all stages together."""
        return sum(self.stages.ask("activation_bytes", capacity, list(adapters)))

    def memory(self) -> ReplicaMemory | None:
        """Has no limit of its own on CPUs."""
        return None

    def peak_bytes(self) -> int:
        """Nobody counts."""
        return 0

    def reset_peak(self) -> None:
        """Has nothing to reset."""

    def release_memory(self) -> None:
        """Has nothing to give back."""

    def compiling_s(self) -> float:
        """The reference path compiles nothing."""
        return 0.0

    def add(self, job: NewJob) -> AddedJob:
        """Makes a job's share on every stage."""
        name = job.spec.name
        try:
            shares: list[JobShare] = self.stages.ask("add", job)
            _refuse_unlike(shares)
        except Exception:
            self.stages.ask("drop", name)
            raise
        self.stages.ask("know_shares", name, [dataclasses.replace(share, shared={}) for share in shares])
        self._jobs[name] = _StagedJob(job, shares)
        return AddedJob(sum(share.num_trained for share in shares), "")

    def drop(self, job: str) -> None:
        """Forgets a job."""
        del self._jobs[job]
        self.stages.ask("drop", job)

    def seat(self, job: str) -> None:
        """Takes a slot for a job on every stage."""
        self.stages.ask("seat", job)

    def unseat(self, job: str) -> None:
        """Frees a job's slots."""
        self.stages.ask("unseat", job)

    def restore(self, job: str, tensors: dict[str, torch.Tensor]) -> None:
        """Gives every stage its part of a job's state."""
        parts = cut_state(tensors, self._jobs[job].shares)
        self.stages.ask_each("restore", [(job, part) for part in parts])

    def rewind(self, job: str) -> None:
        """Forgets the gradients of a job's current global batch."""
        self.stages.ask("rewind", job)

    def keep_best(self, job: str) -> None:
        """Keeps a copy of a job's weights as the best so far."""
        self.stages.ask("keep_best", job)

    def use_best(self, job: str) -> None:
        """Puts the copy that was kept into the adapter, if there is one."""
        self.stages.ask("use_best", job)

    def adapter_of(self, job: str) -> dict[str, tuple[torch.Tensor, ...]]:
        """The adapter's tensors of a job by module path."""
        return _merged(self.stages.ask("adapter_of", job))

    def target_names(self, job: str) -> list[str]:
        """The adapted modules in the words of PEFT's target_modules."""
        return list(self._jobs[job].shares[0].target_names)

    def prepare(self, work: MicrobatchWork) -> None:
        """Has nothing to make ready: stages take whole programs."""

    def start(self, work: Work[OutcomeT]) -> Ticket[OutcomeT]:
        """Does the work; what it raises about files, whoever waits hears."""
        self._num_started += 1
        self._done[self._num_started] = self._run(work)
        return Ticket(self._num_started)

    def wait(self, ticket: Ticket[OutcomeT]) -> OutcomeT:
        """What came of it."""
        outcome: OutcomeT = self._done.pop(ticket.number)()
        return outcome

    def is_written(self, ticket: Ticket[None]) -> bool:
        """Files are written when they are asked for."""
        return True

    def try_out(self, work: MicrobatchWork) -> TrialRun:
        """Is not to be had: stages take whole programs."""
        raise ConfigError("one microbatch is tried on one device; leave --layout out.", where="--layout")

    def close(self) -> None:
        """Ends the stages."""
        self.stages.close()

    def _run(self, work: Work[Any]) -> Callable[[], Any]:
        done: Any
        match work:
            case StagedWork():
                done = _program_outcome(work, self.stages.ask("run", work))
            case EvaluationWork():
                done = self._evaluate(work)
            case StateWork(name):
                done = join_state(self.stages.ask("tensors", name, True))
            case CheckpointWork() | AdapterWork():
                return _kept(lambda: self._write(work))
            case _:
                raise ConfigError(f"stages have no {type(work).__name__}; train without --layout.", where="--layout")
        return lambda: done

    def _evaluate(self, work: EvaluationWork) -> EvaluationOutcome:
        begun_s = time.perf_counter()
        means = self.stages.ask("evaluate", work)[-1]
        ended_s = time.perf_counter()
        return EvaluationOutcome(means, ended_s - begun_s, ended_s)

    def _write(self, work: CheckpointWork | AdapterWork) -> None:
        if isinstance(work, CheckpointWork):
            tensors = join_state(self.stages.ask("tensors", work.job, True))
            checkpoint = Checkpoint(work.step, tensors, dict(work.state), dict(work.environment))
            save_checkpoint(work.directory, checkpoint, keep=work.keep)
            return
        job = self._jobs[work.job]
        write_adapter(
            work.directory,
            job.given.spec.adapter,
            _merged(self.stages.ask("modules", work.job, work.best)),
            base_model=self.facts.base_model,
            target_names=self.target_names(work.job),
            chat_template=job.given.spec.chat_template,
            shared=next(share.shared for share in job.shares if share.modules),
            head=job.given.batches.data.head,
        )


def _facts_of(stages: list[ReplicaFacts]) -> ReplicaFacts:
    """The facts of a replica from those of its stages; the last one has the model's own configuration."""
    return dataclasses.replace(
        stages[-1],
        modules=tuple(path for facts in stages for path in facts.modules),
        backbone_bytes=sum(facts.backbone_bytes for facts in stages),
        kernels=f"{stages[-1].kernels}; {len(stages)} stages",
        num_stages=len(stages),
    )


def _refuse_unlike(shares: list[JobShare]) -> None:
    """ConfigError where what all modules of an adapter share would depend on where the model is cut."""
    shapes = [{name: x.shape for name, x in share.shared.items()} for share in shares if share.modules]
    if any(own != shapes[0] for own in shapes):
        raise ConfigError(
            "its modules share matrices that are as wide as the widest of them, which is not on every stage; "
            "adapt all layers alike, or use one device.",
            where="adapter.target_modules",
        )


def _merged(parts: list[Mapping[str, ModuleTensors]]) -> dict[str, ModuleTensors]:
    return {path: tensors for part in parts for path, tensors in part.items()}


def _program_outcome(work: StagedWork, stages: list[StageOutcome]) -> StagedOutcome:
    """What became of a program, from what each stage tells."""
    nothing = MicrobatchOutcome((), 0, 0.0, 0.0)
    microbatches = [stages[-1].microbatches.get(k, nothing) for k in range(len(work.program.microbatches))]
    spans = sorted((span for stage in stages for span in stage.spans), key=lambda span: (span.start_s, span.stage))
    steps: dict[StepOf, Updated] = {}
    for stage in stages:
        for step, updated in stage.steps.items():
            known = steps.get(step, updated)
            # What is no number counts as the largest.
            largest = max(known.largest, updated.largest, key=lambda size: (math.isnan(size), size))
            steps[step] = dataclasses.replace(known, largest=largest)
    return StagedOutcome(microbatches, steps, spans)


def _kept(write: Callable[[], None]) -> Callable[[], None]:
    """Does it now, and keeps what could not be written for whoever waits."""
    try:
        write()
    except StorageError as error:
        kept = error

        def again() -> None:
            raise kept

        return again
    return lambda: None
