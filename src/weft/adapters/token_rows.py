"""Rows of the input embedding and of the output head that an adapter has of its own and trains.

In its own samples they stand in the place of the backbone's rows, which stay as they are for everybody else. They are
what PEFT trains for `trainable_token_indices` and, if they are all rows, for `modules_to_save`.

Input: y[t] = s · rows[k] where token t is the k-th of its own; drows[k] += s · Σ dy[t] over those t of a sample, from
the first to the last, sample by sample in the job's order. Output: backbone/own_head.py. Where head and embedding are
tied, both are made of the same rows; their gradients are kept apart until a global batch is whole, because its cut into
microbatches would otherwise decide the order of the sum. A part of a model may have one end of tied rows only.

Shape suffixes: T rows of the microbatch, K tokens, U different ones of a sample, D width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from weft.adapters.method import SlotWeights
from weft.adapters.part import PartShape
from weft.adapters.routing import Routing, SlotRows
from weft.adapters.sample_sums import AnyOrderSums
from weft.kernels.device_event import sent

INPUT_ROWS = "input_rows"
OUTPUT_ROWS = "output_rows"
"""Their names as groups of parameters and as modules."""


@dataclass(frozen=True, eq=False)
class RowsShape(PartShape):
    """Which rows of the embedding or of the output head are an adapter's own."""

    ids: np.ndarray | None
    """Of the tokens (K); None: all rows."""
    weight_VD: torch.Tensor
    """The frozen rows, which they start as."""
    num_known: int
    """Tokens that the backbone knows: the rows of those behind them start as the mean of theirs."""
    ends: tuple[str, ...]
    """Where they stand, by the names of the rows there: at both ends if head and embedding are tied."""

    @property
    def tensor_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of the rows."""
        num_rows = self.weight_VD.shape[0] if self.ids is None else len(self.ids)
        return ((num_rows, self.weight_VD.shape[1]),)

    def initial(self, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        """The frozen rows; of new tokens the mean of those that the backbone knows."""
        if self.ids is None:
            return (self.weight_VD.float(),)
        last = self.weight_VD.shape[0] - 1
        rows_KD = self.weight_VD[torch.from_numpy(self.ids.clip(max=last)).to(self.weight_VD.device)].float()
        is_new = self.ids >= self.num_known
        if is_new.any():
            mean_D = self.weight_VD[: self.num_known].mean(dim=0, dtype=torch.float32)
            rows_KD[torch.from_numpy(is_new).to(rows_KD.device)] = mean_D
        return (rows_KD,)


@dataclass(frozen=True, eq=False)
class TokenRows:
    """Rows of tokens and their gradients: views of the adapter's buffers."""

    ids: np.ndarray | None
    """As in their shape."""
    rows_KD: torch.Tensor
    grad_KD: torch.Tensor
    any_order_sums: AnyOrderSums | None = None

    def places(self, tokens: np.ndarray) -> np.ndarray:
        """Of each token its row, or -1 where it has none."""
        if self.ids is None:
            return tokens
        order = np.argsort(self.ids)
        found = order[np.searchsorted(self.ids, tokens, sorter=order).clip(max=len(order) - 1)]
        return np.where(self.ids[found] == tokens, found, -1)


@dataclass(frozen=True)
class _Met:
    """The rows of one sample whose tokens are among the adapter's own."""

    rows: np.ndarray
    """Of the microbatch, ordered by token, those of one token as they stand."""
    places: np.ndarray
    """The token of each, as a place among the adapter's rows."""

    def sums(self, dy_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The different tokens (U), and the sum of each one's rows (U, D), one row after the other."""
        places, counts = np.unique(self.places, return_counts=True)
        rows_N = sent(torch.from_numpy(self.rows), dy_TD.device)
        lengths_U = sent(torch.from_numpy(counts), dy_TD.device)
        sums_UD = torch.segment_reduce(dy_TD[rows_N].float(), "sum", lengths=lengths_U, unsafe=True, initial=0)
        return sent(torch.from_numpy(places), dy_TD.device), sums_UD


@dataclass(eq=False)
class InputTokenRows(SlotWeights):
    """Rows of the embedding, where the first layer reads them."""

    own: TokenRows
    scale: float
    """What the backbone multiplies its embeddings by."""

    def __post_init__(self) -> None:
        self.any_order_sums = self.own.any_order_sums

    def forward(self, x_TD: torch.Tensor, y_TO: torch.Tensor, rows: SlotRows, routing: Routing) -> list[_Met]:
        """Puts its rows in the place of the backbone's."""
        assert routing.tokens is not None
        found = [self._met(routing.tokens, sample.buffer) for sample in rows.samples]
        met = [one for one in found if len(one.rows)]
        if met:
            rows_N, places_N = (
                sent(torch.from_numpy(np.concatenate([getattr(one, name) for one in met])), y_TO.device)
                for name in ("rows", "places")
            )
            values_ND = self.own.rows_KD[places_N].to(y_TO.dtype)
            y_TO[rows_N] = values_ND if self.scale == 1 else values_ND * self.scale
        return met

    def backward(
        self, x_TD: torch.Tensor, dy_TO: torch.Tensor, dx_TD: torch.Tensor | None, rows: SlotRows, kept: list[_Met]
    ) -> None:
        """Adds to its gradient; nothing of it goes on to the backbone's rows."""
        for met in kept:
            places_U, sums_UD = met.sums(dy_TO)
            # Every place is there once, so nothing depends on who adds first.
            self.own.grad_KD.index_add_(0, places_U, sums_UD, alpha=self.scale)
            if dx_TD is not None:
                dx_TD[sent(torch.from_numpy(met.rows), dy_TO.device)] = 0

    def _met(self, tokens: np.ndarray, sample: slice) -> _Met:
        places = self.own.places(tokens[sample])
        order = np.argsort(places, kind="stable")
        order = order[places[order] >= 0]
        return _Met(order + sample.start, places[order])
