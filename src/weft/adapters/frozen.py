"""The frozen weight W (O, D) of a linear, however it is stored: y = x Wᵀ forward, dx = dy W backward.

| kind | bits per weight | forward | backward |
|---|---|---|---|
| none | those of the model | x Wᵀ | dy W |
| fp8, two copies | 16 | 8-bit floats, both sides scaled by row | the same |
| fp8, one copy | 8 | the same | dy W with W made dense |
| int8 | 8 | x Wᵀ with W made dense | dy W likewise |
| nf4 | 4.5 | likewise | likewise |

The adapters beside it always see x and dy as they are. On a CPU the FP8 products are emulated: both sides are rounded
as on a GPU and multiplied in fp32. GPUs without FP8 arithmetic take the weight dense and round nothing else.

Products over rows run in blocks of `row_tile` rows where one is given: at a fixed row count a row's result does not
depend on its neighbours. Rounding to FP8 looks at one row at a time, so that holds for every kind, and a NaN in
another row changes nothing.

Shape suffixes: T rows, K columns of a factor, N columns of a product, D in, O out, G blocks of a row.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import ClassVar

import torch
from torch import nn

from weft.errors import ConfigError
from weft.kernels.device import is_cpu
from weft.kernels.lora.product import Factors
from weft.kernels.storage import (
    Nf4Codes,
    Rows8,
    dequantise,
    dequantise_nf4,
    has_fp8,
    quantise_int8,
    quantise_nf4,
    quantise_rows,
)

FP8_MULTIPLE = 16
"""Divisor of both dimensions of a weight in FP8 products; other weights stay dense."""


def tiled_mm(
    x_TK: torch.Tensor, w_KN: torch.Tensor, row_tile: int | None, onto_TN: torch.Tensor | None = None
) -> torch.Tensor:
    """X W in blocks of `row_tile` rows, of which T is a multiple; added to `onto_TN` in place if that is given."""
    if row_tile is None or x_TK.shape[0] == row_tile:
        return torch.mm(x_TK, w_KN) if onto_TN is None else onto_TN.addmm_(x_TK, w_KN)
    assert x_TK.shape[0] % row_tile == 0, "rows are padded to whole tiles before they get here"
    y_TN = x_TK.new_empty(x_TK.shape[0], w_KN.shape[1]) if onto_TN is None else onto_TN
    for start in range(0, x_TK.shape[0], row_tile):
        own = slice(start, start + row_tile)
        if onto_TN is None:
            torch.mm(x_TK[own], w_KN, out=y_TN[own])
        else:
            y_TN[own].addmm_(x_TK[own], w_KN)
    return y_TN


class FrozenWeight(nn.Module, ABC):
    """A weight (O, D) that never changes. Subclasses define how it is stored, and may define a faster product."""

    kind: ClassVar[str]
    out_dims: ClassVar[Mapping[str, int]]
    """Names of the stored tensors, with the dimension that counts outputs."""
    in_dims: ClassVar[Mapping[str, int]]
    adds_up: ClassVar[bool] = True
    """Whether its products can be added to an existing tensor; FP8 products cannot."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], num_in: int, dtype: torch.dtype) -> None:
        """Takes the stored tensors of another weight of its kind; `quantise` makes one from a dense weight."""
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor.detach(), requires_grad=False))
        name = next(iter(tensors))
        self.shape = (tensors[name].shape[self.out_dims[name]], num_in)
        self.dtype = dtype

    @abstractmethod
    def dense(self) -> torch.Tensor:
        """W (O, D) in the type of the activations."""

    @property
    def rounds_inputs(self) -> bool:
        """Whether `product` multiplies rows of 8-bit floats; a caller that has such rows of x may pass them as `x8`."""
        return False

    @property
    def gradient_columns(self) -> torch.Tensor | None:
        """Factors on the columns of dy before `input_gradient` rounds its rows (`dy8`); None if it does not."""
        return None

    def product(
        self,
        x_TD: torch.Tensor,
        row_tile: int | None = None,
        onto_TO: torch.Tensor | None = None,
        x8: Rows8 | None = None,
    ) -> torch.Tensor:
        """X Wᵀ, (T, O); with `onto_TO` (see `adds_up`) added to it in fp32, and rounded once."""
        return tiled_mm(x_TD, self.dense().t(), row_tile, onto_TO)

    def input_gradient(
        self,
        dy_TO: torch.Tensor,
        row_tile: int | None = None,
        onto_TD: torch.Tensor | None = None,
        dy8: Rows8 | None = None,
    ) -> torch.Tensor:
        """dY W, (T, D); with `onto_TD` added to it."""
        return tiled_mm(dy_TO, self.dense(), row_tile, onto_TD)

    def factors(self, x_TD: torch.Tensor, x8: Rows8 | None = None) -> Factors:
        return Factors(x_TD, self.dense())

    def gradient_factors(self, dy_TO: torch.Tensor, dy8: Rows8 | None = None) -> Factors:
        return Factors(dy_TO, self.dense().t())

    def part(self, start: int, stop: int) -> FrozenWeight:
        """The weight of the outputs [start, stop), which shares this one's storage."""
        assert 0 <= start < stop <= self.shape[0]
        cut = {name: t.narrow(self.out_dims[name], start, stop - start) for name, t in self.stored.items()}
        return type(self)(cut, self.shape[1], self.dtype)

    def cut(self, outputs: slice, inputs: slice) -> FrozenWeight:
        """The weight of some outputs and inputs, in storage of its own and with the same values."""
        num_in, rows = self.shape[1], self.part(outputs.start, outputs.stop).stored
        for name, dim in self.in_dims.items() if inputs != slice(0, num_in) else ():
            if name in rows:
                numbers = [edge * rows[name].shape[dim] / num_in for edge in (inputs.start, inputs.stop)]
                assert all(number.is_integer() for number in numbers), "blocks are cut between them"
                rows[name] = rows[name].narrow(dim, int(numbers[0]), int(numbers[1] - numbers[0]))
        own = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in rows.items()}
        return type(self)(own, inputs.stop - inputs.start, self.dtype)

    @property
    def stored(self) -> dict[str, torch.Tensor]:
        return {name: tensor for name, tensor in self._parameters.items() if tensor is not None}

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.stored.values())


