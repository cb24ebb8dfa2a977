"""Draws a token from each row of scores, with sums of integers, so that a row's token depends on the row alone.

For a row with scores x, temperature T, seed and position:
    z   = x / T − max(x / T)
    w_v = ⌊2⁴³ · exp(z_v)⌋, an integer; 0 below min_p · 2⁴³
    u   = a hash of seed and position, 53 bits in [0, 1)
    token = the first v with w_0 + … + w_v > u · Σ w

With top_k and top_p the scores are sorted (equal ones by id), v is a rank, and the last kept rank is the first at which
the running sum reaches top_p · Σ w over the first top_k ranks. The sum of a million weights has 63 bits; it is exact in
any order, so blocks, batches and neighbours change nothing. Scores of −inf have no weight. A row that is not finite
gets any token and harms no other.

A row is read three times (largest score, sum, search); the search ends where it finds. Measured with torch 2.11 on an
H200, 64 rows of 128,256: a stable sort takes 640 µs, and the topk of 1,024 values with their ties by id as much; all of
`choose` in plain torch takes 1.2 ms at temperature 1, most of it launches (78 µs greedy).

Shape suffixes: R rows, G rows to draw for, V vocabulary, K ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weft.kernels.launch import jit, next_power_of_2, runs_triton, tl
from weft.kernels.layers.cross_entropy import cross_entropy_rows

UNIT = 2.0**43
"""Weight of the largest score."""
GOLDEN, FIRST, SECOND = 0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
"""Numbers of splitmix64."""
BLOCK = 4096
"""Scores of a row read at once."""
MOST_WEIGHTS = 2**24
"""Scores that are sorted, or turned into weights by the reference implementation, at once."""


@dataclass(frozen=True)
class DrawSettings:
    """Of every row; those of rows that are not drawn for are not read."""

    temperature_R: torch.Tensor
    """float32."""
    min_p_R: torch.Tensor
    """float64."""
    top_k_R: torch.Tensor
    """int64; the whole vocabulary or more for none."""
    top_p_R: torch.Tensor
    """float64."""
    seed_R: torch.Tensor
    """int64."""
    position_R: torch.Tensor
    """int64: positions of the tokens to draw in their sequences."""


def uniforms(seed_R: torch.Tensor, position_R: torch.Tensor) -> torch.Tensor:
    """float64 in [0, 1): the hash of seed and position."""
    hashed_R = _mixed(_mixed(seed_R + GOLDEN) + position_R * GOLDEN)
    return _shifted(hashed_R, 11).double() * 2.0**-53


def _mixed(x_R: torch.Tensor) -> torch.Tensor:
    """The finaliser of splitmix64; int64 arithmetic wraps around."""
    x_R = (x_R ^ _shifted(x_R, 30)) * FIRST
    x_R = (x_R ^ _shifted(x_R, 27)) * SECOND
    return x_R.bitwise_xor(_shifted(x_R, 31))


def _shifted(x_R: torch.Tensor, bits: int) -> torch.Tensor:
    """Shifted right as unsigned numbers."""
    return (x_R >> bits).bitwise_and(2 ** (64 - bits) - 1)


def draw_reference(
    scores_GK: torch.Tensor, rows_G: torch.Tensor, settings: DrawSettings, is_ranked: bool
) -> torch.Tensor:
    scores_GK = scores_GK / settings.temperature_R[rows_G, None]
    weights_GK = _weights(scores_GK - scores_GK.amax(1, keepdim=True))
    weights_GK *= weights_GK >= (settings.min_p_R[rows_G, None] * UNIT).long()
    if is_ranked:
        ranks_K = torch.arange(weights_GK.shape[1], device=weights_GK.device)
        weights_GK *= ranks_K < settings.top_k_R[rows_G, None]
        summed_GK = weights_GK.cumsum(1)
        least_G1 = (settings.top_p_R[rows_G, None] * summed_GK[:, -1:].double()).ceil().long()
        weights_GK *= ((summed_GK - weights_GK) < least_G1) | (ranks_K == 0)
    summed_GK = weights_GK.cumsum(1)
    total_G = summed_GK[:, -1]
    uniform_G = uniforms(settings.seed_R[rows_G], settings.position_R[rows_G])
    target_G = torch.minimum((uniform_G * total_G.double()).long(), total_G - 1)
    found_G = torch.searchsorted(summed_GK, target_G[:, None], right=True)[:, 0]
    return found_G.clamp(max=weights_GK.shape[1] - 1)


def normalisers_reference(logits_RV: torch.Tensor) -> torch.Tensor:
    parts = []
    for x_BV in logits_RV.split(rows_at_once(logits_RV.shape[1])):
        largest_B1 = x_BV.amax(1, keepdim=True)
        total_B = _weights(x_BV - largest_B1).sum(1)
        parts.append(largest_B1[:, 0].double() + (total_B.double() / UNIT).log())
    return torch.cat(parts)


def _weights(shifted_GV: torch.Tensor) -> torch.Tensor:
    return (shifted_GV.exp_() * UNIT).long()


@jit
def _unsigned_shift(x, BITS: tl.constexpr):  # type: ignore[no-untyped-def]
    return (x >> BITS) & ((1 << (64 - BITS)) - 1)


@jit
def _mix(x, FIRST: tl.constexpr, SECOND: tl.constexpr):  # type: ignore[no-untyped-def]
    x = (x ^ _unsigned_shift(x, 30)) * FIRST
    x = (x ^ _unsigned_shift(x, 27)) * SECOND
    return x ^ _unsigned_shift(x, 31)


@jit
def _block_weights(scores, columns, end, temperature, largest, least, UNIT: tl.constexpr):  # type: ignore[no-untyped-def]
    x = tl.load(scores + columns, mask=columns < end, other=float("-inf"))
    weights = (tl.exp(tl.div_rn(x, temperature) - largest) * UNIT).to(tl.int64)
    return tl.where((columns < end) & (weights >= least), weights, 0)


@jit
def _largest(scores, num_columns, temperature, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    lanes = tl.arange(0, BLOCK)
    most = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    for start in range(0, num_columns, BLOCK):
        most = tl.maximum(most, tl.load(scores + start + lanes, mask=start + lanes < num_columns, other=float("-inf")))
    return tl.div_rn(tl.max(most, axis=0), temperature)


@jit
def _sum(scores, end, temperature, largest, least, UNIT: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    lanes = tl.arange(0, BLOCK)
    sums = tl.zeros((BLOCK,), dtype=tl.int64)
    for start in range(0, end, BLOCK):
        sums += _block_weights(scores, start + lanes, end, temperature, largest, least, UNIT)
    return tl.sum(sums, axis=0)


@jit
def _search(scores, end, temperature, largest, least, target, UNIT: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first column whose running sum exceeds the target, and that sum."""
    lanes = tl.arange(0, BLOCK)
    start = end * 0
    before = target * 0
    upto = target * 0
    found = start
    is_found = start > 0
    while (start < end) & (is_found == 0):
        weights = _block_weights(scores, start + lanes, end, temperature, largest, least, UNIT)
        after = before + tl.sum(weights, axis=0)
        if after > target:
            is_below = (before + tl.cumsum(weights, axis=0) <= target) & (start + lanes < end)
            index = tl.sum(is_below.to(tl.int32), axis=0)
            found = start + index
            upto = before + tl.sum(tl.where(lanes <= index, weights, 0), axis=0)
            is_found = after > target
        before = after
        start += BLOCK
    return found, upto


