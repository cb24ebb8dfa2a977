"""What mixers with a state compute along a sample: a causal convolution, and linear attention with decay.

Each sample starts from zero, or from the state that its earlier tokens left in a cache. Per head, with the state S
(K, V), key k, query q, value v, decay g ≤ 0 and strength β of a token:

    S ← e^g S;  δ = β (v − Sᵀ k), or v without β;  S ← S + k δᵀ;  o = Sᵀ q

With β this is the gated delta rule, without it Mamba-2's scan (k = B, q = C, v = Δx, g = ΔA). It is computed in chunks
of 64 tokens from the sample's start, in fp32. With c the running sum of g in a chunk and D_ij = e^(c_i − c_j) for
i ≥ j:

    (I + tril(β K Kᵀ ∘ D, −1)) [U W] = [β V, β e^c K];  V' = U − W S
    O = (e^c Q) S + (Q Kᵀ ∘ D) V';  S ← e^(c_64) S + (e^(c_64 − c) K)ᵀ V'

Differences c_i − c_j above the diagonal are masked before the exponential, where they would overflow.

Shape suffixes: T rows of all samples, N samples, C chunks, L rows of a chunk, H heads, K key size, V value size, D
channels, W taps of a convolution.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from weft.kernels.device import is_cpu
from weft.kernels.device_event import sent

CHUNK = 64
BLOCK = 8
"""Chunks of a product on a GPU: with 32 heads enough matrices to fill it."""


def causal_convolution(
    x_TD: torch.Tensor,
    weight_DW: torch.Tensor,
    bias_D: torch.Tensor | None,
    lengths: Sequence[int],
    before: Sequence[torch.Tensor | None],
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Each channel's convolution over a sample's last W tokens in fp32, and the W − 1 rows that each sample leaves.
    `before`: the rows that earlier tokens of a sample left; None: it begins here."""
    num_taps = weight_DW.shape[1]
    nothing = x_TD.new_zeros(num_taps - 1, x_TD.shape[1])
    parts = [part for pair in zip(before, x_TD.split(list(lengths)), strict=True) for part in pair]
    given_RD = torch.cat([nothing if part is None else part for part in parts]).float()
    weight_WD = weight_DW.float().t()
    num_rows = len(given_RD) - num_taps + 1
    y_RD = given_RD[:num_rows] * weight_WD[0]
    for tap in range(1, num_taps):
        y_RD = y_RD + given_RD[tap : tap + num_rows] * weight_WD[tap]
    if bias_D is not None:
        y_RD = y_RD + bias_D.float()
    # Between two samples are rows that see both; they are cut out.
    sizes = [size for length in lengths for size in (length, num_taps - 1)][:-1]
    y_TD = torch.cat(y_RD.split(sizes)[::2])
    ends = list(itertools.accumulate(length + num_taps - 1 for length in lengths))
    return y_TD, [given_RD[end - num_taps + 1 : end].to(x_TD.dtype) for end in ends]


