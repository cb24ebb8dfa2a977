"""Optimizers in plain torch operations whose steps are taken or left out on the device, so that no host waits for one.

    norm = ‖gradient‖;  open = loss and norm are finite;  gradient ← clipped where open, 0 where not
    every number by which a state or a weight moves is 0 where the gate is not open, and what it is kept by is 1

So a step that is left out changes no bit, and what a step did comes back in one read later. Jobs step one by one.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Self

import torch

from weft.adapters.adapter import Adapter
from weft.engine.execute.optimizers.optimizer import Optimizer, PartOfStep, Results, gradient_norm
from weft.kernels.adamw import Updated
from weft.kernels.device_event import AsyncCopy
from weft.spec import JobSpec

State = dict[str, torch.Tensor]


@dataclass(frozen=True, eq=False)
class SteppedTensor:
    """What is stepped by itself: a flat buffer, or a module's view of it, with its gradient and state."""

    params: torch.Tensor
    grad: torch.Tensor
    state: State
    rate: float


class Gate:
    """Whether a step is taken, as only the device may know."""

    def __init__(self, is_open: torch.Tensor) -> None:
        self.is_open = is_open
        self._one, self._zero = is_open.float(), (~is_open).float()

    def moves(self, number: float) -> torch.Tensor:
        """The number if the step is taken, else 0."""
        return self._one * number

    def keeps(self, number: float) -> torch.Tensor:
        """The number if the step is taken, else 1."""
        return self._one * number + self._zero


class GatedOptimizer(Optimizer):
    """One adapter's optimizer; a kind says what it remembers of a tensor and how it steps one."""

    by_module: ClassVar[bool] = False
    """Whether it steps each module's tensors by themselves, or the flat buffers of whole groups."""

    def __init__(self, adapter: Adapter, spec: JobSpec) -> None:
        super().__init__(adapter, spec)
        self._states: dict[str, State] = {name: {} for name, _, _, _ in self._named()}

    @abstractmethod
    def fresh(self, params: torch.Tensor) -> State:
        """What it remembers of a tensor before its first step."""

    @abstractmethod
    def update(self, tensor: SteppedTensor, gate: Gate) -> None:
        """Takes one step; the gradient is clipped, and zero behind a closed gate."""

    @property
    def states(self) -> dict[str, State]:
        """What it remembers, by group or by group and module path."""
        return self._states

    def make_moments(self) -> None:
        """Takes the memory for what is not there yet."""
        for name, _, params, _ in self._named():
            if not self._states[name]:
                self._states[name].update(self.fresh(params))

    def free_memory(self) -> None:
        """Takes the memory for its states, and for what a step holds for a moment, which torch then has at hand."""
        super().free_memory()
        torch.empty(2 * self.adapter.num_parameters, device=self.adapter.device)

    def step(self, is_finite: bool, part: PartOfStep | None = None) -> Updated:
        """Clips and applies the gradients at once."""
        norm = None if part is None else part.norm
        return self._start(torch.tensor(is_finite, device=self.adapter.device), norm)()

    def start_part(self, is_finite: torch.Tensor, part: PartOfStep) -> Callable[[], Updated]:
        """The same step with a norm that is known."""
        self.free_memory()
        return self._start(is_finite > 0, part.norm)

    @classmethod
    def start_all(cls, optimizers: Sequence[Self], finite: Sequence[bool], finite_J: torch.Tensor | None) -> Results:
        """Starts one job's step after the other's. What one raises, also for want of memory, is that job's answer: the
        jobs before it have changed already."""
        started: list[Callable[[], Updated]] = []
        for place, (optimizer, is_finite) in enumerate(zip(optimizers, finite, strict=True)):
            # Not as a tensor made from a number on the host, for which the host would wait.
            of_batch = torch.full((), is_finite, dtype=torch.bool, device=optimizer.adapter.device)
            found = of_batch if finite_J is None else of_batch & (finite_J[place] > 0)
            try:
                started.append(optimizer._start(found))
            except Exception as error:
                started.append(partial(Updated, math.nan, math.nan, True, error))
        return lambda: [result() for result in started]

    def _start(self, is_finite: torch.Tensor, norm: torch.Tensor | None = None) -> Callable[[], Updated]:
        """Starts the step; what is returned waits for it."""
        self.make_moments()
        groups = self.adapter.groups.values()
        norm = gradient_norm(group.grad for group in groups) if norm is None else norm
        gate = Gate(is_finite & norm.isfinite())
        limit = self.spec.max_grad_norm
        for group in groups:
            if limit:
                group.grad.mul_((limit / (norm + 1e-6)).clamp(max=1.0))
            group.grad.masked_fill_(~gate.is_open, 0.0)
        rates = self.rates
        for name, group_name, params, grad in self._named():
            self.update(SteppedTensor(params, grad, self._states[name], rates[group_name]), gate)
        self.adapter.zero_grad()
        largest = torch.stack([torch.linalg.vector_norm(group.params, math.inf) for group in groups]).max()
        arrival = AsyncCopy(torch.stack([norm, largest, gate.moves(1.0)])).begin()

        def result() -> Updated:
            norm, largest, is_open = arrival.get().tolist()
            for state in self._states.values():
                if "step" in state:
                    state["step"] += is_open
            return Updated(norm, largest, not is_open)

        return result

    def _named(self) -> Iterable[tuple[str, str, torch.Tensor, torch.Tensor]]:
        """Everything that is stepped by itself: its name, its group's name, weights and gradient."""
        groups = self.adapter.groups
        if not self.by_module:
            for name, group in groups.items():
                yield name, name, group.params, group.grad
            return
        params = self.adapter.split(self.adapter.trained())
        grads = self.adapter.split({name: group.grad for name, group in groups.items()})
        for path, views in params.items():
            of_views = self.adapter.groups_of(path)
            for place, (name, view, grad) in enumerate(zip(of_views, views, grads[path], strict=True)):
                # The tensors of a head share a group.
                own = path if of_views.count(name) == 1 else f"{path}.{place}"
                yield f"{name}.{own}", name, view, grad
