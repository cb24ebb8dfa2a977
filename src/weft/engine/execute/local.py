"""The executor of one backbone in this process."""

from __future__ import annotations

import platform
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

import weft
from weft.adapters.frozen import describe, quantisation
from weft.adapters.targets import leaf_names
from weft.data.chat_template import Tokenizer
from weft.engine.execute.eva import start_from_inputs
from weft.engine.execute.evaluate import EvaluationInFlight, ScoreRequest, evaluated
from weft.engine.execute.memory import DeviceAccount, measure, release_memory, weight_bytes
from weft.engine.execute.microbatch import ExecutedJob, MicrobatchInFlight, pack_microbatch, take_steps
from weft.engine.execute.optimizers.optimizer import refuse_idle_rates
from weft.engine.execute.protocol import (
    AdapterWork,
    AddedJob,
    AnswersWork,
    CheckpointWork,
    EvaluatedPart,
    EvaluationWork,
    Executor,
    MemoryTrial,
    MicrobatchWork,
    NewJob,
    OutcomeT,
    ReplicaFacts,
    ReplicaFaultError,
    ReplicaMemoryError,
    StateWork,
    StepsWork,
    Ticket,
    Work,
)
from weft.engine.execute.references import JobReference, ReferenceCache
from weft.engine.execute.weights import FileWriter, JobWeights, writing
from weft.engine.inference.attach import adapter_on
from weft.engine.inference.generate import answers
from weft.errors import ConfigError
from weft.kernels.device import (
    CPU,
    device_name,
    is_cpu,
    is_device_fault,
    is_gpu,
    memory_errors,
)
from weft.kernels.dropout import MASKS
from weft.model.backbone import Backbone
from weft.model.load import load_backbone
from weft.model.packed import PackedBatch
from weft.model.resolve import ResolvedModel
from weft.spec import AdapterSpec, BackboneSpec


