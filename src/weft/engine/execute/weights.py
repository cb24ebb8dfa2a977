"""The tensors of a job: its adapter, its optimizer's moments, best weights and average, on the CPU or on a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from weft.adapters.adapter import Adapter
from weft.adapters.method import ModuleTensors
from weft.engine.execute.optimizers.registry import optimizer_of
from weft.engine.execute.weight_average import COUNT, WeightAverage
from weft.kernels.adamw import Updated
from weft.kernels.device import is_cpu
from weft.kernels.device_event import host_copy, to_host
from weft.model.out_of_memory import memory_errors
from weft.spec import JobSpec


class JobWeights:
    """Everything of a job that is a tensor."""

    def __init__(self, spec: JobSpec, adapter: Adapter) -> None:
        self.adapter = adapter
        self.optimizer = optimizer_of(adapter, spec)
        self.best_params: dict[str, torch.Tensor] | None = None
        """The weights of the best evaluation, by group, if early stopping asks for them."""
        self.slot: int | None = None
        """On the backbone, while the job has a seat."""
        self.average = None if spec.ema_decay is None else WeightAverage(adapter, spec.ema_decay)
        """Of the weights after every step, if the job asks for it."""
        self._spec = spec

    def move_to(self, device: torch.device) -> None:
        """Takes the whole state of the last step boundary to a device, bit by bit; only while no slot is held.

        Without the memory for it the state stays where it is, and torch.OutOfMemoryError says so.
        """
        assert self.slot is None, "a slot reads the weights where they are"
        with memory_errors():
            named = self._named(moments=True)
            tensors = to_host(named) if is_cpu(device) else {name: t.to(device, copy=True) for name, t in named.items()}
            self.adapter.take({group: tensors[f"params_{group}"] for group in self.adapter.flat()})
        self.optimizer = optimizer_of(self.adapter, self._spec)
        self.optimizer.take(tensors)
        self._take_copies(tensors)

    def after_step(self, updated: Updated) -> None:
        """Takes a step that was taken into the average."""
        if self.average is not None and not updated.skipped:
            self.average.follow(self.adapter)

    @contextmanager
    def average_shown(self) -> Iterator[None]:
        """The average is in the adapter's place meanwhile, where there is one; then the last weights come back."""
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
        """Keeps a copy of the weights that were evaluated; without the memory for it nothing has changed."""
        evaluated = self._average_params() or self.adapter.trained()
        self.best_params = {name: params.clone() for name, params in evaluated.items()}

    def use_best(self) -> None:
        """Puts the best evaluated weights into the adapter, if early stopping kept any, or else the average, if any."""
        chosen = self.best_params or self._average_params()
        if chosen is not None:
            self.adapter.put(chosen)

    def _average_params(self) -> dict[str, torch.Tensor] | None:
        """The average, once a step is in it."""
        return self.average.params if self.average is not None and self.average.count else None

    def tensors(self) -> dict[str, torch.Tensor]:
        """All of them by name, copied to the CPU."""
        return to_host(self._named(moments=True))

    def snapshot(self, *, moments: bool) -> Callable[[], dict[str, torch.Tensor]]:
        """All of them, or all but the optimizer's, as they are at this step boundary; what is returned waits for them.

        A GPU copies them to pinned memory between what it has been asked for and what it will be asked for next, so
        that neither it nor the host waits. A job without a slot does not change: what it has is its snapshot.
        """
        named = self._named(moments=moments)
        if self.slot is None:
            return lambda: named
        copies = {name: host_copy(tensor) for name, tensor in named.items()}
        return lambda: {name: copy.get() for name, copy in copies.items()}

    def modules(self, flat: Mapping[str, torch.Tensor], *, best: bool) -> dict[str, ModuleTensors]:
        """The adapter's tensors by module path, out of a snapshot: the best, if asked for and kept, or the average, if
        there is one, or the last."""
        trained = self.adapter.groups
        kind = "ema" if COUNT in flat and int(flat[COUNT]) else "params"
        kind = "best" if best and all(f"best_{group}" in flat for group in trained) else kind
        chosen = {group: flat[f"{kind if group in trained else 'params'}_{group}"] for group in self.adapter.flat()}
        return self.adapter.in_files(self.adapter.split(chosen))

    def _named(self, *, moments: bool) -> dict[str, torch.Tensor]:
        named = {f"params_{group}": params for group, params in self.adapter.flat().items()}
        named |= self.optimizer.tensors() if moments else {}
        named |= {} if self.average is None else self.average.tensors()
        named |= {f"best_{group}": params for group, params in (self.best_params or {}).items()}
        return {name: tensor.detach() for name, tensor in named.items()}

    def restore(self, tensors: dict[str, torch.Tensor]) -> None:
        """Goes back to what `tensors` described."""
        self.adapter.zero_grad()
        self.adapter.put({group: tensors[f"params_{group}"] for group in self.adapter.flat()})
        self.optimizer.take({name: tensor.to(self.adapter.device, copy=True) for name, tensor in tensors.items()})
        self._take_copies(tensors)

    def _take_copies(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Takes the best weights that `tensors` hold, if any, and the average to where the adapter is."""
        if self.average is not None:
            self.average.take(tensors, self.adapter.device)
        found = {group: tensors.get(f"best_{group}") for group in self.adapter.groups}
        best = {group: params.to(self.adapter.device) for group, params in found.items() if params is not None}
        self.best_params = best or self.best_params
