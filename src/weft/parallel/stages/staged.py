"""The executor of one or more replicas whose layers are divided into stages.

It holds no tensor of a model: it calls all stages and merges their answers, so that checkpoints and adapters are those
of one device. `staged_jobs.py` knows which replicas have a job.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from weft.adapters.method import ModuleTensors
from weft.data.chat_template import Tokenizer
from weft.data.tokenise import with_new_tokens
from weft.engine.execute.protocol import (
    AdapterWork,
    AddedJob,
    AnswersWork,
    CheckpointWork,
    EvaluationOutcome,
    EvaluationWork,
    NewJob,
    OutcomeT,
    ReplicaFacts,
    ReplicaMemory,
    StateWork,
    Ticket,
    Work,
)
from weft.engine.inference.generate import Answer, refuse_long, worded
from weft.engine.program_run import ProgramRun
from weft.errors import ConfigError, StorageError
from weft.model.ahead.compile_ahead import CompileAhead
from weft.parallel.staged_memory import StagedAccount
from weft.parallel.staged_run import StagedRun
from weft.parallel.stages.shares import join_state, refuse_divided
from weft.parallel.stages.staged_jobs import StagedJobs
from weft.parallel.stages.work import (
    FinishWork,
    MoveWork,
    StagedOutcome,
    StagedWork,
    StageGroup,
    StageOutcome,
    StepOrders,
    program_outcome,
)
from weft.plan.admit import MARGIN
from weft.plan.layout import copies
from weft.plan.program import Program
from weft.spec import AdapterSpec
from weft.store.checkpoint import Checkpoint, save_checkpoint
from weft.store.peft_files import write_adapter


class StagedExecutor:
    """Runs work on all stages of its replicas, as soon as it is started. Only consecutive programs run on until they
    are waited for. Meanwhile other jobs may be added, moved and dropped, and files may be written."""

    run_kind: type[ProgramRun] = StagedRun

    def __init__(
        self,
        stages: StageGroup,
        tokenizer: Tokenizer,
        *,
        shards: Sequence[int] = (),
        ahead: CompileAhead | None = None,
    ) -> None:
        """`shards`: numbers of consecutive replicas that share one copy of the frozen weights; empty: none do. `ahead`:
        kernels that are being compiled for all stages."""
        self.stages = stages
        self._ahead, self._compiling_s = ahead, 0.0
        self.tokenizer = tokenizer
        ends = [*itertools.accumulate(stages.replica_sizes)]
        self.replicas = [range(end - size, end) for end, size in zip(ends, stages.replica_sizes, strict=True)]
        self._copies = copies(len(self.replicas), shards)
        self.facts = facts_of(stages.call_all("facts"), self.replicas, shards)
        self._jobs = StagedJobs(stages, self.replicas, self._copies)
        self.account = StagedAccount(stages, self.facts, self._jobs)
        self._at_rest: list[ReplicaMemory] = [] if self.facts.device_kind == "cpu" else self.account.memory()
        """Memory of each stage with the frozen weights alone."""
        self._done: dict[int, Callable[[], Any]] = {}
        self._num_started = 0
        self._orders = StepOrders()

    def check_adapter(self, adapter: AdapterSpec) -> None:
        self.stages.call_all("check_adapter", adapter)

    def row_tile(self, capacity: int) -> int:
        return int(self.stages.call_all("row_tile", capacity)[0])

    def activation_bytes(self, capacity: int, adapters: Collection[AdapterSpec]) -> int:
        """Bytes of microbatches on all stages of a replica, if each held as much as the fullest. The earlier a stage,
        the more microbatches it holds at a time."""
        found = self.account.microbatch_bytes(capacity, adapters)
        fullest = [max(found[device] * (devices.stop - device) for device in devices) for devices in self.replicas]
        return max(most * len(devices) for most, devices in zip(fullest, self.replicas, strict=True))

    def in_flight(
        self, capacity: int, adapters: Collection[AdapterSpec], job_bytes: Mapping[str, int]
    ) -> tuple[int, ...]:
        """See `ProgramExecutor`. Counted from the weights and the jobs: at any moment others are in flight."""
        if not self._at_rest:
            return ()
        each, seats = self.account.microbatch_bytes(capacity, adapters), self._jobs.by_stage(job_bytes)
        left = [
            memory.usable_bytes / (1 + MARGIN) - memory.allocated_bytes - own
            for memory, own in zip(self._at_rest, seats, strict=True)
        ]
        return tuple(max(1, int(free // most)) for free, most in zip(left, each, strict=True))

    def memory(self) -> ReplicaMemory | None:
        """Memory of the replica with the least room, as if all its stages were as full as the fullest; None on CPUs."""
        if self.facts.device_kind == "cpu":
            return None
        found = self.account.memory()
        held = [sum(found[device].allocated_bytes for device in devices) for devices in self.replicas]
        left = [
            len(devices) * min(found[device].usable_bytes - found[device].allocated_bytes for device in devices)
            for devices in self.replicas
        ]
        fullest = left.index(min(left))
        return ReplicaMemory(held[fullest] + left[fullest], held[fullest])

    def release_memory(self) -> None:
        self.stages.call_all("release_memory")

    @property
    def is_compiling(self) -> bool:
        return self._ahead is not None and not self._ahead.is_ready

    def compiling_s(self) -> float:
        return self._compiling_s

    def add(self, job: NewJob) -> AddedJob:
        refuse_divided(job.spec, self.stages.replica_sizes)
        own = self._jobs.add(job)
        num_trained = sum(share.run_of(group) for share in own for group in share.trained)
        return AddedJob(num_trained, "", sum(s.num_compared for s in own))

    def drop(self, job: str) -> None:
        self._jobs.drop(job)

    def seat(self, job: str) -> None:
        self._jobs.seat(job)

    def unseat(self, job: str) -> None:
        self._jobs.unseat(job)

    def restore(self, job: str, tensors: dict[str, torch.Tensor]) -> None:
        self._jobs.restore(job, tensors)

    def rewind(self, job: str) -> None:
        self._jobs.call("rewind", job)

    def keep_best(self, job: str) -> None:
        self._jobs.call("keep_best", job)

    def use_best(self, job: str) -> None:
        self._jobs.call("use_best", job)

    def adapter_of(self, job: str) -> dict[str, tuple[torch.Tensor, ...]]:
        return _merged(self._jobs.call_home("adapter_of", job))

    def target_names(self, job: str) -> list[str]:
        known = self._jobs[job]
        return list(known.shares[known.home][0].target_names)

    def start(self, work: Work[OutcomeT]) -> Ticket[OutcomeT]:
        self._num_started += 1
        if isinstance(work, StagedWork | EvaluationWork):
            self._await_kernels()
        self._done[self._num_started] = self._run(work)
        return Ticket(self._num_started)

    def wait(self, ticket: Ticket[OutcomeT]) -> OutcomeT:
        outcome: OutcomeT = self._done.pop(ticket.number)()
        return outcome

    def is_written(self, ticket: Ticket[None]) -> bool:
        """Files are written when `start` returns."""
        return True

    def close(self) -> None:
        self.stages.close()

    def _await_kernels(self) -> None:
        """Waits for kernels that are compiled ahead: else every stage would compile them itself."""
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
                results = dataclasses.replace(work, lists=None)
                seatings = self._jobs.num_seatings
                number = self.stages.append(results, work.lists, self._orders.due(work.lists))
                return lambda: self._outcome(work, self.stages.outcomes(number), seatings)
            case MoveWork(program):
                self._jobs.gather_to_home(program)
                done = None
            case FinishWork(lists):
                self.stages.go_on(lists, self._orders.due(lists))
                done = None
            case StagedWork():
                self._jobs.gather_to_home(work.program)
                results = dataclasses.replace(work, reads_references=self._reads_references(work.program))
                done = self._outcome(work, self.stages.call_all("run", results), self._jobs.num_seatings)
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

    def _outcome(self, work: StagedWork, stages: list[StageOutcome], num_seatings: int) -> StagedOutcome:
        self.account.observe(stages, num_seatings)
        return program_outcome(work, stages)

    def _reads_references(self, program: Program) -> bool:
        jobs = {job for microbatch in program.microbatches for job in microbatch.job_tokens}
        return any(self._jobs[job].given.batches.data.reads_reference for job in jobs)

    def _evaluate(self, work: EvaluationWork) -> EvaluationOutcome:
        begun_s = time.perf_counter()
        found = self._call_owners("evaluate", work.jobs, lambda jobs: dataclasses.replace(work, jobs=jobs))
        parts = {job: part for jobs, results in found for job, part in zip(jobs, results, strict=True)}
        ended_s = time.perf_counter()
        return EvaluationOutcome([parts[job] for job in work.jobs], ended_s - begun_s, ended_s)

    def _answer(self, work: AnswersWork) -> dict[str, list[Answer]]:
        if work.decoding.prompt_logprobs is not None:
            raise ConfigError("is not supported where the backbone is divided.", where="prompt_logprobs")
        refuse_long([prompt for prompts in work.prompts.values() for prompt in prompts], self.facts.max_positions)
        found = self._call_owners(
            "answer", work.prompts, lambda jobs: dataclasses.replace(work, prompts={j: work.prompts[j] for j in jobs})
        )
        written = {job: finished for jobs, results in found for job, finished in zip(jobs, results, strict=True)}
        return {
            job: worded(prompts, written[job], self._tokenizer_of(job, work), work.decoding)
            for job, prompts in work.prompts.items()
        }

    def _tokenizer_of(self, job: str, work: AnswersWork) -> Tokenizer:
        new_tokens = () if work.is_bare else self._jobs[job].given.spec.adapter.new_tokens
        tokenizer: Tokenizer = with_new_tokens(self.tokenizer, new_tokens)
        return tokenizer

    def _call_owners(
        self, what: str, jobs: Iterable[str], order: Callable[[tuple[str, ...]], Work[Any]]
    ) -> list[tuple[tuple[str, ...], Any]]:
        """Calls all replicas at once for jobs that they have: the jobs of each, and the answer of its last stage."""
        own: list[list[str]] = [[] for _ in self.replicas]
        for job in sorted(jobs, key=lambda job: len(self._jobs[job].shares)):
            # Jobs on all replicas go to the one with the fewest.
            min((own[replica] for replica in self._jobs[job].shares), key=len).append(job)
        given = {
            device: (order(tuple(own[replica])),)
            for together in self._copies
            if any(own[replica] for replica in together)
            for replica in together
            for device in self.replicas[replica]
        }
        found = dict(zip(given, self.stages.call_each(what, given), strict=True))
        last = [found.get(devices[-1]) for devices in self.replicas]
        return [(tuple(named), results) for named, results in zip(own, last, strict=True) if named]

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
    """Runs a write at once; returns a function that raises its StorageError, if any."""
    try:
        write()
    except StorageError as error:
        kept = error

        def again() -> None:
            raise kept

        return again
    return lambda: None


def facts_of(stages: list[ReplicaFacts], replicas: Sequence[range], shards: Sequence[int]) -> ReplicaFacts:
    """Facts of all replicas from those of their stages; the configuration is the last stage's."""
    sizes, degrees = tuple(map(len, replicas)), [stages[devices.start].tensor[0] for devices in replicas]
    return dataclasses.replace(
        stages[-1],
        modules=tuple(path for device in replicas[0] for path in stages[device].modules),
        backbone_bytes=sum(facts.backbone_bytes * facts.tensor[0] for facts in stages),
        kernels=f"{stages[-1].kernels}; {_in_words(sizes, shards, degrees)}",
        environment={**stages[-1].environment, **({"tensor": degrees} if len({*degrees}) > 1 else {})},
        replica_sizes=sizes,
        tensor=tuple(degrees),
        shards=tuple(shards),
    )


def _in_words(replica_sizes: Sequence[int], shards: Sequence[int], degrees: list[int]) -> str:
    owners = copies(len(replica_sizes), shards)
    found = [] if len(owners) == 1 else [f"{len(owners)} replicas"]
    for word, numbers in (
        ("shards", [len(own) for own in owners]),
        ("stages", [replica_sizes[own.start] for own in owners]),
    ):
        if max(numbers) > 1:
            found.append(f"{', '.join(map(str, numbers))} {word}")
    if max(degrees) > 1:
        numbers = degrees[:1] if len({*degrees}) == 1 else degrees
        found.append(f"{', '.join(map(str, numbers))} devices that share every layer")
    return " of ".join(found)
