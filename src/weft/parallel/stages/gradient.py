"""The norm and the sum of a gradient that lies on several stages, to the bits of one device.

One device sums over the flat buffer of each group from beginning to end. So the stages' parts of a gradient are sent to
one stage and joined to that buffer; sums of parts would depend on where the model is divided.

Rows of tokens at both ends of a model are on the first stage and, *tied*, on the last. Each end has its part of their
gradient; both step by the sum, so they stay equal.

Where a job's samples are on several replicas, sums are exact integers, added by one device for all. A device's part is
a head (whether its losses are finite, the bounds of its sums), the words of its sums in the order of its buffers, and
on the adding stage's own replica the rest of the gradient. Parts of each replica are joined to whole buffers, so
replicas need not be divided alike: no order and no assignment of samples changes a bit.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from weft.engine.execute.optimizers.optimizer import PartOfStep
from weft.engine.execute.weights import JobWeights
from weft.kernels.fixed_point import SumWords, total_of_all
from weft.store.peft_files import PARTS

VECTOR = 16
"""Most numbers that torch takes at once on a CPU. It steps the rest of a buffer one by one, which may round otherwise.
"""


@dataclass(frozen=True)
class JobShare:
    sizes: Mapping[str, int]
    trained: tuple[str, ...]
    modules: tuple[str, ...]
    target_names: tuple[str, ...]
    """All adapted modules of the whole model, as PEFT's target_modules names them."""
    shared: Mapping[str, torch.Tensor]
    summed: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """For order-independent sums: numbers of each tensor that is summed by itself, by trained group."""
    num_compared: int = 0
    compared: Mapping[str, torch.Size] | None = None
    """Shapes of that adapter's frozen tensors that all modules read; None if it has no module here."""
    tied: tuple[str, ...] = ()
    """Groups that the first stage has too."""

    @property
    def num_trained(self) -> int:
        return sum(self.sizes[group] for group in self.trained)

    def run_of(self, group: str) -> int:
        """Numbers that it adds to the whole adapter's buffer of a group."""
        return 0 if group in self.tied else self.sizes.get(group, 0)


@dataclass(frozen=True)
class GradientNorm:
    """Norm of a job's whole gradient, on the device; the host does not wait for it."""

    norm: torch.Tensor
    is_finite: torch.Tensor
    """Above 0 if all losses are finite."""

    @property
    def message(self) -> torch.Tensor:
        return torch.stack([self.norm, self.is_finite])


def gradient_part(weights: JobWeights | None, is_finite: torch.Tensor) -> torch.Tensor:
    """A stage's part of a job's gradient, after a number above 0 if the losses known to the stage are finite."""
    grads = [] if weights is None else [group.grad for group in weights.adapter.groups.values()]
    return torch.cat([is_finite.view(1), *grads])


def part_size(share: JobShare) -> int:
    return 1 + share.num_trained


def part_of_step(norm: torch.Tensor, shares: Sequence[JobShare], stage: int) -> PartOfStep:
    fills = {}
    for group in shares[stage].trained:
        sizes = [share.run_of(group) for share in shares]
        start, total = 0 if group in shares[stage].tied else sum(sizes[:stage]), sum(sizes)
        num_by_vectors = min(max(total - total % VECTOR - start, 0), shares[stage].sizes[group])
        fills[group] = -num_by_vectors % VECTOR
    return PartOfStep(norm, fills)


def combine_gradient_norm(
    parts: Sequence[torch.Tensor], shares: Sequence[JobShare], norm_of: Callable[[list[torch.Tensor]], torch.Tensor]
) -> tuple[GradientNorm, dict[str, torch.Tensor]]:
    """The norm of a gradient and its tied groups, from all stages' parts in order. `norm_of`: of its groups."""
    pieces: dict[str, list[torch.Tensor]] = {}
    for part, share in zip(parts, shares, strict=True):
        own = by_group(part[1:], share)
        for group in share.trained:
            if group in share.tied:
                pieces[group] = [pieces[group][0] + own[group]]
            else:
                pieces.setdefault(group, []).append(own[group])
    whole = {group: torch.cat(pieces[group]) for group in in_order(pieces)}
    tied = {group: whole[group] for share in shares for group in share.tied}
    return GradientNorm(norm_of(list(whole.values())), torch.stack([part[0] for part in parts]).min()), tied


def by_group(flat: torch.Tensor, share: JobShare) -> dict[str, torch.Tensor]:
    return dict(zip(share.trained, flat.split([share.sizes[group] for group in share.trained]), strict=True))


def in_order(groups: Iterable[str]) -> list[str]:
    """Groups of several stages in the order of one device's adapter: its parts are last."""
    return sorted(dict.fromkeys(groups), key=lambda group: PARTS.index(group) if group in PARTS else -1)


LOW_BITS = 62
"""Bits of a sum's units in the first of two words."""
Receive = Callable[[Sequence[int], torch.dtype], Generator[None, None, torch.Tensor]]
"""Waits for the next tensor of one device."""


