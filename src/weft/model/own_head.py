"""The loss of jobs that have rows of the output head of their own, beside jobs that have none.

A job's own rows stand in the place of the frozen ones in its logits alone:
    x[v] = s · (h · rows[k] + b[v]) where token v is its k-th,   drows[k] += s · Σ_n dx_n[v] h_n
Its samples go through the head one by one, in blocks of a fixed size that begin with the sample, so that neither
neighbours nor the cut into microbatches change a bit of the logits or of that sum. All other rows go through the frozen
head as ever. Nothing waits for the device.

Shape suffixes: N supervised rows, B rows of a block, K tokens, D hidden size, V vocabulary; 2: losses, then hits.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F

from weft.adapters.sample_sums import add_product
from weft.adapters.token_rows import TokenRows
from weft.kernels.device_event import sent
from weft.model.loss import BlockedLoss, Head
from weft.model.packed import PackedBatch


class SampleHead:
    """The output head as one job has it."""

    def __init__(self, frozen: Head, own: TokenRows, dtype: torch.dtype) -> None:
        """`dtype`: of the hidden states."""
        self._own = own
        self._rows_KD = own.rows_KD.to(dtype)
        self._frozen = frozen if own.ids is not None else replace(frozen, weight_VD=self._rows_KD)
        self._ids_K = None if own.ids is None else sent(torch.from_numpy(own.ids), self._rows_KD.device)
        self.num_tokens = len(frozen.weight_VD)
        """V, with the job's new tokens behind the backbone's."""
        if own.ids is not None:
            self.num_tokens = max(self.num_tokens, int(own.ids.max()) + 1)
        self.softcap = frozen.softcap

    def logits(self, hidden_BD: torch.Tensor) -> torch.Tensor:
        """(B, V) in fp32, after the soft cap."""
        return self._frozen.capped(self.linear(hidden_BD))

    def linear(self, hidden_BD: torch.Tensor) -> torch.Tensor:
        """(B, V) in the type of the hidden states, before the soft cap."""
        raw_BV = self._frozen.linear(hidden_BD)
        if self._ids_K is None:
            return raw_BV
        num_new = self.num_tokens - raw_BV.shape[1]
        raw_BV = F.pad(raw_BV, (0, num_new)) if num_new else raw_BV
        own_BK = hidden_BD @ self._rows_KD.t()
        if self._frozen.bias_V is not None:
            own_BK.add_(F.pad(self._frozen.bias_V, (0, num_new))[self._ids_K])
        if self._frozen.scale is not None:
            own_BK.mul_(self._frozen.scale)
        return raw_BV.index_copy_(1, self._ids_K, own_BK)

    def gradients(self, hidden_BD: torch.Tensor, grad_BV: torch.Tensor) -> torch.Tensor:
        """The gradient of the hidden states (B, D) from that of `linear`; adds that of its own rows."""
        scale = 1.0 if self._frozen.scale is None else self._frozen.scale
        if self._ids_K is None:
            add_product(self._own.grad_KD, grad_BV, hidden_BD, scale)
            return self._frozen.input_gradient(grad_BV)
        grad_BK = grad_BV[:, self._ids_K]
        add_product(self._own.grad_KD, grad_BK, hidden_BD, scale)
        of_others_BV = grad_BV.index_fill_(1, self._ids_K, 0)[:, : len(self._frozen.weight_VD)]
        grad_BD = self._frozen.input_gradient(of_others_BV)
        return grad_BD.add_(grad_BK @ self._rows_KD, alpha=scale)

    def end_sample(self) -> None:
        """To be called when all blocks of a sample have added to the gradient of its own rows."""
        if self._own.any_order_sums is not None:
            self._own.any_order_sums.take_sample()


@dataclass(frozen=True, eq=False)
class SampleHeadLoss:
    """The cross entropy of rows of a microbatch in which some jobs have rows of the head of their own."""

    plain: BlockedLoss
    """For all others."""
    heads: Mapping[int, SampleHead]
    """By slot."""
    slots: tuple[int | None, ...]
    """Of every segment."""
    segments: np.ndarray
    """Of every row that the loss is asked for (N)."""

    def among(self, rows: np.ndarray) -> SampleHeadLoss:
        """The loss of some of the rows."""
        return replace(self, segments=self.segments[rows])

    @torch.no_grad()
    def __call__(
        self, hidden_ND: torch.Tensor, targets_N: torch.Tensor, weights_N: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As `BlockedLoss`, and adds the gradients of the jobs' own rows."""
        results_2N = torch.empty(2, len(hidden_ND), device=hidden_ND.device)
        grad_ND = None if weights_N is None else torch.empty_like(hidden_ND)
        has_own = np.array([slot in self.heads for slot in self.slots], dtype=np.bool_)[self.segments]
        others_N = sent(torch.from_numpy(np.flatnonzero(~has_own)), hidden_ND.device)
        weights = None if weights_N is None else weights_N[others_N]
        results_2N[:, others_N], found = self.plain(hidden_ND[others_N], targets_N[others_N], weights)
        if grad_ND is not None and found is not None:
            grad_ND[others_N] = found
        for head, own in self._samples():
            for start in range(own.start, own.stop, self.plain.block):
                rows = slice(start, min(start + self.plain.block, own.stop))
                weights = None if weights_N is None else weights_N[rows]
                results_2N[:, rows], found = self._block(head, hidden_ND[rows], targets_N[rows], weights)
                if grad_ND is not None and found is not None:
                    grad_ND[rows] = found
            if grad_ND is not None:
                head.end_sample()
        return results_2N, grad_ND

    def _samples(self) -> Iterator[tuple[SampleHead, slice]]:
        """The rows of each sample of a job with a head of its own."""
        edges = [0, *(np.flatnonzero(np.diff(self.segments)) + 1).tolist(), len(self.segments)]
        for start, end in itertools.pairwise(edges):
            slot = self.slots[self.segments[start]] if end > start else None
            if slot is not None and slot in self.heads:
                yield self.heads[slot], slice(start, end)

    def _block(
        self, head: SampleHead, hidden_ND: torch.Tensor, targets_N: torch.Tensor, weights_N: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One block of a sample, filled up to the size of all blocks."""
        count, fill = len(hidden_ND), self.plain.block - len(hidden_ND)
        hidden_BD = F.pad(hidden_ND, (0, 0, 0, fill))
        logits_BV = head.linear(hidden_BD)
        weights_B = None if weights_N is None else F.pad(weights_N, (0, fill))
        results_2B = self.plain.row_losses(logits_BV, F.pad(targets_N, (0, fill)), weights_B, head.softcap)
        grad_BD = None if weights_N is None else head.gradients(hidden_BD, logits_BV)[:count]
        return results_2B[:, :count], grad_BD


def logits_of(
    head: Head, batch: PackedBatch, own: Mapping[int, TokenRows], hidden_TD: torch.Tensor, rows: Sequence[int]
) -> torch.Tensor:
    """The logits of some rows of a microbatch (rows, V), each by its own job's head; of tokens that are another job's
    alone, they are -inf."""
    logits = head.logits(hidden_TD[list(rows)])
    heads = _own_heads(head, batch, own, hidden_TD.dtype)
    num_tokens = max([logits.shape[1], *(found.num_tokens for found in heads.values())])
    if num_tokens > logits.shape[1]:
        logits = F.pad(logits, (0, num_tokens - logits.shape[1]), value=-torch.inf)
    for segment, slot in zip(batch.segments, batch.segment_slots, strict=True):
        if slot is not None and slot in heads:
            places = [place for place, row in enumerate(rows) if segment.start <= row < segment.end]
            mine = heads[slot].logits(hidden_TD[[rows[place] for place in places]])
            logits[places, : mine.shape[1]] = mine
    return logits


def loss_of(
    plain: BlockedLoss, batch: PackedBatch, own: Mapping[int, TokenRows], dtype: torch.dtype
) -> BlockedLoss | SampleHeadLoss:
    """The loss of a microbatch, given the rows of jobs that have some of their own, by slot."""
    heads = _own_heads(plain.head, batch, own, dtype)
    if not heads:
        return plain
    segments = np.repeat(np.arange(len(batch.counts)), batch.counts)
    return SampleHeadLoss(plain, heads, batch.segment_slots, segments)


def _own_heads(
    head: Head, batch: PackedBatch, own: Mapping[int, TokenRows], dtype: torch.dtype
) -> dict[int, SampleHead]:
    """The heads of the jobs in a microbatch that have rows of their own."""
    return {slot: SampleHead(head, rows, dtype) for slot, rows in own.items() if slot in batch.segment_slots}