class Dense(FrozenWeight):
    kind = "none"
    out_dims: ClassVar[Mapping[str, int]] = {"weight_OD": 0}
    in_dims: ClassVar[Mapping[str, int]] = {"weight_OD": 1}
    weight_OD: nn.Parameter

    @classmethod
    def of(cls, weight_OD: torch.Tensor) -> Dense:
        return cls({"weight_OD": weight_OD}, weight_OD.shape[1], weight_OD.dtype)

    def dense(self) -> torch.Tensor:
        return self.weight_OD


class Int8(FrozenWeight):
    kind = "int8"
    out_dims: ClassVar[Mapping[str, int]] = {"q_OD": 0, "scale_O": 0}
    in_dims: ClassVar[Mapping[str, int]] = {"q_OD": 1}
    q_OD: nn.Parameter
    scale_O: nn.Parameter

    @classmethod
    def of(cls, weight_OD: torch.Tensor) -> Int8:
        q_OD, scale_O = quantise_int8(weight_OD)
        return cls({"q_OD": q_OD, "scale_O": scale_O}, weight_OD.shape[1], weight_OD.dtype)

    def dense(self) -> torch.Tensor:
        return dequantise(self.q_OD, self.scale_O, self.dtype)


class Nf4(FrozenWeight):
    """Four-bit codes of QLoRA's levels with one scale per 64 weights."""

    kind = "nf4"
    out_dims: ClassVar[Mapping[str, int]] = {"codes": 0, "absmax_OG": 0}
    in_dims: ClassVar[Mapping[str, int]] = {"codes": 1, "absmax_OG": 1}
    codes: nn.Parameter
    absmax_OG: nn.Parameter

    @classmethod
    def of(cls, weight_OD: torch.Tensor) -> Nf4:
        found = quantise_nf4(weight_OD)
        return cls({"codes": found.codes, "absmax_OG": found.absmax_OG}, weight_OD.shape[1], weight_OD.dtype)

    def dense(self) -> torch.Tensor:
        return dequantise_nf4(Nf4Codes(self.codes, self.absmax_OG, self.shape), self.dtype)


