"""The norm of a gradient that lies on several stages, to the bits of one device.

One device sums over the flat buffer of each group from its beginning to its end. So the stages' parts of a gradient are
brought to one place and put together as that buffer; sums of parts would depend on where the model is cut.

Rows of tokens that stand at both ends of a model are on the first stage and, as a *twin*, on the last. Each end has its
part of their gradient; both step by the sum, so that they stay equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from weft.engine.execute.optimizers.optimizer import PartOfStep
from weft.engine.execute.weights import JobWeights
from weft.store.peft_files import PARTS

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
    """Where sums do not depend on the order: numbers of each tensor that is summed by itself, by group that is
    trained."""
    num_compared: int = 0
    """Numbers of the adapter that the job compares with."""
    compared: Mapping[str, torch.Size] | None = None
    """Shapes of the frozen tensors that all modules of that one read; None where it has no module."""
    twins: tuple[str, ...] = ()
    """Groups that the first stage has as well."""

    @property
    def num_trained(self) -> int:
        """Numbers that are trained."""
        return sum(self.sizes[group] for group in self.trained)

    def run_of(self, group: str) -> int:
        """Numbers that it adds to the buffer of a group of the whole adapter."""
        return 0 if group in self.twins else self.sizes.get(group, 0)


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
        sizes = [share.run_of(group) for share in shares]
        start, total = 0 if group in shares[stage].twins else sum(sizes[:stage]), sum(sizes)
        num_by_vectors = min(max(total - total % VECTOR - start, 0), shares[stage].sizes[group])
        fills[group] = -num_by_vectors % VECTOR
    return PartOfStep(norm, fills)


def combine_gradient_norm(
    parts: Sequence[torch.Tensor], shares: Sequence[JobShare], norm_of: Callable[[list[torch.Tensor]], torch.Tensor]
) -> tuple[Verdict, dict[str, torch.Tensor]]:
    """The verdict about a gradient, and its groups that have twins, given what all stages hold of it, in their order.

    `norm_of` the groups of it.
    """
    pieces: dict[str, list[torch.Tensor]] = {}
    for part, share in zip(parts, shares, strict=True):
        own = by_group(part[1:], share)
        for group in share.trained:
            if group in share.twins:
                pieces[group] = [pieces[group][0] + own[group]]
            else:
                pieces.setdefault(group, []).append(own[group])
    whole = {group: torch.cat(pieces[group]) for group in in_order(pieces)}
    twins = {group: whole[group] for share in shares for group in share.twins}
    return Verdict(norm_of(list(whole.values())), torch.stack([part[0] for part in parts]).min()), twins


def by_group(flat: torch.Tensor, share: JobShare) -> dict[str, torch.Tensor]:
    """A tensor over all trained numbers of a share as views by group."""
    return dict(zip(share.trained, flat.split([share.sizes[group] for group in share.trained]), strict=True))


def in_order(groups: Iterable[str]) -> list[str]:
    """Groups that stages have brought, as the adapter of one device has them: its parts are behind all others."""
    return sorted(dict.fromkeys(groups), key=lambda group: PARTS.index(group) if group in PARTS else -1)
