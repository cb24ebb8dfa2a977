"""The tensors of a job: its adapter, its optimizer's moments, best weights and average, on the CPU or on a device.

The average is evaluated and exported instead of the last weights:

    average ← w after the first step;  average ← decay · average + (1 - decay) w after every later one

as torch's `AveragedModel` with `get_ema_avg_fn`. A step that was skipped does not count.

Files of jobs are written beside training (`FileWriter`): those of one job one after another, those of several at once.
On a CPU they are written at once instead, because the cores that would write are those that compute.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from weft.adapters.adapter import Adapter
from weft.adapters.method import ModuleTensors, SlotWeights
from weft.engine.execute.optimizers import optimizer_of
from weft.engine.execute.protocol import AdapterWork, CheckpointWork
from weft.kernels.adamw import Updated
from weft.kernels.device import is_cpu, memory_errors
from weft.kernels.device_event import host_copy, to_host
from weft.model.trained_rows import Embeddings
from weft.spec import AdapterSpec, JobSpec
from weft.store.checkpoint import Checkpoint, save_checkpoint
from weft.store.peft_files import write_adapter

if TYPE_CHECKING:
    from weft.engine.execute.microbatch import ExecutedJob

PREFIX = "ema_"
COUNT = "ema.count"


class WeightAverage:
    """Average of one adapter's weights, by group, in fp32 where the adapter is."""

    def __init__(self, adapter: Adapter, decay: float) -> None:
        self._decay = decay
        self.count = 0
        self.params = {name: torch.zeros_like(params) for name, params in adapter.trained().items()}

    def follow(self, adapter: Adapter) -> None:
        for name, params in adapter.trained().items():
            self.params[name].lerp_(params, 1 - self._decay if self.count else 1.0)
        self.count += 1

    def tensors(self) -> dict[str, torch.Tensor]:
        return {f"{PREFIX}{name}": params for name, params in self.params.items()} | {COUNT: torch.tensor(self.count)}

    def take(self, tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
        self.params = {name: tensors[f"{PREFIX}{name}"].to(device, copy=True) for name in self.params}
        self.count = int(tensors[COUNT])


class JobWeights:
    def __init__(self, spec: JobSpec, adapter: Adapter) -> None:
        self.adapter = adapter
        self.optimizer = optimizer_of(adapter, spec)
        self.best_params: dict[str, torch.Tensor] | None = None
        self.slot: int | None = None
        self.average = None if spec.ema_decay is None else WeightAverage(adapter, spec.ema_decay)
        self._spec = spec

    def move_to(self, device: torch.device) -> None:
        """Moves the whole state of the last step boundary to a device, bit by bit; only without a slot. Without memory
        for it the state stays where it is, and torch.OutOfMemoryError is raised."""
        assert self.slot is None, "a slot reads the weights where they are"
        with memory_errors():
            named = self._named(moments=True)
            tensors = to_host(named) if is_cpu(device) else {name: t.to(device, copy=True) for name, t in named.items()}
            self.adapter.take({group: tensors[f"params_{group}"] for group in self.adapter.flat()})
        self.optimizer = optimizer_of(self.adapter, self._spec)
        self.optimizer.take(tensors)
        self._take_copies(tensors)

    def after_step(self, updated: Updated) -> None:
        if self.average is not None and not updated.skipped:
            self.average.follow(self.adapter)

    @contextmanager
    def average_shown(self) -> Iterator[None]:
        """Puts the average into the adapter meanwhile, if there is one; then restores the last weights."""
        average = self._average_params()
        if average is None:
            yield
            return
        last = {name: params.clone() for name, params in self.adapter.trained().items()}
        self.adapter.put(average)
        try:
            yield
        finally:
            self.adapter.put(last)

    def keep_best(self) -> None:
        """Keeps a copy of the evaluated weights; without memory for it nothing changes."""
        evaluated = self._average_params() or self.adapter.trained()
        self.best_params = {name: params.clone() for name, params in evaluated.items()}

    def use_best(self) -> None:
        """Puts the best evaluated weights into the adapter, if kept, or else the average, if any."""
        chosen = self.best_params or self._average_params()
        if chosen is not None:
            self.adapter.put(chosen)

    def _average_params(self) -> dict[str, torch.Tensor] | None:
        return self.average.params if self.average is not None and self.average.count else None

    def tensors(self) -> dict[str, torch.Tensor]:
        return to_host(self._named(moments=True))

    def snapshot(self, *, moments: bool) -> Callable[[], dict[str, torch.Tensor]]:
        """Tensors at this step boundary, without the optimizer's if not `moments`; returns a function that waits for
        them. A GPU copies them to pinned memory between earlier and later work, so neither it nor the host waits. A job
        without a slot does not change: its tensors are the snapshot."""
        named = self._named(moments=moments)
        if self.slot is None:
            return lambda: named
        copies = {name: host_copy(tensor) for name, tensor in named.items()}
        return lambda: {name: copy.get() for name, copy in copies.items()}

    def modules(self, flat: Mapping[str, torch.Tensor], *, best: bool) -> dict[str, ModuleTensors]:
        """Adapter tensors by module path from a snapshot: the best, if requested and kept, else the average, else the
        last."""
        trained = self.adapter.groups
        kind = "ema" if COUNT in flat and int(flat[COUNT]) else "params"
        kind = "best" if best and all(f"best_{group}" in flat for group in trained) else kind
        chosen = {group: flat[f"{kind if group in trained else 'params'}_{group}"] for group in self.adapter.flat()}
        return self.adapter.in_files(self.adapter.split(chosen))

    def shown(self) -> tuple[AdapterSpec, Mapping[str, ModuleTensors]]:
        """The adapter as its file would be now, of the average if there is one: its own tensors, not copies."""
        adapter = self.adapter
        flat = {**adapter.flat(), **(self._average_params() or {})}
        if any(type(weights).from_files is not SlotWeights.from_files for weights in adapter.modules.values()):
            flat = to_host(flat)
        spec, tensors = adapter.method.exported(adapter.spec, adapter.in_files(adapter.split(flat)))
        return replace(spec, lora_dropout=0.0), tensors

    def _named(self, *, moments: bool) -> dict[str, torch.Tensor]:
        named = {f"params_{group}": params for group, params in self.adapter.flat().items()}
        named |= self.optimizer.tensors() if moments else {}
        named |= {} if self.average is None else self.average.tensors()
        named |= {f"best_{group}": params for group, params in (self.best_params or {}).items()}
        return {name: tensor.detach() for name, tensor in named.items()}

    def restore(self, tensors: dict[str, torch.Tensor]) -> None:
        self.adapter.zero_grad()
        self.adapter.put({group: tensors[f"params_{group}"] for group in self.adapter.flat()})
        self.optimizer.take({name: tensor.to(self.adapter.device, copy=True) for name, tensor in tensors.items()})
        self._take_copies(tensors)

    def _take_copies(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Restores the best weights, if any, and the average on the adapter's device."""
        if self.average is not None:
            self.average.take(tensors, self.adapter.device)
        found = {group: tensors.get(f"best_{group}") for group in self.adapter.groups}
        best = {group: params.to(self.adapter.device) for group, params in found.items() if params is not None}
        self.best_params = best or self.best_params


AT_ONCE = 4
"""Jobs whose files are written at the same time; with more, each would only get a smaller share of the disk."""


class FileWriter:
    def __init__(self, *, is_beside: bool) -> None:
        """`is_beside`: on its own threads, without blocking the caller."""
        self._threads = ThreadPoolExecutor(AT_ONCE, "weft-write") if is_beside else None
        self._last: dict[str, Future[None]] = {}

    def submit(self, job: str, write: Callable[[], None]) -> Future[None]:
        """Writes after all earlier writes of the job have ended."""
        if self._threads is None:
            made: Future[None] = Future()
            _run(write, made)
            return made
        before = self._last.get(job)
        # The write before has a thread or is done, so waiting for it in a thread ends.
        self._last[job] = made = self._threads.submit(_after, before, write)
        made.add_done_callback(lambda done: self._forget(job, done))
        return made

    def _forget(self, job: str, done: Future[None]) -> None:
        if self._last.get(job) is done:
            self._last.pop(job, None)


def writing(
    work: CheckpointWork | AdapterWork, job: ExecutedJob, base_model: str, target_names: list[str], rows: Embeddings
) -> Callable[[], None]:
    """A function that writes a job's files as it is now, whatever happens to the job meanwhile."""
    snapshot, spec = job.weights.snapshot(moments=isinstance(work, CheckpointWork)), job.given.spec
    # Threads must not share a tokenizer.
    tokenizer = copy.deepcopy(rows.tokenizer_for(spec.adapter)) if isinstance(work, AdapterWork) else None

    def write() -> None:
        tensors = snapshot()
        if isinstance(work, CheckpointWork):
            checkpoint = Checkpoint(work.step, tensors, dict(work.state), dict(work.environment))
            save_checkpoint(work.directory, checkpoint, keep=work.keep)
            return
        write_adapter(
            work.directory,
            rows.named(spec.adapter),
            job.weights.modules(tensors, best=work.best),
            base_model=base_model,
            target_names=target_names,
            chat_template=spec.chat_template,
            shared=job.weights.adapter.shared,
            head=job.given.batches.data.head,
            row_modules=rows.paths,
            tokenizer=tokenizer,
            in_turns=job.weights.adapter.has_gates_in_turns,
        )

    return write


def _after(before: Future[None] | None, write: Callable[[], None]) -> None:
    if before is not None:
        before.exception()
    write()


def _run(write: Callable[[], None], made: Future[None]) -> None:
    try:
        write()
    except Exception as error:
        made.set_exception(error)
    else:
        made.set_result(None)