@jit
def _draw(  # type: ignore[no-untyped-def]
    scores,
    rows,
    temperatures,
    min_ps,
    top_ks,
    top_ps,
    seeds,
    positions,
    drawn,
    stride,
    num_columns,
    UNIT: tl.constexpr,
    GOLDEN: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    IS_RANKED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    group = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + group)
    temperature = tl.load(temperatures + row)
    least = (tl.load(min_ps + row) * UNIT).to(tl.int64)
    scores += (group if IS_RANKED else row) * stride
    end = num_columns
    if IS_RANKED:
        end = tl.minimum(tl.load(top_ks + row), num_columns).to(tl.int32)
        largest = tl.div_rn(tl.load(scores), temperature)
    else:
        largest = _largest(scores, num_columns, temperature, BLOCK)
    total = _sum(scores, end, temperature, largest, least, UNIT, BLOCK)
    if IS_RANKED:
        reached = tl.ceil(tl.load(top_ps + row) * total.to(tl.float64)).to(tl.int64) - 1
        reached = tl.maximum(tl.minimum(reached, total - 1), 0)
        _, total = _search(scores, end, temperature, largest, least, reached, UNIT, BLOCK)
    hashed = _mix(tl.load(seeds + row) + GOLDEN, FIRST, SECOND) + tl.load(positions + row) * GOLDEN
    uniform = _unsigned_shift(_mix(hashed, FIRST, SECOND), 11).to(tl.float64) * (2.0**-53)
    target = tl.minimum((uniform * total.to(tl.float64)).to(tl.int64), total - 1)
    found, _ = _search(scores, end, temperature, largest, least, target, UNIT, BLOCK)
    tl.store(drawn + group, found.to(tl.int64))


