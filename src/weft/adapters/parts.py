"""Parts of an adapter that sit on none of its method's modules: a head for labels, rows of tokens.

Each is one more group of the adapter's parameters, under the name it also has as a module, and is stepped, saved and
moved like the method's groups.

The head makes logits of L labels from hidden states. transformers' classification models call it `score`; PEFT keeps it
as a module to save.

Token rows are trained rows of the input embedding and of the output head. For its own samples they replace the
backbone's rows, which stay as they are for all other jobs. PEFT trains them for `trainable_token_indices` and, if they
are all rows, for `modules_to_save`. Input: y[t] = s · rows[k] where token t is the k-th trained one; drows[k] += s · Σ
dy[t] over those t of a sample, from the first to the last, sample by sample in the job's order. Output:
`model/trained_rows.py`. If head and embedding are tied, both use the same rows; their gradients are kept apart until a
global batch is complete, because its cut into microbatches would otherwise decide the order of the sum. A part of a
model may have one end of tied rows only.

Shape suffixes: T rows of the microbatch, K tokens, U different ones of a sample, D width, V vocabulary, L labels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch

from weft.adapters.method import SlotWeights
from weft.adapters.routing import AnyOrderSums, Routing, SlotRows
from weft.kernels.device_event import sent


class PartShape(ABC):
    @property
    @abstractmethod
    def tensor_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the part's tensors, in the order of its buffer."""

    @abstractmethod
    def initial(self, generator: torch.Generator) -> tuple[torch.Tensor, ...]: ...

    @property
    def sizes(self) -> list[int]:
        return [torch.Size(shape).numel() for shape in self.tensor_shapes]

    def split(self, flat: torch.Tensor) -> tuple[torch.Tensor, ...]:
        pieces = zip(flat.split(self.sizes), self.tensor_shapes, strict=True)
        return tuple(piece.view(shape) for piece, shape in pieces)


HEAD = "score"
"""Name of the head as a module, as a group of parameters, and in PEFT's files."""
INITIAL_STD = 0.02


@dataclass(frozen=True)
class HeadShape(PartShape):
    num_labels: int
    width: int
    """D of the hidden states."""
    has_bias: bool

    @property
    def tensor_shapes(self) -> tuple[tuple[int, ...], ...]:
        return ((self.num_labels, self.width), *(((self.num_labels,),) if self.has_bias else ()))

    def initial(self, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        """Normal weights and a zero bias, as in transformers."""
        weight_LD = torch.randn(self.num_labels, self.width, generator=generator) * INITIAL_STD
        return (weight_LD, *((torch.zeros(self.num_labels),) if self.has_bias else ()))


@dataclass(frozen=True, eq=False)
class HeadWeights:
    params: tuple[torch.Tensor, ...]
    grads: tuple[torch.Tensor, ...]
    any_order_sums: AnyOrderSums | None = None

    def logits(self, hidden_BD: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(hidden_BD.float(), *self.params)

    def input_gradient(self, slopes_BL: torch.Tensor) -> torch.Tensor:
        return slopes_BL @ self.params[0]

    def add_gradients(self, hidden_ND: torch.Tensor, slopes_NL: torch.Tensor) -> None:
        self.grads[0].add_(slopes_NL.t() @ hidden_ND.float())
        if len(self.grads) > 1:
            self.grads[1].add_(slopes_NL.sum(dim=0))
        if self.any_order_sums is not None:
            self.any_order_sums.take_sample()


INPUT_ROWS = "input_rows"
OUTPUT_ROWS = "output_rows"


@dataclass(frozen=True, eq=False)
class RowsShape(PartShape):
    ids: np.ndarray | None
    """Token ids (K); None: all rows."""
    weight_VD: torch.Tensor
    """The frozen rows, which are the initial values."""
    num_known: int
    """Number of tokens that the backbone knows; rows of later tokens start as the mean of the known ones."""
    ends: tuple[str, ...]
    """The parts that use the rows: both if head and embedding are tied."""

    @property
    def tensor_shapes(self) -> tuple[tuple[int, ...], ...]:
        num_rows = self.weight_VD.shape[0] if self.ids is None else len(self.ids)
        return ((num_rows, self.weight_VD.shape[1]),)

    def initial(self, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
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
    ids: np.ndarray | None
    rows_KD: torch.Tensor
    grad_KD: torch.Tensor
    any_order_sums: AnyOrderSums | None = None

    def indices(self, tokens: np.ndarray) -> np.ndarray:
        """The row index of each token, or -1 where it has none."""
        if self.ids is None:
            return tokens
        order = np.argsort(self.ids)
        found = order[np.searchsorted(self.ids, tokens, sorter=order).clip(max=len(order) - 1)]
        return np.where(self.ids[found] == tokens, found, -1)


@dataclass(frozen=True)
class _Met:
    rows: np.ndarray
    indices: np.ndarray

    def sums(self, dy_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The distinct tokens (U), and the sum of each one's rows (U, D), added one row after the other."""
        indices, counts = np.unique(self.indices, return_counts=True)
        rows_N = sent(torch.from_numpy(self.rows), dy_TD.device)
        lengths_U = sent(torch.from_numpy(counts), dy_TD.device)
        sums_UD = torch.segment_reduce(dy_TD[rows_N].float(), "sum", lengths=lengths_U, unsafe=True, initial=0)
        return sent(torch.from_numpy(indices), dy_TD.device), sums_UD


@dataclass(eq=False)
class InputTokenRows(SlotWeights):
    """Trained rows of the embedding, at the input of the first layer."""

    own: TokenRows
    scale: float

    def __post_init__(self) -> None:
        self.any_order_sums = self.own.any_order_sums

    def forward(self, x_TD: torch.Tensor, y_TO: torch.Tensor, rows: SlotRows, routing: Routing) -> list[_Met]:
        """Replaces the backbone's rows by the adapter's."""
        assert routing.tokens is not None
        found = [self._met(routing.tokens, sample.buffer) for sample in rows.samples]
        met = [one for one in found if len(one.rows)]
        if met:
            rows_N, indices_N = (
                sent(torch.from_numpy(np.concatenate([getattr(one, name) for one in met])), y_TO.device)
                for name in ("rows", "indices")
            )
            values_ND = self.own.rows_KD[indices_N].to(y_TO.dtype)
            y_TO[rows_N] = values_ND if self.scale == 1 else values_ND * self.scale
        return met

    def backward(
        self, x_TD: torch.Tensor, dy_TO: torch.Tensor, dx_TD: torch.Tensor | None, rows: SlotRows, kept: list[_Met]
    ) -> None:
        """Adds to the gradient; none is passed on to the backbone's rows."""
        for met in kept:
            indices_U, sums_UD = met.sums(dy_TO)
            # Every index occurs once, so the order of additions does not matter.
            self.own.grad_KD.index_add_(0, indices_U, sums_UD, alpha=self.scale)
            if dx_TD is not None:
                dx_TD[sent(torch.from_numpy(met.rows), dy_TO.device)] = 0

    def _met(self, tokens: np.ndarray, sample: slice) -> _Met:
        indices = self.own.indices(tokens[sample])
        order = np.argsort(indices, kind="stable")
        order = order[indices[order] >= 0]
        return _Met(order + sample.start, indices[order])