class LocalExecutor:
    """Runs work on a backbone in this process, as soon as it is started."""

    def __init__(self, backbone: Backbone) -> None:
        self.backbone = backbone
        self.facts = replica_facts(backbone)
        self.tokenizer: Tokenizer = backbone.tokenizer
        self.account = DeviceAccount(backbone)
        self.jobs: dict[str, ExecutedJob] = {}
        self._unseen: set[str] = set()
        self._known = ReferenceCache(backbone)
        self._ready: tuple[MicrobatchWork, PackedBatch] | None = None
        self._started: dict[int, Callable[[], Any]] = {}
        self._files = FileWriter(is_beside=backbone.works_on)
        self._writing: dict[int, Future[None]] = {}
        self._in_flight: dict[int, MicrobatchInFlight] = {}
        """The last two microbatches, for the steps after them."""
        self._num_started = 0

    def beside(self) -> LocalExecutor:
        return LocalExecutor(self.backbone)

    def check_adapter(self, adapter: AdapterSpec) -> None:
        self.backbone.check_adapter(adapter)

    def row_tile(self, capacity: int) -> int:
        return self.backbone.path.row_tile(capacity)

    def activation_bytes(self, capacity: int, adapters: Collection[AdapterSpec]) -> int:
        return self.backbone.activation_bytes(capacity, adapters)

    def release_memory(self) -> None:
        release_memory(self.backbone)

    def compiling_s(self) -> float:
        return self.backbone.compiling_s

    def add(self, job: NewJob) -> AddedJob:
        spec, head = job.spec, job.batches.data.head
        adapter = self.backbone.new_adapter(spec.adapter, spec.seed, CPU, head, spec.gradient_sum)
        refuse_idle_rates(job.spec.learning_rate_pattern, list(adapter.modules))
        if job.start is not None:
            self.check_rows(job)
            adapter.load(job.start, job.start_name)
        elif adapter.spec.eva is not None:
            self._unseen.add(job.spec.name)
        # Only a check; it is made again when it takes its slot.
        compared = None if job.reference is None else adapter_on(self.backbone, job.reference)
        self.jobs[job.spec.name] = ExecutedJob(job, JobWeights(job.spec, adapter), self._reference(job))
        num_compared = 0 if compared is None else compared.num_parameters
        kernel_bytes = self.backbone.kernel_bytes(adapter.spec)
        lane, trained = self.backbone.lane(adapter.spec), self.backbone.sites.describe_targets(spec.adapter)
        return AddedJob(adapter.num_parameters, lane, num_compared, kernel_bytes, trained)

    def _reference(self, job: NewJob) -> JobReference | None:
        data = job.batches.data
        return JobReference(self._known, data, job.reference) if data.reads_reference else None

    def check_rows(self, job: NewJob) -> None:
        """ConfigError if a job has other rows of tokens than the adapter it starts from."""
        assert job.start_spec is not None
        mine, theirs = (self.backbone.embeddings.named(spec) for spec in (job.spec.adapter, job.start_spec))
        if mine.own_rows != theirs.own_rows:
            raise ConfigError(
                f"{job.start_name} has other rows of tokens; trainable_token_indices, new_tokens and modules_to_save "
                "must be its own.",
                where="adapter",
            )

    def drop(self, job: str) -> None:
        del self.jobs[job]
        self._unseen.discard(job)

    def seat(self, job: str) -> None:
        weights, reference = self.jobs[job].weights, self.jobs[job].reference
        has_seat = False
        try:
            with device_errors_as_replica_errors():
                if job in self._unseen:
                    given = self.jobs[job].given
                    start_from_inputs(self.backbone, weights.adapter, given.batches, given.spec.seed)
                    self._unseen.remove(job)
                weights.move_to(self.backbone.device)
                weights.optimizer.make_moments()
                if reference is not None:
                    reference.take_slot()
                weights.slot = self.backbone.attach(weights.adapter)
            has_seat = True
        finally:
            self._ready = None
            if not has_seat:
                weights.move_to(CPU)
                if reference is not None:
                    reference.free_slot()

    def unseat(self, job: str) -> None:
        self._ready = None
        weights, reference = self.jobs[job].weights, self.jobs[job].reference
        if weights.slot is not None:
            self.backbone.detach(weights.slot)
            weights.slot = None
            weights.move_to(CPU)
            if reference is not None:
                reference.free_slot()

    def restore(self, job: str, tensors: dict[str, torch.Tensor]) -> None:
        self._unseen.discard(job)
        self.jobs[job].weights.restore(tensors)

    def rewind(self, job: str) -> None:
        self.jobs[job].weights.adapter.zero_grad()

    def keep_best(self, job: str) -> None:
        with device_errors_as_replica_errors():
            self.jobs[job].weights.keep_best()

    def use_best(self, job: str) -> None:
        self.jobs[job].weights.use_best()

    def adapter_of(self, job: str) -> dict[str, tuple[torch.Tensor, ...]]:
        return self.jobs[job].weights.adapter.tensors()

    def target_names(self, job: str) -> list[str]:
        adapter = self.jobs[job].weights.adapter
        chosen = list(adapter.modules)
        return leaf_names(chosen, self.backbone.sites.shapes_for(adapter.method)) or chosen

    @contextmanager
    def slot_of(self, job: str) -> Iterator[int]:
        weights = self.jobs[job].weights
        if weights.slot is not None:
            with weights.average_shown():
                yield weights.slot
            return
        weights.move_to(self.backbone.device)
        slot = self.backbone.attach(weights.adapter)
        try:
            with weights.average_shown():
                yield slot
        finally:
            self.backbone.detach(slot)
            weights.move_to(CPU)

    def _evaluated(self, job: str) -> AbstractContextManager[ScoreRequest]:
        known = self.jobs[job]
        return evaluated(known.given, known.reference, self.slot_of(job))

    def prepare(self, work: MicrobatchWork) -> None:
        """Packs a microbatch; it is used if the same one is started before a job comes or goes."""
        with device_errors_as_replica_errors():
            self._ready = (work, pack_microbatch(self.backbone, self.jobs, work))

    def start(self, work: Work[OutcomeT]) -> Ticket[OutcomeT]:
        self._num_started += 1
        number = self._num_started
        with device_errors_as_replica_errors():
            if isinstance(work, CheckpointWork | AdapterWork):
                job, names = self.jobs[work.job], self.target_names(work.job)
                write = writing(work, job, self.facts.base_model, names, self.backbone.embeddings)
                self._writing[number] = self._files.submit(work.job, write)
            else:
                self._started[number] = self._begin(work, number)
        return Ticket(number)

    def wait(self, ticket: Ticket[OutcomeT]) -> OutcomeT:
        if ticket.number in self._writing:
            written: Any = self._writing.pop(ticket.number).result()
            return written  # type: ignore[no-any-return]
        with device_errors_as_replica_errors():
            outcome: OutcomeT = self._started.pop(ticket.number)()
        return outcome

    def is_written(self, ticket: Ticket[None]) -> bool:
        return self._writing[ticket.number].done()

    def try_out(self, work: MicrobatchWork) -> MemoryTrial:
        """Runs a microbatch on the same data, with adapters of the same shapes on slots of their own."""
        stand_ins = {name: self._stand_in(name) for name in work.microbatch.job_tokens}

        def run() -> None:
            batch = pack_microbatch(self.backbone, stand_ins, work)
            MicrobatchInFlight(self.backbone, stand_ins, work, batch).outcome()

        try:
            with device_errors_as_replica_errors():
                return measure(self.backbone, run)
        finally:
            for stand_in in stand_ins.values():
                assert stand_in.weights.slot is not None
                self.backbone.detach(stand_in.weights.slot)
                if stand_in.reference is not None:
                    stand_in.reference.free_slot()

    def close(self) -> None:
        """Does nothing: all work is in this process."""

    def _begin(self, work: Work[Any], number: int) -> Callable[[], Any]:
        match work:
            case MicrobatchWork():
                self.account.meter.hold(0, work.microbatch.num_tokens)
                self.account.meter.release(0)
                in_flight = MicrobatchInFlight(self.backbone, self.jobs, work, self._packed(work))
                self._in_flight = {**dict([*self._in_flight.items()][-1:]), number: in_flight}
                # Older work that was never waited for was abandoned when memory ran out.
                self._started = {n: wait for n, wait in self._started.items() if n >= min(self._in_flight)}
                return in_flight.outcome
            case StepsWork(steps, behind):
                begin = take_steps if behind is None else self._in_flight[behind.number].take_steps
                return begin(self.jobs, steps)
            case EvaluationWork(names, capacity, row_tile, after, max_microbatches):
                with ExitStack() as slots:
                    requests = [
                        slots.enter_context(self._evaluated(name))._replace(after=after.get(name, EvaluatedPart()))
                        for name in names
                    ]
                    return EvaluationInFlight(self.backbone, requests, capacity, row_tile, max_microbatches).outcome
            case AnswersWork(prompts, decoding, is_bare):
                with ExitStack() as slots:
                    to_answer = {
                        name: (None if is_bare else slots.enter_context(self.slot_of(name)), given)
                        for name, given in prompts.items()
                    }
                    given = answers(self.backbone, to_answer, decoding)
                return lambda: given
            case StateWork(name):
                tensors = self.jobs[name].weights.tensors()
                return lambda: tensors
        raise AssertionError(f"no executor knows {work}")

    def _packed(self, work: MicrobatchWork) -> PackedBatch:
        ready, self._ready = self._ready, None
        return ready[1] if ready is not None and ready[0] == work else pack_microbatch(self.backbone, self.jobs, work)

    def _stand_in(self, name: str) -> ExecutedJob:
        given = self.jobs[name].given
        spec, head = given.spec, given.batches.data.head
        adapter = self.backbone.new_adapter(spec.adapter, spec.seed, objective=head, gradient_sum=spec.gradient_sum)
        weights, reference = JobWeights(given.spec, adapter), self._reference(given)
        weights.slot = self.backbone.attach(weights.adapter)
        if reference is not None:
            reference.take_slot()
        return ExecutedJob(given, weights, reference)