class Fp8(FrozenWeight):
    """Eight-bit floats with one scale per output. Backward products are FP8 if there is a second copy."""

    kind = "fp8"
    adds_up = False
    out_dims: ClassVar[Mapping[str, int]] = {"w8_OD": 0, "scale_O": 0, "w8_DO": 1}
    in_dims: ClassVar[Mapping[str, int]] = {"w8_OD": 1, "w8_DO": 0}
    w8_OD: nn.Parameter
    scale_O: nn.Parameter
    w8_DO: nn.Parameter
    """The same values transposed, only with two copies: an FP8 product reads both factors along its sums."""

    @classmethod
    def of(cls, weight_OD: torch.Tensor, copies: int) -> Fp8:
        w8_OD, scale_O = quantise_rows(weight_OD)
        tensors = {"w8_OD": w8_OD, "scale_O": scale_O}
        if copies == 2:
            tensors["w8_DO"] = w8_OD.t().contiguous()
        return cls(tensors, weight_OD.shape[1], weight_OD.dtype)

    @property
    def copies(self) -> int:
        """2 if backward products are FP8 too, else 1."""
        return 2 if "w8_DO" in self.stored else 1

    def dense(self) -> torch.Tensor:
        return dequantise(self.w8_OD, self.scale_O, self.dtype)

    @property
    def rounds_inputs(self) -> bool:
        return _multiplies_fp8(self.w8_OD.device)

    @property
    def gradient_columns(self) -> torch.Tensor | None:
        """The weight's scales, if there are two copies."""
        return self.scale_O if self.copies == 2 and _multiplies_fp8(self.w8_OD.device) else None

    def product(
        self,
        x_TD: torch.Tensor,
        row_tile: int | None = None,
        onto_TO: torch.Tensor | None = None,
        x8: Rows8 | None = None,
    ) -> torch.Tensor:
        """X Wᵀ, (T, O), with x rounded to 8-bit floats row by row."""
        assert onto_TO is None
        if not self.rounds_inputs:
            return super().product(x_TD, row_tile)
        return _scaled_mm(self.factors(x_TD, x8), row_tile).to(self.dtype)

    def input_gradient(
        self,
        dy_TO: torch.Tensor,
        row_tile: int | None = None,
        onto_TD: torch.Tensor | None = None,
        dy8: Rows8 | None = None,
    ) -> torch.Tensor:
        """dY W, (T, D); with two copies dy is rounded to 8-bit floats row by row."""
        assert onto_TD is None
        if self.gradient_columns is None:
            return super().input_gradient(dy_TO, row_tile)
        return _scaled_mm(self.gradient_factors(dy_TO, dy8), row_tile).to(self.dtype)

    def factors(self, x_TD: torch.Tensor, x8: Rows8 | None = None) -> Factors:
        if not self.rounds_inputs:
            return super().factors(x_TD)
        x8_TD, scale_T = quantise_rows(x_TD) if x8 is None else x8
        return Factors(x8_TD, self.w8_OD, scale_T, self.scale_O)

    def gradient_factors(self, dy_TO: torch.Tensor, dy8: Rows8 | None = None) -> Factors:
        """With two copies, both factors as 8-bit floats; the weight's scales are in dy then."""
        if self.gradient_columns is None:
            return super().gradient_factors(dy_TO)
        d8_TO, scale_T = quantise_rows(dy_TO, self.scale_O) if dy8 is None else dy8
        # A part of the transposed copy is not in one piece; whole weights are, and are not copied here.
        return Factors(d8_TO, self.w8_DO.contiguous(), scale_T)


