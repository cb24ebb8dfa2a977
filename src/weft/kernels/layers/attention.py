"""Causal attention within samples that lie side by side in one buffer: its blocks of work and its forward.

For each query i of a sample and each head, over the keys j it sees (j ≤ i, and i − j < window where there is one):
    s_ij = scale · q_i · k_j,   p_ij = exp(s_ij − lse_i),   lse_i = log Σ_j exp(s_ij),   out_i = Σ_j p_ij v_j
H query heads share K key heads, H/K neighbours each. lse is kept in base 2, for `attend_grad`.

A query's keys are taken in blocks counted from its own sample's start, in order, with a running maximum; products and
sums are fp32, p is rounded to the type of v before its product. Blocks never reach over a sample's end: what lies there
is loaded as zeros, so a NaN in another sample or in padding changes nothing, and neither does a sample's position.
Rows in no sample are left unwritten. Nothing is added by two programs: equal inputs give equal bits.

Shape suffixes: T rows, H query heads, K key heads, G = H/K, C head size, L queries and M keys of one sample, N lines of
the table of blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from weft.kernels.launch import cdiv, jit, next_power_of_2, on_device, tl
from weft.kernels.lora.tables import SampleRows

BLOCK = 128
"""Rows of one line of the table; kernels may cut a line into equal parts."""
LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class AttentionBlocks:
    """Where the samples of a microbatch are, for kernels and for reference implementations."""

    lines_N4: torch.Tensor
    """int32 (first row of a block, its sample's start and end, the sample's padded start) on the device; empty where
    the first row is not before the end. The padded start is where the sample begins in arrays that give each a multiple
    of BLOCK."""
    spans: tuple[SampleRows, ...]


def attention_blocks(spans: Sequence[SampleRows], num_rows: int, num_spans: int) -> np.ndarray:
    """Lines of `AttentionBlocks`, longest work first, in a size that any `num_spans` samples in `num_rows` rows fit."""
    lines: list[tuple[int, int, int, int]] = []
    for span in spans:
        padded_start = len(lines) * BLOCK
        lines += [(first, span.start, span.end, padded_start) for first in range(span.start, span.end, BLOCK)]
    # A block's work grows with the keys before it. Late in the launch only short work is left, and all end together.
    lines.sort(key=lambda line: (line[1] - line[0], line[0]))
    table = np.zeros((cdiv(num_rows, BLOCK) + num_spans, 4), dtype=np.int32)
    table[: len(lines)] = np.array(lines, dtype=np.int32).reshape(-1, 4)
    return table


def attend_reference(
    q_THC: torch.Tensor,
    k_TKC: torch.Tensor,
    v_TKC: torch.Tensor,
    blocks: AttentionBlocks,
    scale: float,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference implementation of `attend`, in fp64 inside; rows in no sample are zero."""
    num_rows, num_q, _ = q_THC.shape
    out_THC = torch.zeros_like(q_THC, memory_format=torch.contiguous_format)
    lse_HT = torch.zeros((num_q, num_rows), dtype=torch.float32, device=q_THC.device)
    for span in blocks.spans:
        mine = slice(span.start, span.end)
        s_KGLM = scores(q_THC[mine], k_TKC[mine], scale, window)
        lse_KGL = torch.logsumexp(s_KGLM, dim=-1)
        out_LKGC = torch.einsum("kglm,mkc->lkgc", torch.exp(s_KGLM - lse_KGL[..., None]), v_TKC[mine].double())
        out_THC[mine] = out_LKGC.flatten(1, 2).to(out_THC.dtype)
        lse_HT[:, mine] = lse_KGL.flatten(0, 1) * LOG2_E
    return out_THC, lse_HT