def draw_kernel(scores_RV: torch.Tensor, rows_G: torch.Tensor, settings: DrawSettings, is_ranked: bool) -> torch.Tensor:
    """As `draw_reference`, but scores that are not ranked are those of all rows."""
    drawn_G, num_columns = torch.empty_like(rows_G), scores_RV.shape[1]
    block = min(BLOCK, next_power_of_2(num_columns))
    _draw[(len(rows_G),)](
        scores_RV,
        rows_G,
        settings.temperature_R,
        settings.min_p_R,
        settings.top_k_R,
        settings.top_p_R,
        settings.seed_R,
        settings.position_R,
        drawn_G,
        scores_RV.stride(0),
        num_columns,
        UNIT=UNIT,
        GOLDEN=GOLDEN,
        FIRST=FIRST,
        SECOND=SECOND,
        IS_RANKED=is_ranked,
        BLOCK=block,
        num_warps=min(16, max(4, block // 256)),
    )
    return drawn_G


def draw(scores_RV: torch.Tensor, rows_G: torch.Tensor, settings: DrawSettings, *, is_ranked: bool) -> torch.Tensor:
    """int64 [G]: tokens for some rows of float32 scores; `is_ranked`: with top_k and top_p."""
    has_kernel = runs_triton(scores_RV)
    if has_kernel and not is_ranked:
        return draw_kernel(scores_RV, rows_G, settings, False)
    parts = []
    for some_G in rows_G.split(rows_at_once(scores_RV.shape[1])):
        scores_GV = scores_RV[some_G]
        if is_ranked:
            # -0.0 becomes 0.0, which is equal to it.
            ordered_GK, tokens_GK = (scores_GV + 0.0).sort(dim=1, descending=True, stable=True)
            ranks_G = (draw_kernel if has_kernel else draw_reference)(ordered_GK, some_G, settings, True)
            parts.append(tokens_GK.gather(1, ranks_G[:, None])[:, 0])
        else:
            parts.append(draw_reference(scores_GV, some_G, settings, False))
    return torch.cat(parts)


def normalisers(logits_RV: torch.Tensor, tokens_R: torch.Tensor) -> torch.Tensor:
    """float64 [R]: logarithm of the sum of exp(logits); on a GPU, log-probabilities of these tokens then have the
    bits of training's loss."""
    if not runs_triton(logits_RV):
        return normalisers_reference(logits_RV)
    chosen_R = logits_RV.gather(1, tokens_R[:, None])[:, 0]
    # Another job's new tokens have no probability, and so no loss to start from.
    targets_R = torch.where(chosen_R == -torch.inf, logits_RV.argmax(1), tokens_R)
    losses_R = cross_entropy_rows(logits_RV, targets_R, None)[0]
    return losses_R.double() + logits_RV.gather(1, targets_R[:, None])[:, 0].double()


def rows_at_once(vocabulary: int) -> int:
    return max(1, MOST_WEIGHTS // vocabulary)
