"""The norm of a gradient that lies on several stages, to the bits of one device.

One device sums over the flat buffer of each group from its beginning to its end. So the stages' parts of a gradient are
brought to one place and put together as that buffer; sums of parts would depend on where the model is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from weft.execute.optimizers.optimizer import PartOfStep
from weft.execute.weights import JobWeights

VECTOR = 16
"""Numbers that torch takes at once on a CPU, at most. What is left at the end of a buffer it steps one by one, and that
may round otherwise."""


@dataclass(frozen=True)
class JobShare:
    """What a stage holds of a job's adapter."""

    sizes: Mapping[str, int]
    """Numbers of each group of parameters."""
    trained: tuple[str, ...]
    """The groups that are trained."""
    modules: tuple[str, ...]
    target_names: tuple[str, ...]
    """All adapted modules of the whole model, in the words of PEFT's target_modules."""
    shared: Mapping[str, torch.Tensor]
    """Frozen tensors that all modules read."""
    summed: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Where sums are free: numbers of each tensor that is summed by itself, by group that is trained."""
    num_compared: int = 0
    """Numbers of the adapter that the job compares with."""
    compared: Mapping[str, torch.Size] | None = None
    """Shapes of the frozen tensors that all modules of that one read; None where it has no module."""

    @property
    def num_trained(self) -> int:
        """Numbers that are trained."""
        return sum(self.sizes[group] for group in self.trained)


@dataclass(frozen=True)
class Verdict:
    """What is known of a job's gradient once all stages have measured it; to the device, for which nobody waits."""

    norm: torch.Tensor
    is_finite: torch.Tensor
    """Above 0 if all losses are."""

    @property
    def told(self) -> torch.Tensor:
        """Both numbers, as other stages hear them."""
        return torch.stack([self.norm, self.is_finite])


def gradient_part(weights: JobWeights | None, is_finite: torch.Tensor) -> torch.Tensor:
    """A stage's part of a job's gradient, behind a number above 0 if the losses that the stage knows are finite."""
    grads = [] if weights is None else [group.grad for group in weights.adapter.groups.values()]
    return torch.cat([is_finite.view(1), *grads])


def part_size(share: JobShare) -> int:
    """Numbers of a stage's part."""
    return 1 + share.num_trained


def part_of_step(norm: torch.Tensor, shares: Sequence[JobShare], stage: int) -> PartOfStep:
    """What the step of a stage has to know of the others'."""
    fills = {}
    for group in shares[stage].trained:
        sizes = [share.sizes.get(group, 0) for share in shares]
        start, total = sum(sizes[:stage]), sum(sizes)
        num_by_vectors = min(max(total - total % VECTOR - start, 0), sizes[stage])
        fills[group] = -num_by_vectors % VECTOR
    return PartOfStep(norm, fills)


def judge_gradient(
    parts: Sequence[torch.Tensor], shares: Sequence[JobShare], norm_of: Callable[[list[torch.Tensor]], torch.Tensor]
) -> Verdict:
    """The verdict about a gradient, given what all stages hold of it, in their order; `norm_of` the groups of it."""
    pieces: dict[str, list[torch.Tensor]] = {}
    for part, share in zip(parts, shares, strict=True):
        start = 1
        for group in share.trained:
            pieces.setdefault(group, []).append(part[start : start + share.sizes[group]])
            start += share.sizes[group]
    norm = norm_of([torch.cat(own) for own in pieces.values()])
    return Verdict(norm, torch.stack([part[0] for part in parts]).min())