def executor_on(replica: Executor | Backbone | BackboneSpec | ResolvedModel | str) -> Executor:
    """The executor itself, or one in this process on a backbone, which is loaded if only described."""
    if isinstance(replica, str):
        replica = BackboneSpec(replica)
    if isinstance(replica, BackboneSpec | ResolvedModel):
        replica = load_backbone(replica)
    return LocalExecutor(replica) if isinstance(replica, Backbone) else replica


def replica_facts(backbone: Backbone) -> ReplicaFacts:
    return ReplicaFacts(
        base_model=backbone.name,
        config=backbone.model.config.to_dict(),
        modules=tuple(backbone.linears),
        device=str(backbone.device),
        device_kind=backbone.device.type,
        dtype=str(backbone.dtype).removeprefix("torch."),
        storage=describe(linear.frozen for linear in backbone.linears.values()),
        kernels=backbone.kernels,
        path=backbone.path.name,
        works_on=backbone.works_on,
        vocabulary=backbone.vocabulary,
        max_positions=backbone.max_positions,
        backbone_bytes=backbone.num_bytes,
        weight_bytes=weight_bytes(backbone),
        environment=environment(backbone),
        tensor=(1 if backbone.devices is None else backbone.devices.count,),
    )


def environment(backbone: Backbone) -> dict[str, Any]:
    """Everything besides the job that decides the bits of its result."""
    return {
        "weft": weft.__version__,
        "torch": torch.__version__,
        "device": device_name(backbone.device) if is_gpu(backbone.device) else platform.machine(),
        "dtype": str(backbone.dtype).removeprefix("torch."),
        "threads": torch.get_num_threads() if is_cpu(backbone.device) else 0,
        "base_model": backbone.name,
        "quantize": quantisation(linear.frozen for linear in backbone.linears.values()),
        "masks": MASKS,
        **backbone.digests,
        **({} if backbone.devices is None else {"tensor": backbone.devices.count}),
    }


@contextmanager
def device_errors_as_replica_errors() -> Iterator[None]:
    """Raises missing memory as ReplicaMemoryError and a failed device as ReplicaFaultError."""
    try:
        with memory_errors():
            yield
    except torch.OutOfMemoryError as error:
        raise ReplicaMemoryError(str(error)) from error
    except RuntimeError as error:
        if is_device_fault(error):
            raise ReplicaFaultError(str(error)) from error
        raise