def scores(q_LHC: torch.Tensor, k_MKC: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
    """s_KGLM of one sample in fp64, −inf where a query does not see a key."""
    q_LKGC = q_LHC.double().unflatten(1, (k_MKC.shape[1], -1))
    s_KGLM = torch.einsum("lkgc,mkc->kglm", q_LKGC, k_MKC.double()) * scale
    index_L = torch.arange(len(q_LHC), device=q_LHC.device)
    back_LM = index_L[:, None] - index_L[None, :]
    return s_KGLM.masked_fill((back_LM < 0) | (back_LM >= (window or len(q_LHC))), float("-inf"))


class Blocks(NamedTuple):
    queries: int
    """Queries of a tile: rows times heads packed into it."""
    keys: int
    heads: int
    """Maximum of query heads that share a tile, and with it every load of keys: rows per head are fewer, so less of the
    diagonal is computed in vain."""
    num_warps: int
    num_stages: int


ATTEND = {64: Blocks(128, 64, 2, 8, 3), 128: Blocks(64, 64, 1, 4, 3), 256: Blocks(128, 32, 2, 8, 2)}
"""By head size, padded to a power of two; smaller ones as 64. Sizes along keys are part of the result. On sm_90 none
keeps registers in memory. H200, 8192 rows in samples of 512 to 1024, 32 and 8 heads of 128: 170 us forward and 523 us
backward, where FlashAttention 2 took 0.37 and 1.16 ms with its fixed order of sums."""


def blocks_of(table: dict[int, Blocks], size: int) -> Blocks:
    assert size <= 256, size
    return table[max(64, next_power_of_2(size))]


def padded_size(size: int) -> int:
    return max(16, next_power_of_2(size))


def packed_heads(blocks: Blocks, num_groups: int) -> int:
    """Query heads per tile: as many as wanted and as share their keys evenly."""
    return max(n for n in range(1, blocks.heads + 1) if num_groups % n == 0 and n & (n - 1) == 0)


@jit
def tile(  # type: ignore[no-untyped-def]
    x, stride, head, first, end, C: tl.constexpr, ROWS: tl.constexpr, CP: tl.constexpr, CHECKED: tl.constexpr
):  # fmt: skip
    """(ROWS, CP) of one head from row `first` on; zeros past C and, where checked, from row `end` on."""
    rows = tl.arange(0, ROWS)
    if CP == C:
        loaded = x.load([first, head * C])
        return tl.where((first + rows < end)[:, None], loaded, 0.0) if CHECKED else loaded
    else:
        columns = tl.arange(0, CP)
        here = x + (tl.cast(first, tl.int64) * stride + head * C) + (rows[:, None] * stride + columns[None, :])
        mask = (columns < C)[None, :]
        return tl.load(here, mask=mask & (first + rows < end)[:, None] if CHECKED else mask, other=0.0)


@jit
def resident_tile(x, stride, rows, first_column, end, C: tl.constexpr, CP: tl.constexpr):  # type: ignore[no-untyped-def]
    """(len(rows), CP) from `first_column` on, one for all rows or one each; zeros past C and from row `end` on. Through
    pointers: what comes so is kept in shared memory for a whole loop, and costs no registers there."""
    columns = tl.arange(0, CP)
    here = x + rows.to(tl.int64)[:, None] * stride + first_column + columns[None, :]
    return tl.load(here, mask=(rows < end)[:, None] & (columns < C)[None, :], other=0.0)


@jit
def query_block(lines, NUM_H: tl.constexpr, BM: tl.constexpr, PACK: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """This program's queries: the first row, the sample's start, end and padded start, the rows, the heads and the
    first head."""
    line = lines + tl.program_id(1) * 4
    start, begin, end, padded_start = tl.load(line), tl.load(line + 1), tl.load(line + 2), tl.load(line + 3)
    ROWS: tl.constexpr = BM // PACK
    # The later parts of a line see more keys and go first.
    part = BLOCK // ROWS - 1 - tl.program_id(0) // (NUM_H // PACK)
    head = tl.program_id(0) % (NUM_H // PACK) * PACK
    lanes = tl.arange(0, BM)
    # An empty line keeps all its parts empty.
    first = tl.where(start < end, start + part * ROWS, end)
    return first, begin, end, padded_start, first + lanes % ROWS, head + lanes // ROWS, head


@jit
def key_blocks(first, begin, end, window, HAS_WINDOW: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first key of a block of queries, the first key that only some queries see, the first block that reaches over
    the sample's end, and the end."""
    first_block = begin + tl.maximum(first - window + 1 - begin, 0) // BN * BN if HAS_WINDOW else begin
    diagonal = begin + (first - begin) // BN * BN
    last = tl.minimum(first + ROWS, end)
    edge = tl.minimum(diagonal + tl.cdiv(last - diagonal, BN) * BN, begin + (end - begin) // BN * BN)
    return first_block, diagonal, edge, last


@jit
def visible(queries, keys, window, HAS_WINDOW: tl.constexpr):  # type: ignore[no-untyped-def]
    if HAS_WINDOW:
        return (keys <= queries) & (queries - keys < window)
    else:
        return keys <= queries


@jit
def take_keys(  # type: ignore[no-untyped-def]
    acc, top, total, q, k, v, stride_k, stride_v, head, first, at, diagonal, end, rows, log_scale, window,
    C: tl.constexpr, BN: tl.constexpr, CP: tl.constexpr, CHECKED: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """The running output, maximum and sum of p after one more block of keys, from key `first` on. They lie at the rows
    from `at` on; where checked, those from row `end` on are none."""
    k_tile = tile(k, stride_k, head, at, end, C, BN, CP, CHECKED)
    s = tl.dot(q, tl.trans(k_tile), input_precision="ieee")
    # One loop for whole and for cut blocks keeps loads and products in flight from the first key to the last.
    if HAS_WINDOW or first >= diagonal:
        keys = first + tl.arange(0, BN)
        s = tl.where(visible(rows[:, None], keys[None, :], window, HAS_WINDOW), s, float("-inf"))
    higher = tl.maximum(top, tl.max(s, 1) * log_scale)
    # A query that has seen no key yet has no maximum to subtract.
    level = tl.where(higher == float("-inf"), 0.0, higher) if HAS_WINDOW else higher
    p = tl.exp2(s * log_scale - level[:, None])
    shrink = tl.exp2(top - level)
    v_tile = tile(v, stride_v, head, at, end, C, BN, CP, CHECKED)
    acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * shrink[:, None], input_precision="ieee")
    return acc, higher, total * shrink + tl.sum(p, 1)


@jit
def _attend(  # type: ignore[no-untyped-def]
    q, k, v, out, lse, lines, stride_q, stride_k, stride_v, num_rows, log_scale, window,
    NUM_H: tl.constexpr, NUM_K: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, HAS_WINDOW: tl.constexpr,
    BLOCK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PACK: tl.constexpr,
):  # fmt: skip
    first, begin, end, _, rows, heads, head = query_block(lines, NUM_H, BM, PACK, BLOCK)
    if first >= end:
        return
    kv_head = head // (NUM_H // NUM_K)
    q_tile = resident_tile(q, stride_q, rows, (heads * C)[:, None], end, C, CP)
    acc = tl.zeros((BM, CP), dtype=tl.float32)
    top = tl.full((BM,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BM,), dtype=tl.float32)
    first_block, diagonal, edge, last = key_blocks(first, begin, end, window, HAS_WINDOW, BM // PACK, BN)
    for key in range(first_block, edge, BN):
        acc, top, total = take_keys(
            acc, top, total, q_tile, k, v, stride_k, stride_v, kv_head, key, key, diagonal, end, rows, log_scale,
            window, C, BN, CP, False, HAS_WINDOW,
        )  # fmt: skip
    for key in tl.range(edge, last, BN, num_stages=1):
        acc, top, total = take_keys(
            acc, top, total, q_tile, k, v, stride_k, stride_v, kv_head, key, key, diagonal, end, rows, log_scale,
            window, C, BN, CP, True, HAS_WINDOW,
        )  # fmt: skip
    # Past the end a window may hold no key.
    total = tl.where(rows < end, total, 1.0)
    columns = tl.arange(0, CP)
    here = out + rows.to(tl.int64)[:, None] * (NUM_H * C) + (heads * C)[:, None] + columns[None, :]
    mask = (rows < end)[:, None] & (columns < C)[None, :]
    tl.store(here, (acc / total[:, None]).to(out.dtype.element_ty), mask=mask)
    tl.store(lse + heads.to(tl.int64) * num_rows + rows, top + tl.log2(total), mask=rows < end)


def described(tensors: Sequence[torch.Tensor], num_rows: int) -> list[Any]:
    """Each (T, heads, C) as the GPU's copy engine reads it, `num_rows` rows of a head at a time. A head size that is no
    power of two is read through pointers, and its tensors are returned unchanged."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    size = tensors[0].shape[2]
    if size != padded_size(size):
        return list(tensors)
    return [
        TensorDescriptor(x, [len(x), x.shape[1] * size], [x.stride(0), 1], [num_rows, size]) for x in tensors
    ]  # fmt: skip


def attend_kernel(
    q_THC: torch.Tensor,
    k_TKC: torch.Tensor,
    v_TKC: torch.Tensor,
    blocks: AttentionBlocks,
    scale: float,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    num_rows, num_q, size = q_THC.shape
    num_kv = k_TKC.shape[1]
    assert scale > 0 and all(x.stride()[1:] == (size, 1) for x in (q_THC, k_TKC, v_TKC))
    out_THC = torch.empty_like(q_THC, memory_format=torch.contiguous_format)
    lse_HT = torch.empty((num_q, num_rows), dtype=torch.float32, device=q_THC.device)
    launch = blocks_of(ATTEND, size)
    pack = packed_heads(launch, num_q // num_kv)
    _attend[(num_q // pack * (BLOCK * pack // launch.queries), len(blocks.lines_N4))](
        q_THC,
        *described((k_TKC, v_TKC), launch.keys),
        out_THC,
        lse_HT,
        blocks.lines_N4,
        q_THC.stride(0),
        k_TKC.stride(0),
        v_TKC.stride(0),
        num_rows,
        scale * LOG2_E,
        window or 0,
        NUM_H=num_q,
        NUM_K=num_kv,
        C=size,
        CP=padded_size(size),
        HAS_WINDOW=window is not None,
        BLOCK=BLOCK,
        BM=launch.queries,
        BN=launch.keys,
        PACK=pack,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
    return out_THC, lse_HT


attend = on_device(attend_kernel, attend_reference)
"""(out_THC, lse_HT): every query over the keys before it in its own sample; lse in base 2, for the backward."""