@dataclass(frozen=True)
class SpreadPart:
    """One device's part of the gradient of a job on several replicas."""

    is_finite: bool
    sums: Mapping[str, SumWords]
    penalties: Mapping[str, torch.Tensor] | None
    """Terms added to the sums of all, by group, if any; every replica would add the same."""

    @staticmethod
    def of(weights: JobWeights | None, *, is_finite: bool) -> SpreadPart:
        if weights is None:
            return SpreadPart(is_finite, {}, None)
        return SpreadPart(is_finite, weights.adapter.any_order_sums(), weights.adapter.penalties())

    def messages(self, device: torch.device) -> list[torch.Tensor]:
        """Tensors that carry it to the root stage, all on the stage's device."""
        units = [units for own in self.sums.values() for units in own.units]
        has_coarse = any(own.coarse_P is not None for own in self.sums.values())
        low = [each & (2**LOW_BITS - 1) for each in units]
        head = [self.is_finite, has_coarse, self.penalties is not None, *low, *(each >> LOW_BITS for each in units)]
        found = [torch.tensor(head, dtype=torch.int64, device=device)]
        if self.sums:
            words = SumWords.joined(list(self.sums.values()))
            # Copies: the sums continue while these are sent.
            found += [words.fine_P] if words.coarse_P is None else [words.fine_P, words.coarse_P]
        if self.penalties is not None:
            found.append(torch.cat(list(self.penalties.values())))
        return found


def receive_part(receive: Receive, share: JobShare) -> Generator[None, None, SpreadPart]:
    num_sums = sum(len(sizes) for sizes in share.summed.values())
    head = (yield from receive((3 + 2 * num_sums,), torch.int64)).tolist()
    is_finite, has_coarse, has_penalties = (bool(flag) for flag in head[:3])
    low, high = head[3 : 3 + num_sums], head[3 + num_sums :]
    units = iter([each + (more << LOW_BITS) for each, more in zip(low, high, strict=True)])
    sums: dict[str, SumWords] = {}
    if share.summed:
        lengths = {group: sum(sizes) for group, sizes in share.summed.items()}
        fine = _words((yield from receive((sum(lengths.values()),), torch.int64)), lengths)
        coarse: Mapping[str, torch.Tensor] = {}
        if has_coarse:
            coarse = _words((yield from receive((sum(lengths.values()),), torch.int64)), lengths)
        for group, sizes in share.summed.items():
            sums[group] = SumWords(fine[group], coarse.get(group), sizes, tuple(next(units) for _ in sizes))
    penalties = None
    if has_penalties:
        penalties = by_group((yield from receive((share.num_trained,), torch.float32)), share)
    return SpreadPart(is_finite, sums, penalties)


def combine_spread_sums(
    replicas: Sequence[tuple[Sequence[SpreadPart], Sequence[JobShare]]],
    norm_of: Callable[[list[torch.Tensor]], torch.Tensor],
) -> tuple[GradientNorm, dict[str, torch.Tensor]]:
    """The norm of a gradient and the gradient by group, from the parts of all replicas that have some. The first is the
    root stage's own; `norm_of` computes the norm of the groups."""
    first, shares = replicas[0]
    gradient: dict[str, torch.Tensor] = {}
    for group in in_order(group for share in shares for group in share.trained):
        whole = [SumWords.joined([part.sums[group] for part in parts if group in part.sums]) for parts, _ in replicas]
        # Rows at both ends of a model have two sums, one after the other however it is divided.
        total, *tied = total_of_all(whole).split(sum(share.run_of(group) for share in shares))
        gradient[group] = total + tied[0] if tied else total
        own = [
            part.penalties[group]
            for part, share in zip(first, shares, strict=True)
            if part.penalties is not None and share.run_of(group)
        ]
        if own:
            gradient[group] += torch.cat(own)
    is_finite = all(part.is_finite for parts, _ in replicas for part in parts)
    norm = norm_of(list(gradient.values()))
    return GradientNorm(norm, torch.tensor(float(is_finite), device=norm.device)), gradient


def slices(gradient: Mapping[str, torch.Tensor], shares: Sequence[JobShare]) -> list[torch.Tensor]:
    """The part of a whole gradient for each device of a replica, in the order of its buffers."""
    cut = {
        group: whole.split([share.run_of(group) if group in share.trained else 0 for share in shares])
        for group, whole in gradient.items()
    }
    nothing = next(iter(gradient.values()))[:0]
    found = []
    for index, share in enumerate(shares):
        own = [gradient[group] if group in share.tied else cut[group][index] for group in share.trained]
        found.append(torch.cat([nothing, *own]))
    return found


def _words(flat: torch.Tensor, lengths: Mapping[str, int]) -> dict[str, torch.Tensor]:
    return dict(zip(lengths, flat.split([*lengths.values()]), strict=True))
