"""The base class of optimizers, and the step of all jobs whose batch is complete, each as if alone.

On a CPU each job steps by itself. On a GPU the jobs of one kind step together if the kind has a kernel for it; results
are read once, later.

Modules may have their own learning rates. Every optimizer's change of a weight is proportional to its learning rate. So
all modules step with the largest rate, and

    w ← w_before + factor / largest · (w_after - w_before)

is the step with a module's own rate, up to rounding, whatever the optimizer and wherever it runs.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch

from weft.adapters.adapter import Adapter
from weft.errors import ConfigError
from weft.kernels.adamw import Updated
from weft.kernels.device import is_gpu
from weft.settings import answers_pattern, first_match
from weft.spec import JobSpec

Results = Callable[[], list[Updated]]
"""Waits for the device and returns what the steps did; call it before the next steps of the same jobs."""
PREFIX = "optimizer_"
VECTOR = 16
"""Number of values that torch steps at once on a CPU. It steps the rest of a buffer one by one, which may round
otherwise."""


def counting_steps(optimizers: Sequence[Optimizer], wait: Results) -> Results:
    """`wait` that also counts the taken steps in the states."""

    def results() -> list[Updated]:
        found = wait()
        for optimizer, updated in zip(optimizers, found, strict=True):
            for state in optimizer.states.values():
                state["step"] += not updated.skipped
        return found

    return results


@dataclass(frozen=True)
class PartOfStep:
    """Values that the step of a part of a job's adapter needs to equal the step of the whole."""

    norm: torch.Tensor
    num_by_vectors: Mapping[str, int]
    """Number of the part's first values, by group, that torch's vectors hold in a step of the whole buffer."""


def gradient_norm(grads: Iterable[torch.Tensor]) -> torch.Tensor:
    norm: torch.Tensor = torch.stack([grad.norm() for grad in grads]).norm()
    return norm