def linear_attention(
    query_THK: torch.Tensor,
    key_THK: torch.Tensor,
    value_THV: torch.Tensor,
    decay_TH: torch.Tensor,
    beta_TH: torch.Tensor | None,
    lengths: Sequence[int],
    states_NHKV: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs (T, H, V) and the state that each sample leaves (N, H, K, V), in fp32. `states_NHKV`: the states that
    earlier tokens left."""
    num_samples, (num_heads, key_size), value_size = len(lengths), query_THK.shape[1:], value_THV.shape[2]
    if states_NHKV is None:
        states_NHKV = query_THK.new_zeros(num_samples, num_heads, key_size, value_size, dtype=torch.float32)
    if max(lengths) == 1:
        return one_token(query_THK, key_THK, value_THV, decay_TH, beta_TH, states_NHKV)
    chunks = chunks_of(tuple(lengths), query_THK.device)
    rows = (query_THK, key_THK, value_THV, decay_TH[..., None], *(() if beta_TH is None else (beta_TH[..., None],)))
    query, key, value, decay, *beta = (chunks.cut(x.float()) for x in rows)
    sums_CHL = _by_blocks(lambda g: g.cumsum(2), decay[..., 0])
    above = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=query.device).triu(1)
    between_CHLL = (sums_CHL[..., :, None] - sums_CHL[..., None, :]).masked_fill(above, float("-inf")).exp()
    since_CHL1, until_CHL1 = sums_CHL.exp()[..., None], (sums_CHL[..., -1:] - sums_CHL).exp()[..., None]
    scores_CHLL = _by_blocks(torch.matmul, query, key.transpose(2, 3)) * between_CHLL
    added_CHLV, known_CHLK = value, None
    if beta:
        strong_CHLK = key * beta[0]
        system_CHLL = _by_blocks(torch.matmul, strong_CHLK, key.transpose(2, 3)) * between_CHLL
        given = torch.cat([value * beta[0], strong_CHLK * since_CHL1], dim=3)
        solved = _by_blocks(_SOLVE, system_CHLL, given)
        added_CHLV, known_CHLK = solved.split([value_size, key_size], dim=3)
    query, key, whole_CH11 = query * since_CHL1, key * until_CHL1, since_CHL1[:, :, -1:]
    state, outputs, left = states_NHKV[chunks.order_N], [], []
    for step in chunks.steps:
        left.append(state[step.stop - step.start :])
        state = state[: step.stop - step.start]
        new = added_CHLV[step]
        if known_CHLK is not None:
            new = new - _by_blocks(torch.matmul, known_CHLK[step], state)
        read = _by_blocks(torch.matmul, query[step], state)
        outputs.append(read + _by_blocks(torch.matmul, scores_CHLL[step], new))
        state = state * whole_CH11[step] + _by_blocks(torch.matmul, key[step].transpose(2, 3), new)
    return chunks.join(torch.cat(outputs)), torch.cat([state, *reversed(left)])[chunks.ranks_N]


def kept_numbers(key_size: int, value_size: int, *, has_beta: bool) -> int:
    """Numbers of a row and head that autograd keeps of it, in whole chunks."""
    state = key_size * value_size // CHUNK
    if has_beta:
        # D, both products before and after D; q and k before and after their decays, β k, W, U; V and V'.
        return 5 * CHUNK + 6 * key_size + 3 * value_size + state
    return 3 * CHUNK + 4 * key_size + value_size + state


_SOLVE = functools.partial(torch.linalg.solve_triangular, upper=False, unitriangular=True)


def _by_blocks(run: Callable[..., torch.Tensor], *given: torch.Tensor) -> torch.Tensor:
    """`run` on a GPU in blocks of a fixed number of chunks, of all samples: libraries choose their algorithms by how
    many there are, so without blocks bits would depend on the neighbours. On a CPU there is one sample."""
    if is_cpu(given[0].device):
        return run(*given)
    num = len(given[0])
    if missing := -num % BLOCK:
        given = tuple(F.pad(x, (0, 0) * (x.dim() - 1) + (0, missing)) for x in given)
    parts = [run(*block) for block in zip(*(x.split(BLOCK) for x in given), strict=True)]
    return (parts[0] if len(parts) == 1 else torch.cat(parts))[:num]


def one_token(
    query_NHK: torch.Tensor,
    key_NHK: torch.Tensor,
    value_NHV: torch.Tensor,
    decay_NH: torch.Tensor,
    beta_NH: torch.Tensor | None,
    state_NHKV: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`linear_attention` of one token of each sample, by its definition."""
    query, key, value, decay = (x.float() for x in (query_NHK, key_NHK, value_NHV, decay_NH))
    state = state_NHKV * decay.exp()[..., None, None]
    if beta_NH is not None:
        value = (value - (state * key[..., None]).sum(2)) * beta_NH.float()[..., None]
    state = state + key[..., None] * value[:, :, None]
    return (state * query[..., None]).sum(2), state


@dataclass(frozen=True, eq=False)
class Chunks:
    """Where the rows of samples are once each is cut into whole chunks. Chunks that are computed together follow each
    other: the first ones of all samples, then the second ones, each with long samples first. So all samples take a step
    at once, and none needs to be selected."""

    num_rows: int
    """Rows of all samples."""
    num_chunks: int
    steps: tuple[slice, ...]
    """Chunks of each step."""
    order_N: torch.Tensor
    """Samples by falling length."""
    ranks_N: torch.Tensor
    """Index of each sample in that order."""
    rows_T: torch.Tensor | None
    """Row of the chunks for each row of the samples; None for a single sample, whose rows keep their order."""

    def cut(self, x_THK: torch.Tensor) -> torch.Tensor:
        """The rows as (C, H, L, K); rows after a sample's end are zero."""
        num_rows = self.num_chunks * CHUNK
        if self.rows_T is None:
            x = F.pad(x_THK, (0, 0, 0, 0, 0, num_rows - len(x_THK)))
        else:
            x = x_THK.new_zeros(num_rows, *x_THK.shape[1:]).index_copy(0, self.rows_T, x_THK)
        return x.view(-1, CHUNK, *x.shape[1:]).transpose(1, 2).contiguous()

    def join(self, x_CHLV: torch.Tensor) -> torch.Tensor:
        """The rows of the samples (T, H, V), without those after an end."""
        x = x_CHLV.transpose(1, 2).flatten(0, 1)
        return x[: self.num_rows] if self.rows_T is None else x.index_select(0, self.rows_T)


@functools.lru_cache(maxsize=4)
def chunks_of(lengths: tuple[int, ...], device: torch.device) -> Chunks:
    """The chunks of samples; the layers of a microbatch share them. The host waits for nothing."""
    counts_N = -(-np.array(lengths) // CHUNK)
    order_N = np.argsort(-counts_N, kind="stable")
    ranks_N = np.argsort(order_N, kind="stable")
    sizes = [int((counts_N > step).sum()) for step in range(counts_N.max())]
    firsts = np.concatenate([[0], np.cumsum(sizes)])
    rows = [
        (firsts[position // CHUNK] + rank) * CHUNK + position % CHUNK
        for rank, position in zip(ranks_N, map(np.arange, lengths), strict=True)
    ]
    return Chunks(
        num_rows=sum(lengths),
        num_chunks=int(firsts[-1]),
        steps=tuple(slice(first, end) for first, end in itertools.pairwise(firsts.tolist())),
        order_N=sent(torch.from_numpy(order_N), device),
        ranks_N=sent(torch.from_numpy(ranks_N), device),
        rows_T=None if len(lengths) == 1 else sent(torch.from_numpy(np.concatenate(rows)), device),
    )


class _Recomputed(torch.autograd.Function):
    """A function that keeps only its inputs and runs again on the way back."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., torch.Tensor], *given: torch.Tensor) -> torch.Tensor:
        ctx.run = run
        ctx.save_for_backward(*given)
        return run(*given)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        given = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
        with torch.enable_grad():
            output = ctx.run(*given)
        return (None, *torch.autograd.grad(output, given, grad))


def recomputed(run: Callable[..., torch.Tensor], *given: torch.Tensor) -> torch.Tensor:
    """`run(*given)`; gradients need no more memory than its inputs until the way back reaches it."""
    output: torch.Tensor = _Recomputed.apply(run, *given)  # type: ignore[no-untyped-call]
    return output
