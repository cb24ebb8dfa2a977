"""The gradient of a job whose samples are on several replicas: exact sums, added by one device for all.

A device's part is a head (whether its losses are finite, what its sums were made of at most), the words of its sums in
the order of its buffers, and on the judge's own replica what else belongs to the gradient. The judge joins the parts of
each replica to whole buffers, so replicas need not be cut alike, and adds them: no order and no dispatch changes a bit.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass

import torch

from weft.engine.execute.weights import JobWeights
from weft.kernels.fixed_point import SumWords, total_of_all
from weft.parallel.stages.gradient import JobShare, Verdict, by_group, in_order

LOW_BITS = 62
"""Of the units of a sum that go in the first of two words."""
Receive = Callable[[Sequence[int], torch.dtype], Generator[None, None, torch.Tensor]]
"""Waits for the next tensor of one device."""


@dataclass(frozen=True)
class SpreadPart:
    """What one device has of a job's gradient."""

    is_finite: bool
    """Whether the losses are that the device knows."""
    sums: Mapping[str, SumWords]
    """By group."""
    penalties: Mapping[str, torch.Tensor] | None
    """What is added to the sums of all, by group, if anything is; every replica would add the same."""

    @staticmethod
    def of(weights: JobWeights | None, *, is_finite: bool) -> SpreadPart:
        """The part of a job's share."""
        if weights is None:
            return SpreadPart(is_finite, {}, None)
        return SpreadPart(is_finite, weights.adapter.any_order_sums(), weights.adapter.penalties())

    def messages(self, device: torch.device) -> list[torch.Tensor]:
        """The tensors in which it goes to the judge, all on the stage's device."""
        units = [units for own in self.sums.values() for units in own.units]
        has_coarse = any(own.coarse_P is not None for own in self.sums.values())
        low = [each & (2**LOW_BITS - 1) for each in units]
        head = [self.is_finite, has_coarse, self.penalties is not None, *low, *(each >> LOW_BITS for each in units)]
        found = [torch.tensor(head, dtype=torch.int64, device=device)]
        if self.sums:
            words = SumWords.joined(list(self.sums.values()))
            # Copies: the sums go on while these are on their way.
            found += [words.fine_P] if words.coarse_P is None else [words.fine_P, words.coarse_P]
        if self.penalties is not None:
            found.append(torch.cat(list(self.penalties.values())))
        return found


def receive_part(receive: Receive, share: JobShare) -> Generator[None, None, SpreadPart]:
    """The part of another device, of which the judge knows its share."""
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
) -> tuple[Verdict, dict[str, torch.Tensor]]:
    """The verdict about a gradient and the gradient by group, from the parts of all replicas that have some.

    The first is the judge's own; `norm_of` the groups of the gradient.
    """
    first, shares = replicas[0]
    gradient: dict[str, torch.Tensor] = {}
    for group in in_order(group for share in shares for group in share.trained):
        whole = [SumWords.joined([part.sums[group] for part in parts if group in part.sums]) for parts, _ in replicas]
        # Of rows at both ends of a model there are two sums, one behind the other however it is cut.
        total, *twin = total_of_all(whole).split(sum(share.run_of(group) for share in shares))
        gradient[group] = total + twin[0] if twin else total
        own = [
            part.penalties[group]
            for part, share in zip(first, shares, strict=True)
            if part.penalties is not None and share.run_of(group)
        ]
        if own:
            gradient[group] += torch.cat(own)
    is_finite = all(part.is_finite for parts, _ in replicas for part in parts)
    norm = norm_of(list(gradient.values()))
    return Verdict(norm, torch.tensor(float(is_finite), device=norm.device)), gradient


def slices(gradient: Mapping[str, torch.Tensor], shares: Sequence[JobShare]) -> list[torch.Tensor]:
    """What of a whole gradient belongs to each device of a replica, in the order of its buffers."""
    cut = {
        group: whole.split([share.run_of(group) if group in share.trained else 0 for share in shares])
        for group, whole in gradient.items()
    }
    nothing = next(iter(gradient.values()))[:0]
    found = []
    for place, share in enumerate(shares):
        own = [gradient[group] if group in share.twins else cut[group][place] for group in share.trained]
        found.append(torch.cat([nothing, *own]))
    return found


def _words(flat: torch.Tensor, lengths: Mapping[str, int]) -> dict[str, torch.Tensor]:
    """Words one behind the other as views by group."""
    return dict(zip(lengths, flat.split([*lengths.values()]), strict=True))
