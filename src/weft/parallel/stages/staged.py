"""The executor of one or more replicas whose layers are divided into stages.

It holds no tensor of a model: it asks all stages, and puts together what they answer, so that checkpoints and adapters
are those of one device. Which replicas have a job, `staged_jobs.py` knows.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from weft.adapters.method import ModuleTensors
from weft.data.chat.chat_template import Tokenizer
from weft.data.tokens.tokenise import with_new_tokens
from weft.engine.execute.protocol import (
    AdapterWork,
    AddedJob,
    AnswersWork,
    CheckpointWork,
    EvaluationOutcome,
    EvaluationWork,
    Executor,
    FinishWork,
    MemoryTrial,
    MicrobatchWork,
    MoveWork,
    NewJob,
    OutcomeT,
    ReplicaMemory,
    StagedWork,
    StateWork,
    Ticket,
    Work,
)
from weft.engine.inference.answers import Answer, refuse_long, worded
from weft.errors import ConfigError, StorageError
from weft.model.ahead.compile_ahead import CompileAhead
from weft.parallel.stages.refusals import refuse_divided
from weft.parallel.stages.routes import StepOrders
from weft.parallel.stages.stage_group import StageGroup
from weft.parallel.stages.staged_jobs import StagedJobs
from weft.parallel.stages.stages_together import facts_of, program_outcome
from weft.parallel.stages.state_parts import join_state
from weft.plan.layout import copies
from weft.plan.program import Program
from weft.spec import AdapterSpec
from weft.store.checkpoint import Checkpoint, save_checkpoint
from weft.store.peft_files import write_adapter


class StagedExecutor:
    """Runs the engine's work on all stages of its replicas, at once when it is started.

    Only programs that go on are under way until they are waited for. Meanwhile jobs that they do not run may come, move
    and go, and files may be written.
    """

    def __init__(
        self,
        stages: StageGroup,
        tokenizer: Tokenizer,
        *,
        shards: Sequence[int] = (),
        ahead: CompileAhead | None = None,
    ) -> None:
        """`shards`: how many replicas, one behind the other, share each copy of the frozen weights; empty: none do.

        `ahead`: kernels that are being compiled for all of them.
        """
        self.stages = stages
        self._ahead, self._compiling_s = ahead, 0.0
        self.tokenizer = tokenizer
        ends = [*itertools.accumulate(stages.replica_sizes)]
        self._replicas = [range(end - size, end) for end, size in zip(ends, stages.replica_sizes, strict=True)]
        self._copies = copies(len(self._replicas), shards)
        """Replicas of which none works while those that share its frozen weights do not."""
        self.facts = facts_of(stages.ask("facts"), self._replicas, shards)
        self._jobs = StagedJobs(stages, self._replicas, self._copies)
        self._done: dict[int, Callable[[], Any]] = {}
        self._num_started = 0
        self._orders = StepOrders()
        """Of programs that go on."""

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
        """What microbatches may hold on all stages of a replica together, if each held as much as the fullest.

        The earlier a stage, the more of them are on their way behind it.
        """
        found: list[int] = self.stages.ask("activation_bytes", capacity, list(adapters))
        fullest = [max(found[device] * (devices.stop - device) for device in devices) for devices in self._replicas]
        return max(most * len(devices) for most, devices in zip(fullest, self._replicas, strict=True))

    def memory(self) -> ReplicaMemory | None:
        """Of the replica with least room, if each of its stages had no more than the fullest; None on CPUs."""
        if self.facts.device_kind == "cpu":
            return None
        found: list[ReplicaMemory] = self.stages.ask("memory")
        held = [sum(found[device].allocated_bytes for device in devices) for devices in self._replicas]
        left = [
            len(devices) * min(found[device].usable_bytes - found[device].allocated_bytes for device in devices)
            for devices in self._replicas
        ]
        fullest = left.index(min(left))
        return ReplicaMemory(held[fullest] + left[fullest], held[fullest])

    def peak_bytes(self) -> int:
        """Nobody counts."""
        return 0

    def reset_peak(self) -> None:
        """Has nothing to reset."""

    def release_memory(self) -> None:
        """Gives back what failed work held."""
        self.stages.ask("release_memory")

    @property
    def is_compiling(self) -> bool:
        """Whether kernels that the first program needs are not there yet."""
        return self._ahead is not None and not self._ahead.is_ready

    def compiling_s(self) -> float:
        """Seconds in which work has waited for kernels that are compiled ahead, so far."""
        return self._compiling_s

    def add(self, job: NewJob) -> AddedJob:
        """Makes a job's shares."""
        refuse_divided(job.spec, self.stages.replica_sizes)
        own = self._jobs.add(job)
        num_trained = sum(share.run_of(group) for share in own for group in share.trained)
        return AddedJob(num_trained, "", sum(s.num_compared for s in own))

    def drop(self, job: str) -> None:
        """Forgets a job."""
        self._jobs.drop(job)

    def seat(self, job: str) -> None:
        """Takes a slot for a job on every stage that has a share, or on none."""
        self._jobs.seat(job)

    def unseat(self, job: str) -> None:
        """Frees a job's slots."""
        self._jobs.unseat(job)

    def restore(self, job: str, tensors: dict[str, torch.Tensor]) -> None:
        """Gives every stage its part of a job's state."""
        self._jobs.restore(job, tensors)

    def rewind(self, job: str) -> None:
        """Forgets the gradients of a job's current global batch."""
        self._jobs.ask("rewind", job)

    def keep_best(self, job: str) -> None:
        """Keeps a copy of a job's weights as the best so far."""
        self._jobs.ask("keep_best", job)

    def use_best(self, job: str) -> None:
        """Puts the copy that was kept into the adapter, if there is one."""
        self._jobs.ask("use_best", job)

    def adapter_of(self, job: str) -> dict[str, tuple[torch.Tensor, ...]]:
        """The adapter's tensors of a job by module path."""
        return _merged(self._jobs.call_home("adapter_of", job))

    def target_names(self, job: str) -> list[str]:
        """The adapted modules in the words of PEFT's target_modules."""
        known = self._jobs[job]
        return list(known.shares[known.home][0].target_names)

    def prepare(self, work: MicrobatchWork) -> None:
        """Has nothing to make ready: stages take whole programs."""

    def start(self, work: Work[OutcomeT]) -> Ticket[OutcomeT]:
        """Does the work; what it raises about files, whoever waits hears."""
        self._num_started += 1
        if isinstance(work, StagedWork | EvaluationWork):
            self._await_kernels()
        self._done[self._num_started] = self._run(work)
        return Ticket(self._num_started)

    def wait(self, ticket: Ticket[OutcomeT]) -> OutcomeT:
        """What came of it."""
        outcome: OutcomeT = self._done.pop(ticket.number)()
        return outcome

    def is_written(self, ticket: Ticket[None]) -> bool:
        """Files are written when they are asked for."""
        return True

    def try_out(self, work: MicrobatchWork) -> MemoryTrial:
        """Is not to be had: stages take whole programs."""
        raise ConfigError("one microbatch is tried on one device; leave --layout out.", where="--layout")

    def close(self) -> None:
        """Ends the stages."""
        self.stages.close()

    def _await_kernels(self) -> None:
        """Waits for those that are compiled ahead: else every stage would compile them for itself."""
        if self._ahead is not None:
            begun_s = time.perf_counter()
            self._ahead.wait()
            self._compiling_s += time.perf_counter() - begun_s
            self._ahead = None

    def _run(self, work: Work[Any]) -> Callable[[], Any]:
        done: Any
        match work:
            case StagedWork() if work.lists is not None:
                self._orders.know(work.program)
                told = dataclasses.replace(work, lists=None)
                number = self.stages.append(told, work.lists, self._orders.due(work.lists))
                return lambda: program_outcome(work, self.stages.outcomes(number))
            case MoveWork(program):
                self._jobs.gather_to_home(program)
                done = None
            case FinishWork(lists):
                self.stages.go_on(lists, self._orders.due(lists))
                done = None
            case StagedWork():
                self._jobs.gather_to_home(work.program)
                told = dataclasses.replace(work, hears=self._hears(work.program))
                done = program_outcome(work, self.stages.ask("run", told))
            case EvaluationWork():
                done = self._evaluate(work)
            case AnswersWork():
                done = self._answer(work)
            case StateWork(name):
                done = join_state(self._jobs.call_home("tensors", name))
            case CheckpointWork() | AdapterWork():
                return _kept(lambda: self._write(work))
            case _:
                raise AssertionError(f"no stage knows {work}")
        return lambda: done

    def _hears(self, program: Program) -> bool:
        """Whether a job of a program compares with a reference."""
        jobs = {job for microbatch in program.microbatches for job in microbatch.job_tokens}
        return any(self._jobs[job].given.batches.data.reads_reference for job in jobs)

    def _evaluate(self, work: EvaluationWork) -> EvaluationOutcome:
        """Evaluates every job on a replica that has it."""
        begun_s = time.perf_counter()
        found = self._ask_of("evaluate", work.jobs, lambda jobs: dataclasses.replace(work, jobs=jobs))
        means = {job: mean for jobs, told in found for job, mean in zip(jobs, told, strict=True)}
        ended_s = time.perf_counter()
        return EvaluationOutcome([means[job] for job in work.jobs], ended_s - begun_s, ended_s)

    def _answer(self, work: AnswersWork) -> dict[str, list[Answer]]:
        """Has every job answer on a replica that has it."""
        refuse_long([prompt for prompts in work.prompts.values() for prompt in prompts], self.facts.max_positions)
        found = self._ask_of(
            "answer", work.prompts, lambda jobs: dataclasses.replace(work, prompts={j: work.prompts[j] for j in jobs})
        )
        written = {job: tokens for jobs, told in found for job, tokens in zip(jobs, told, strict=True)}
        return {
            job: [worded(*pair, self._tokenizer_of(job, work)) for pair in zip(prompts, written[job], strict=True)]
            for job, prompts in work.prompts.items()
        }

    def _tokenizer_of(self, job: str, work: AnswersWork) -> Tokenizer:
        """What a job's answers are written with."""
        new_tokens = () if work.is_bare else self._jobs[job].given.spec.adapter.new_tokens
        tokenizer: Tokenizer = with_new_tokens(self.tokenizer, new_tokens)
        return tokenizer

    def _ask_of(
        self, what: str, jobs: Iterable[str], order: Callable[[tuple[str, ...]], Work[Any]]
    ) -> list[tuple[tuple[str, ...], Any]]:
        """Asks all replicas at once of jobs that they have: the jobs of each, and what its last stage tells of them."""
        own: list[list[str]] = [[] for _ in self._replicas]
        for job in sorted(jobs, key=lambda job: len(self._jobs[job].shares)):
            # Those that are everywhere go where the fewest are.
            min((own[replica] for replica in self._jobs[job].shares), key=len).append(job)
        given = {
            device: (order(tuple(own[replica])),)
            for together in self._copies
            if any(own[replica] for replica in together)
            for replica in together
            for device in self._replicas[replica]
        }
        found = dict(zip(given, self.stages.call_each(what, given), strict=True))
        last = [found.get(devices[-1]) for devices in self._replicas]
        return [(tuple(named), told) for named, told in zip(own, last, strict=True) if named]

    def _write(self, work: CheckpointWork | AdapterWork) -> None:
        if isinstance(work, CheckpointWork):
            tensors = join_state(self._jobs.call_home("tensors", work.job, work.step))
            checkpoint = Checkpoint(work.step, tensors, dict(work.state), dict(work.environment))
            save_checkpoint(work.directory, checkpoint, keep=work.keep)
            return
        job = self._jobs[work.job]
        named, row_modules = self._jobs.call_home("named", work.job)[0]
        new_tokens = named.new_tokens
        write_adapter(
            work.directory,
            named,
            _merged(self._jobs.call_home("modules", work.job, work.best, work.step)),
            base_model=self.facts.base_model,
            target_names=self.target_names(work.job),
            chat_template=job.given.spec.chat_template,
            shared=next(share.shared for share in job.shares[job.home] if share.modules),
            head=job.given.batches.data.head,
            row_modules=row_modules,
            tokenizer=with_new_tokens(self.tokenizer, new_tokens) if new_tokens else None,
        )


def _merged(parts: list[Mapping[str, ModuleTensors]]) -> dict[str, ModuleTensors]:
    return {path: tensors for part in parts for path, tensors in part.items()}


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