class Optimizer(ABC):
    """The optimizer of one adapter. No job's step depends on the jobs that step with it."""

    def __init__(self, adapter: Adapter, spec: JobSpec) -> None:
        self.adapter = adapter
        self.spec = spec
        self.rate = spec.learning_rate
        """Learning rate of the next step; a group of the method may have another."""

    def set_rate(self, rate: float) -> None:
        """Sets the learning rate of the next step: the largest one, where modules have their own."""
        self.rate = rate * largest_factor(self.spec.learning_rate_pattern)

    @property
    def rates(self) -> dict[str, float]:
        factors = self.adapter.rate_factors(self.spec)
        return {group: self.rate * factor for group, factor in zip(self.adapter.groups, factors, strict=True)}

    @property
    @abstractmethod
    def states(self) -> Mapping[str, dict[str, torch.Tensor]]:
        """States by tensor name; `step` is on the CPU. Empty before the first step."""

    @abstractmethod
    def make_moments(self) -> None:
        """Allocates missing states, as the first step would; each state completely or not at all."""

    def free_memory(self) -> None:
        """Allocates all that a step on a GPU needs, so that running out of memory leaves every job as it was."""
        self.make_moments()

    @abstractmethod
    def step(self, is_finite: bool, part: PartOfStep | None = None) -> Updated:
        """Clips and applies the gradients, unless they or the loss are not finite; then clears them. `part`: where this
        adapter is only a part of the job's."""

    @classmethod
    def norm_of(cls, grads: Sequence[torch.Tensor]) -> torch.Tensor:
        """Norm of a whole gradient, given by group, to the bits of a step of the whole."""
        return gradient_norm(grads)

    @abstractmethod
    def start_part(self, is_finite: torch.Tensor, part: PartOfStep) -> Callable[[], Updated]:
        """Starts the step of a part of a job's adapter on a GPU; returns a function that waits."""

    @classmethod
    @abstractmethod
    def start_all(cls, optimizers: Sequence[Self], finite: Sequence[bool], finite_J: torch.Tensor | None) -> Results:
        """Starts the steps of several jobs of this kind on a GPU; the host does not wait."""

    @property
    def divided(self) -> frozenset[str]:
        """Names of tensors of which each device that shares the layers has a part."""
        return frozenset()

    def tensors(self) -> dict[str, torch.Tensor]:
        return {f"{PREFIX}{name}.{key}": v for name, state in self.states.items() for key, v in state.items()}

    def take(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Sets the states to `tensors`, which are on the adapter's device."""
        states = self.states
        for state in states.values():
            state.clear()
        for full_name, tensor in tensors.items():
            name, _, key = full_name.removeprefix(PREFIX).rpartition(".")
            if full_name.startswith(PREFIX):
                states[name][key] = tensor.cpu() if key == "step" else tensor


def largest_factor(patterns: Mapping[str, float]) -> float:
    """Factor of the job's learning rate in the step of all modules; at least 1."""
    return max([1.0, *patterns.values()])


def refuse_idle_rates(patterns: Mapping[str, float], paths: Sequence[str]) -> None:
    for pattern in patterns:
        if not any(answers_pattern(path, pattern) for path in paths):
            raise ConfigError(
                f"matches no adapted module: {pattern!r}; modules have names such as {paths[0]}.",
                where="learning_rate_pattern",
            )


def scaling_changes(patterns: Mapping[str, float], adapter: Adapter) -> Callable[[], None]:
    """Keeps the weights of modules with their own rate; call the returned function once the step is started."""
    largest = largest_factor(patterns)
    kept: list[tuple[float, torch.Tensor, torch.Tensor]] = []
    for path, views in adapter.split(adapter.trained()).items():
        factor = first_match(patterns, path, 1.0) / largest
        kept += [(factor, view, view.clone()) for view in views if factor != 1.0]

    def scale() -> None:
        for factor, view, before in kept:
            view.copy_(torch.lerp(before, view, factor))

    return scale


def step_together(
    optimizers: Sequence[Optimizer], finite: Sequence[bool], finite_J: torch.Tensor | None = None
) -> Results:
    """Starts the step of every job, each as if alone. A step is skipped if the loss of its global batch is not finite,
    as known to the host (`finite`) or only to the device (`finite_J`)."""
    scaled = [
        scaling_changes(optimizer.spec.learning_rate_pattern, optimizer.adapter)
        for optimizer in optimizers
        if optimizer.spec.learning_rate_pattern
    ]
    start = step_by_kind if is_gpu(optimizers[0].adapter.device) else _step_each
    results = start(optimizers, finite, finite_J)
    for scale in scaled:
        scale()
    for optimizer in optimizers:
        optimizer.adapter.changed()
    return results


def _step_each(optimizers: Sequence[Optimizer], finite: Sequence[bool], finite_J: torch.Tensor | None) -> Results:
    if finite_J is not None:
        finite = [known and found > 0 for known, found in zip(finite, finite_J.tolist(), strict=True)]
    results = [_step_alone(optimizer, is_finite) for optimizer, is_finite in zip(optimizers, finite, strict=True)]
    return lambda: results


def _step_alone(optimizer: Optimizer, is_finite: bool) -> Updated:
    """Steps one job. An error is this job's result: the others still step."""
    try:
        return optimizer.step(is_finite)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        return Updated(math.nan, math.nan, True, error)


def step_by_kind(
    optimizers: Sequence[Optimizer], finite: Sequence[bool], finite_J: torch.Tensor | None = None
) -> Results:
    indices: dict[type[Optimizer], list[int]] = {}
    for index, optimizer in enumerate(optimizers):
        optimizer.free_memory()
        indices.setdefault(type(optimizer), []).append(index)
    started = []
    for kind, own in indices.items():
        # With one kind the tensor is passed as it is, without another launch.
        found_J = finite_J if finite_J is None or len(indices) == 1 else torch.stack([finite_J[i] for i in own])
        started.append((own, kind.start_all([optimizers[i] for i in own], [finite[i] for i in own], found_J)))

    def results() -> list[Updated]:
        found = {i: updated for own, wait in started for i, updated in zip(own, wait(), strict=True)}
        return [found[i] for i in range(len(optimizers))]

    return results
