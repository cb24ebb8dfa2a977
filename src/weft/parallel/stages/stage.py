"""One stage: a part of the backbone, with the share that every job's adapter has of it.

A job without a module here, because of `layers_to_transform`, has no share: its samples pass the bare layers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from weft.adapters.devices import SideBySide
from weft.adapters.method import ModuleTensors
from weft.adapters.parts import INPUT_ROWS
from weft.adapters.targets import leaf_names
from weft.engine.execute.evaluate import ScoreRequest, evaluated
from weft.engine.execute.local import LocalExecutor, device_errors_as_replica_errors, replica_facts
from weft.engine.execute.memory import PeakMeter, replica_memory
from weft.engine.execute.microbatch import ExecutedJob, packed_sample
from weft.engine.execute.optimizers import OPTIMIZER_KINDS
from weft.engine.execute.optimizers.optimizer import Optimizer, refuse_idle_rates
from weft.engine.execute.protocol import NewJob, ReplicaFacts, ReplicaMemory
from weft.engine.execute.references import ReferenceRequest
from weft.engine.execute.weights import JobWeights
from weft.engine.inference.attach import StoredAdapter, adapter_on, attach_adapter, own_part
from weft.engine.inference.generate import Continuation, end_tokens
from weft.errors import ConfigError
from weft.kernels.device import CPU, Stream, current_stream, has_streams, is_cpu, on_stream, synchronise
from weft.methods.registry import method_of
from weft.model.backbone import Backbone
from weft.model.packed import PackedBatch, pack_samples
from weft.parallel.stages.shares import (
    JobShare,
    StagePassResult,
    StageReferences,
    StageStart,
    refuse_indivisible,
    refuse_method,
    without_tied,
)
from weft.parallel.stages.stage_runner import stage_runner
from weft.parallel.stages.transport import Channel, Route, Transport
from weft.plan.program import Program
from weft.plan.types import Microbatch
from weft.spec import AdapterSpec
from weft.store.row_files import ROWS


class StagePrompts:
    """Adapters and sequences of prompts that are answered pass by pass (`read_prompts`)."""

    def __init__(self, backbone: Backbone) -> None:
        self._backbone = backbone
        self._slots: dict[int, tuple[int | None, int]] = {}
        """Slot here and rows in front of a prompt, by number of the adapter. It may have no module here."""
        self._caches: dict[int, dict[Any, Any]] = {}

    def attach(self, number: int, stored: StoredAdapter) -> None:
        own = own_part(self._backbone, stored)
        with device_errors_as_replica_errors():
            slot = None if own is None else attach_adapter(self._backbone, own)
        self._slots[number] = slot, stored.spec.num_leading_rows

    def detach(self, number: int) -> None:
        slot, _ = self._slots.pop(number, (None, 0))
        if slot is not None:
            self._backbone.detach(slot)

    def check(self, stored: StoredAdapter) -> None:
        refuse_method(stored.spec, self._backbone, "model")
        own = own_part(self._backbone, stored)
        if own is not None:
            adapter_on(self._backbone, own, device=CPU)

    def keep(self, numbers: Collection[int]) -> None:
        """Drops the keys and values of all other sequences."""
        self._caches = {number: self._caches.get(number, {}) for number in numbers}

    def open(self, item: Continuation) -> tuple[Continuation, int]:
        """Returns the continuation with its keys and values on this stage, and the number of rows in front of it."""
        slot, num_leading = (None, 0) if item.request.slot is None else self._slots[item.request.slot]
        item.request = replace(item.request, slot=slot)
        item.cache = self._caches[item.cache["number"]]
        return item, num_leading


@dataclass(frozen=True)
class StagePosition:
    replica: int
    index: int
    num_stages: int
    device: int


ROUND_TRIPS = 10
UNPAIRED = 4
"""Consecutive programs without pairs after which capturing graphs is worth it."""


def stage_positions(replica_sizes: Sequence[int]) -> list[StagePosition]:
    pairs = [(replica, index, size) for replica, size in enumerate(replica_sizes) for index in range(size)]
    return [StagePosition(*pair, device) for device, pair in enumerate(pairs)]


class Stage:
    def __init__(self, position: StagePosition, backbone: Backbone, transport: Transport) -> None:
        self.index, self.num_stages, self.device = position.index, position.num_stages, position.device
        self.replica = position.replica
        self.backbone = backbone
        self.transport = transport
        self.runner = stage_runner(backbone)
        self.side_by_side: SideBySide | None = None
        """Runs the passes of a pair where devices share every layer; None: one after another."""
        self._num_unpaired = UNPAIRED
        # On one GPU, autograd runs backward through one graph at a time.
        if backbone.devices is not None and (is_cpu(backbone.device) or backbone.path.name == "fused"):
            self.side_by_side = SideBySide(backbone.devices, backbone.routing, backbone.device)
        self._stream: Stream | None = None
        if has_streams(backbone.device):
            self._stream = Stream(backbone.device)
            # The weights may still be on their way.
            self._stream.wait_stream(current_stream(backbone.device))
        self.local = LocalExecutor(backbone)
        self.meter = PeakMeter(backbone.device)
        self.num_processes = 1
        """Stages on this machine, which share its memory where they run on CPUs."""
        self._given: dict[str, NewJob] = {}
        self.references = StageReferences(backbone)
        self.prompts = StagePrompts(backbone)
        self.shares: dict[str, Mapping[int, Sequence[JobShare]]] = {}
        self._kept: dict[str, dict[int, Callable[[], dict[str, torch.Tensor]]]] = {}
        self._starts: dict[str, StageStart] = {}

    def at_work(self) -> AbstractContextManager[object]:
        """Context in which launches go to the stage's own stream; all its work on a GPU is launched there."""
        return nullcontext() if self._stream is None else on_stream(self._stream)

    def expect(self, program: Program) -> None:
        """Prepares for a program: passes run without graphs while there are pairs, and for a few programs after. Some
        programs in between are planned at once and have no pairs, and capturing graphs takes long."""
        devices = self.backbone.devices
        if self.side_by_side is None or devices is None:
            return
        self._num_unpaired = 0 if program.pairs else self._num_unpaired + 1
        if program.pairs and not devices.runs_pairs:
            # Graphs would keep memory that is counted only once.
            self.backbone.path.forget()
        devices.runs_pairs = self._num_unpaired < UNPAIRED

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index + 1 == self.num_stages

    def facts(self) -> ReplicaFacts:
        return replica_facts(self.backbone)

    def memory(self) -> ReplicaMemory | None:
        return replica_memory(self.backbone, self.num_processes)

    def time_link(self, first: int, second: int, num_bytes: int) -> float:
        """Seconds of a message between two stages, by half the fastest of some round trips; all stages call it."""
        routes = Route(Channel.ACTIVATION, first, second), Route(Channel.GRADIENT, second, first)
        self.transport.open(routes)
        tensor = torch.zeros(num_bytes, dtype=torch.uint8, device=self.backbone.device)
        fastest = float("inf")
        for _ in range(ROUND_TRIPS if self.device in (first, second) else 0):
            begun_s = time.perf_counter()
            for route in routes:
                if route.source == self.device:
                    self.transport.send(tensor, route.target, route.channel)
                else:
                    self.transport.receive(tensor.shape, tensor.dtype, route.source, route.channel)
                    synchronise(self.backbone.device)
            fastest = min(fastest, time.perf_counter() - begun_s)
        self.transport.finish()
        return fastest / 2

    def weights_of(self, job: str) -> JobWeights | None:
        return self.local.jobs[job].weights if job in self.local.jobs else None

    def end_tokens(self) -> set[int]:
        return end_tokens(self.backbone)

    def check_stored(self, stored: StoredAdapter) -> None:
        self.prompts.check(stored)

    def attach_stored(self, number: int, stored: StoredAdapter) -> None:
        self.prompts.attach(number, stored)

    def detach_stored(self, number: int) -> None:
        self.prompts.detach(number)

    def optimizer_kind(self, job: str) -> type[Optimizer]:
        return OPTIMIZER_KINDS[self._given[job].spec.optim]

    def add(self, job: NewJob) -> JobShare:
        """Adds this stage's share of a job; ConfigError if the job does not fit a backbone in parts."""
        spec, method = job.spec, method_of(job.spec.adapter)
        refuse_method(spec.adapter, self.backbone, "adapter.method")
        if self.backbone.devices is not None:
            refuse_indivisible(spec)
        targets = self.backbone.sites.targets(spec.adapter)
        refuse_idle_rates(spec.learning_rate_pattern, targets)
        names = tuple(leaf_names(targets, self.backbone.sites.paths_for(method)) or targets)
        own = [path for path in targets if path in self.backbone.sites.shapes_for(method)]
        self._given[spec.name] = job
        num_compared, compared = self.references.add(job)
        if not own:
            self._refuse_parts(job)
            return JobShare({}, (), (), names, {}, num_compared=num_compared, compared=compared)
        head = job.batches.data.head if self.is_last else None
        adapter = self.backbone.new_adapter(spec.adapter, spec.seed, CPU, head, spec.gradient_sum)
        if job.start is not None:
            self.local.check_rows(job)
            adapter.load(self._own_start(job.start, [*own, *adapter.parts], targets), job.start_name)
        self.local.jobs[spec.name] = ExecutedJob(job, JobWeights(spec, adapter), self.references.of(spec.name))
        sizes = {name: params.numel() for name, params in adapter.flat().items()}
        free = adapter.any_order_sums() if spec.gradient_sum == "any_order" else {}
        summed = {group: words.sizes for group, words in free.items()}
        groups = tuple(adapter.groups)
        tied = () if self.is_first else tuple({INPUT_ROWS} & adapter.groups.keys())
        return JobShare(sizes, groups, tuple(own), names, adapter.shared, summed, num_compared, compared, tied)

    def _refuse_parts(self, job: NewJob) -> None:
        """ConfigError if a job without a module here has other parts here."""
        what = "head is on the last" if self.is_last and job.batches.data.head is not None else ""
        if self.backbone.embeddings.shapes_here(job.spec.adapter):
            what = f"rows of tokens are on the {'first' if self.is_first else 'last'}"
        if what:
            found = f"its {what} stage, where its adapter has no module; use fewer stages."
            raise ConfigError(found, where="adapter.layers_to_transform")

    def _own_start(
        self, start: Mapping[str, ModuleTensors], own: Sequence[str], targets: Sequence[str]
    ) -> dict[str, ModuleTensors]:
        """Tensors of an adapter file for this stage; those for no stage are left for the last to refuse."""
        elsewhere = {*targets, *ROWS} - {*own} if self.is_last else start.keys() - {*own}
        return {path: tensors for path, tensors in start.items() if path not in elsewhere}

    def know_shares(self, job: str, shares: Mapping[int, Sequence[JobShare]]) -> None:
        self.shares[job] = shares

    def replica_shares(self, job: str) -> Sequence[JobShare]:
        return self.shares[job][self.replica]

    def remove(self, job: str) -> None:
        self.unseat(job)
        self.drop(job)

    def drop(self, job: str) -> None:
        self._given.pop(job, None)
        self.references.drop(job)
        self.shares.pop(job, None)
        self._kept.pop(job, None)
        self.local.jobs.pop(job, None)

    def run_start_pass(self, job: str, entering_TD: torch.Tensor | None) -> StagePassResult | None:
        """Runs the next pass for a job's start; None if there are no more, or if others have the job. Where devices
        share the frozen weights, all of them take part."""
        found, ring = None, self.backbone.ring
        with device_errors_as_replica_errors():
            if job in self._given:
                weights = self.weights_of(job)
                adapter = None if weights is None else weights.adapter
                if job not in self._starts:
                    self._starts[job] = StageStart(self.backbone, self._given[job], adapter)
                found = self._starts[job].run_pass(entering_TD)
            if found is None and ring is not None:
                ring.run_empty_pass(back=False)
        return found

    def end_passes(self, job: str, is_given: bool) -> None:
        start = self._starts.pop(job, None)
        if start is not None and is_given:
            start.give()

    def seat(self, job: str) -> None:
        reference = self.references.of(job)
        if job in self.local.jobs:
            self.local.seat(job)
        elif reference is not None:
            with device_errors_as_replica_errors():
                reference.take_slot()

    def unseat(self, job: str) -> None:
        reference = self.references.of(job)
        self.references.leave(job)
        if job in self.local.jobs:
            self.local.unseat(job)
        elif reference is not None:
            reference.free_slot()

    def restore(self, job: str, tensors: dict[str, torch.Tensor]) -> None:
        self._kept.pop(job, None)
        if job in self.local.jobs:
            self.local.restore(job, tensors)

    def rewind(self, job: str) -> None:
        if job in self.local.jobs:
            self.local.rewind(job)

    def keep_best(self, job: str) -> None:
        if job in self.local.jobs:
            self.local.keep_best(job)

    def use_best(self, job: str) -> None:
        if job in self.local.jobs:
            self.local.use_best(job)

    def keep(self, job: str, step: int, oldest: int) -> None:
        """Keeps a copy of a job's tensors of this step, and drops copies of steps before `oldest`."""
        weights = self.weights_of(job)
        if weights is not None:
            kept = {known: copy for known, copy in self._kept.get(job, {}).items() if known >= oldest}
            self._kept[job] = {**kept, step: weights.snapshot(moments=True)}

    def tensors(self, job: str, step: int | None = None) -> dict[str, torch.Tensor]:
        """All tensors of a job's share by name, on the CPU: current, or the kept copy of a step; without tied ones. Of
        devices that share its layers, all but the first return their parts of what is divided."""
        weights = self.weights_of(job)
        if weights is None:
            return {}
        found = self._copy(job, weights, step, moments=True)
        devices = self.backbone.devices
        if devices is not None and devices.index > 0:
            found = {name: found[name] for name in found.keys() & weights.optimizer.divided}
        return without_tied(found, self.replica_shares(job)[self.index])

    def modules(self, job: str, best: bool, step: int | None = None) -> dict[str, ModuleTensors]:
        weights = self.weights_of(job)
        return {} if weights is None else weights.modules(self._copy(job, weights, step, moments=False), best=best)

    def _copy(self, job: str, weights: JobWeights, step: int | None, *, moments: bool) -> dict[str, torch.Tensor]:
        kept = self._kept.get(job, {})
        if step in kept:
            return kept[step]()
        assert step is None or all(other < step for other in kept), "the job is ahead of what is wanted of it"
        return weights.snapshot(moments=moments)()

    def named(self, job: str) -> tuple[AdapterSpec, Mapping[str, str]]:
        embeddings = self.backbone.embeddings
        return embeddings.named(self._given[job].spec.adapter), embeddings.paths

    def adapter_of(self, job: str) -> dict[str, tuple[torch.Tensor, ...]]:
        return self.local.adapter_of(job) if job in self.local.jobs else {}

    def packed(self, microbatch: Microbatch, row_tile: int) -> PackedBatch:
        """One buffer with every segment's sample; the same on all stages but for the slots."""
        samples = []
        for segment in microbatch.segments:
            weights = self.weights_of(segment.job)
            slot = None if weights is None else weights.slot
            reference = self.references.of(segment.job)
            samples.append(packed_sample(self._given[segment.job], slot, segment, reference, row_tile))
        return pack_samples(samples, row_tile, self.backbone.device)

    def border(self, num_rows: int) -> tuple[int, int]:
        return num_rows, int(self.backbone.model.config.get_text_config().hidden_size)

    def receive_activation(self, batch: PackedBatch) -> Generator[None, None, torch.Tensor]:
        """Waits for the previous stage's hidden states of a microbatch; yields where that stage must run first."""
        shape, dtype = self.border(batch.num_rows), self.backbone.dtype
        while (tensor := self.transport.receive(shape, dtype, self.device - 1, Channel.ACTIVATION)) is None:
            yield
        return tensor

    def request(self, job: str) -> ReferenceRequest | None:
        reference, weights = self.references.of(job), self.weights_of(job)
        if reference is None:
            return None
        slot = None if weights is None else weights.slot
        # Other replicas run samples of a spread job too.
        return ReferenceRequest(reference, slot, self._given[job].batches, looks_ahead=len(self.shares[job]) == 1)

    def slot_of(self, job: str) -> AbstractContextManager[int | None]:
        """Slot of a job's share, or a temporary one; None where it has no share."""
        return self.local.slot_of(job) if job in self.local.jobs else nullcontext()

    def leading_rows(self, job: str) -> int:
        return self._given[job].spec.adapter.num_leading_rows

    def evaluated(self, job: str) -> AbstractContextManager[ScoreRequest]:
        """Yields a job's evaluation, while the job and its reference have slots, where they have modules here."""
        return evaluated(self._given[job], self.references.of(job), self.slot_of(job))

    def forget(self) -> None:
        self.runner.forget()
        self.meter.forget()
        if self.backbone.ring is not None:
            self.backbone.ring.forget()