def _multiplies_fp8(device: torch.device) -> bool:
    """Whether FP8 products are computed or emulated on a device."""
    return is_cpu(device) or has_fp8(device)


@lru_cache(maxsize=256)
def _ones(number: int, device: torch.device) -> torch.Tensor:
    return torch.ones(number, device=device)


def _scaled_mm(factors: Factors, row_tile: int | None) -> torch.Tensor:
    """(x8 · scale_T) (w8 · scale_N)ᵀ, (T, N): bf16 from a GPU's FP8 product, else its values in fp32."""
    x8_TK, w8_NK = factors.x_TK, factors.w_NK
    scale_N = _ones(len(w8_NK), x8_TK.device) if factors.scale_N is None else factors.scale_N
    assert factors.scale_T is not None
    if not x8_TK.is_cuda:
        return tiled_mm(x8_TK.float(), w8_NK.float().t(), row_tile) * factors.scale_T[:, None] * scale_N
    step = row_tile or len(x8_TK)
    tiles = [
        torch._scaled_mm(
            x8_LK,
            w8_NK.t(),
            scale_a=scale_L[:, None],
            scale_b=scale_N[None, :],
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )
        for x8_LK, scale_L in zip(x8_TK.split(step), factors.scale_T.split(step), strict=True)
    ]
    return tiles[0] if len(tiles) == 1 else torch.cat(tiles)


def _fp8_if_it_fits(weight_OD: torch.Tensor, copies: int) -> FrozenWeight:
    fits = all(size % FP8_MULTIPLE == 0 for size in weight_OD.shape)
    return Fp8.of(weight_OD, copies) if fits else Dense.of(weight_OD)


KINDS: dict[str, Callable[[torch.Tensor, int], FrozenWeight]] = {
    "none": lambda weight_OD, _: Dense.of(weight_OD),
    "fp8": _fp8_if_it_fits,
    "nf4": lambda weight_OD, _: Nf4.of(weight_OD),
    "int8": lambda weight_OD, _: Int8.of(weight_OD),
}
"""Constructor of each kind from a dense weight and, for FP8, a number of copies."""


@torch.no_grad()
def quantise(weight_OD: torch.Tensor, kind: str, *, copies: int = 2) -> FrozenWeight:
    """The weight stored as `kind`, on its device; a weight whose shape FP8 products do not support stays dense.
    `copies` is for FP8: 2 makes backward products FP8 too, 1 needs half the memory."""
    if kind not in KINDS:
        raise ConfigError(f"got {kind!r}; accepted are {', '.join(KINDS)}.", where="quantize")
    return KINDS[kind](weight_OD, copies)


def join(weights: Sequence[FrozenWeight]) -> FrozenWeight:
    """Concatenates the outputs of several weights of one kind; values stay the same."""
    first = weights[0]
    assert all(type(w) is type(first) and w.shape[1] == first.shape[1] for w in weights)
    stacked = {name: torch.cat([w.stored[name] for w in weights], first.out_dims[name]) for name in first.stored}
    return type(first)(stacked, first.shape[1], first.dtype)


def quantisation(weights: Iterable[FrozenWeight]) -> str:
    """The storage kind of a backbone's weights, as a value of the setting `quantize`."""
    return next((weight.kind for weight in weights if weight.kind != Dense.kind), Dense.kind)


def describe(weights: Iterable[FrozenWeight]) -> str:
    """A description of how weights are stored: `fp8 (7.0 GB in 222 linears), 2 linears dense (100.0 MB)`."""
    weights = list(weights)
    kept = [weight for weight in weights if isinstance(weight, Dense)]
    stored = [weight for weight in weights if not isinstance(weight, Dense)]
    dense = f"{len(kept)} linears dense ({_size(kept)})"
    if not stored:
        return dense
    text = f"{quantisation(stored)} ({_size(stored)} in {len(stored)} linears)"
    return f"{text}, {dense}" if kept else text


def _size(weights: Iterable[FrozenWeight]) -> str:
    num_bytes = sum(weight.num_bytes for weight in weights)
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"
