"""What every optimizer of a job is: its settings, what it remembers between steps, and its step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch

from weft.adapters.adapter import Adapter
from weft.engine.execute.optimizers.rate_pattern import largest_factor
from weft.kernels.adamw import Updated
from weft.spec import JobSpec

Results = Callable[[], list[Updated]]
"""Waits for the device and says what the steps did; to be asked before the next steps of the same jobs."""
PREFIX = "optimizer_"
"""How the names of an optimizer's tensors begin in a checkpoint."""


def counting_steps(optimizers: Sequence[Optimizer], wait: Results) -> Results:
    """The results that `wait` brings; steps that were taken are counted in the states then."""

    def results() -> list[Updated]:
        found = wait()
        for optimizer, updated in zip(optimizers, found, strict=True):
            for state in optimizer.states.values():
                state["step"] += not updated.skipped
        return found

    return results


@dataclass(frozen=True)
class PartOfStep:
    """What a step has to know where an adapter is only a part of a job's, to do what the step of all would do to it."""

    norm: torch.Tensor
    """Of the whole gradient, as `Optimizer.norm_of` finds it, beside the part of it."""
    fills: Mapping[str, int]
    """By group: with so many zeros in front of it, torch takes the same numbers by vectors as in the whole buffer."""


def gradient_norm(grads: Iterable[torch.Tensor]) -> torch.Tensor:
    """The norm of a whole gradient, given by group."""
    norm: torch.Tensor = torch.stack([grad.norm() for grad in grads]).norm()
    return norm


class Optimizer(ABC):
    """The optimizer of one adapter. No job's step depends on who steps with it."""

    def __init__(self, adapter: Adapter, spec: JobSpec) -> None:
        self.adapter = adapter
        self.spec = spec
        self.rate = spec.learning_rate
        """Of the next step; a group of the method may have another."""

    def set_rate(self, rate: float) -> None:
        """The learning rate of the next step; the largest there is, where modules have rates of their own."""
        self.rate = rate * largest_factor(self.spec.learning_rate_pattern)

    @property
    def rates(self) -> dict[str, float]:
        """The learning rate of the next step for each group of the method."""
        factors = self.adapter.rate_factors(self.spec)
        return {group: self.rate * factor for group, factor in zip(self.adapter.groups, factors, strict=True)}

    @property
    @abstractmethod
    def states(self) -> Mapping[str, dict[str, torch.Tensor]]:
        """What it remembers, by the name of what it steps; a `step` is on the CPU. Empty before the first step."""

    @abstractmethod
    def make_moments(self) -> None:
        """Takes the memory for what is not there yet, as the first step would; all of one state or nothing."""

    def free_memory(self) -> None:
        """Takes all the memory that a step on a GPU needs, so that running out of it leaves every job as it was."""
        self.make_moments()

    @abstractmethod
    def step(self, is_finite: bool, part: PartOfStep | None = None) -> Updated:
        """Clips and applies the gradients, unless they or the loss are not finite; then forgets them.

        `part`: where this adapter is only a part of the job's.
        """

    @classmethod
    def norm_of(cls, grads: Sequence[torch.Tensor]) -> torch.Tensor:
        """The norm of a whole gradient, given by group, to the bits that a step of all of it finds."""
        return gradient_norm(grads)

    @abstractmethod
    def start_part(self, is_finite: torch.Tensor, part: PartOfStep) -> Callable[[], Updated]:
        """Starts the step of a part of a job's adapter on a GPU; what is returned waits, as that of `start_all`."""

    @classmethod
    @abstractmethod
    def start_all(cls, optimizers: Sequence[Self], finite: Sequence[bool], finite_J: torch.Tensor | None) -> Results:
        """Starts the same step on a GPU for several jobs of this kind; the host does not wait."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """The states by name, for a checkpoint."""
        return {f"{PREFIX}{name}.{key}": v for name, state in self.states.items() for key, v in state.items()}

    def take(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Makes the states in `tensors` its own; they are where the adapter is."""
        states = self.states
        for state in states.values():
            state.clear()
        for full_name, tensor in tensors.items():
            name, _, key = full_name.removeprefix(PREFIX).rpartition(".")
            if full_name.startswith(PREFIX):
                states[name][key] = tensor.cpu() if key == "step" else tensor
