"""Causal attention of single rows over keys and values that lie in pages, with the bits of `attend`.

Row t is the last token so far of a sequence and sees its n_t keys. Per query head, over the keys j it sees
(n_t − j ≤ window where there is one):
    out_t = Σ_j p_tj v_j,   p_tj = exp(s_tj − lse_t),   s_tj = scale · q_t · k_j
A sequence's keys lie in pages of PAGE rows, in order; `KeyTable` names them. Key j of a sequence whose pages are P is
row P[j // PAGE] · PAGE + j % PAGE.

Keys are taken in the blocks of `attend`, in its order, by its operations: PAGE is a multiple of every block. A block of
which a query sees nothing changes no bit of its sums, so a row's result is what `attend` gives it within its whole
sequence. The heads that share a key head are the rows of one product. What lies beyond a sequence's last key is loaded
as zeros: a NaN there changes nothing. Rows that see no key are left unwritten.

Shape suffixes: T rows, H query heads, K key heads, C head size, P rows of pages, S sequences, N pages of one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weft.kernels.launch import jit, next_power_of_2, on_device, tl
from weft.kernels.layers.attention import ATTEND, LOG2_E, blocks_of, described, padded_size, resident_tile, take_keys

PAGE = 64
LEAST_ROWS = 64
"""Rows of the tensor cores' products in `attend`; fewer would be another instruction, and other bits."""


@dataclass(frozen=True)
class KeyTable:
    pages_SN: torch.Tensor
    """int32 numbers of every sequence's pages."""
    sequences_T: torch.Tensor
    """int32 line in `pages_SN` of every row's sequence."""
    lengths_T: torch.Tensor
    """int32 number of keys before a row and its own; 0 for rows of no sequence."""


def attend_pages_reference(
    q_THC: torch.Tensor,
    k_PKC: torch.Tensor,
    v_PKC: torch.Tensor,
    table: KeyTable,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """The reference implementation, in fp64 inside; rows of no sequence are zero."""
    out_THC = torch.zeros_like(q_THC, memory_format=torch.contiguous_format)
    for row, length in enumerate(table.lengths_T.tolist()):
        if length == 0:
            continue
        keys_M = torch.arange(max(0, length - (window or length)), length, device=q_THC.device)
        pages_M = table.pages_SN[table.sequences_T[row].long(), keys_M // PAGE].long()
        rows_M = pages_M * PAGE + keys_M % PAGE
        q_KGC = q_THC[row].double().unflatten(0, (k_PKC.shape[1], -1))
        s_KGM = torch.einsum("kgc,mkc->kgm", q_KGC, k_PKC[rows_M].double()) * scale
        p_KGM = torch.exp(s_KGM - torch.logsumexp(s_KGM, dim=-1)[..., None])
        out_THC[row] = torch.einsum("kgm,mkc->kgc", p_KGM, v_PKC[rows_M].double()).flatten(0, 1).to(out_THC.dtype)
    return out_THC


@jit
def _attend_pages(  # type: ignore[no-untyped-def]
    q, k, v, out, pages, sequences, lengths, stride_q, stride_k, stride_v, stride_pages, log_scale, window,
    NUM_H: tl.constexpr, NUM_K: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, HAS_WINDOW: tl.constexpr,
    PAGE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    row, kv_head = tl.program_id(0), tl.program_id(1)
    length = tl.load(lengths + row)
    if length == 0:
        return
    pages += tl.load(sequences + row).to(tl.int64) * stride_pages
    GROUP: tl.constexpr = NUM_H // NUM_K
    lanes = tl.arange(0, BM)
    # Lanes past the group are rows past this one, which are not loaded.
    heads, rows = kv_head * GROUP + lanes % GROUP, row + lanes // GROUP
    q_tile = resident_tile(q, stride_q, rows, (heads * C)[:, None], row + 1, C, CP)
    queries = tl.zeros((BM,), dtype=tl.int32) + (length - 1)
    acc = tl.zeros((BM, CP), dtype=tl.float32)
    top = tl.full((BM,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BM,), dtype=tl.float32)
    first_block = tl.maximum(length - window, 0) // BN * BN if HAS_WINDOW else 0
    last_block = (length - 1) // BN * BN
    for key in range(first_block, last_block, BN):
        at = tl.load(pages + key // PAGE) * PAGE + key % PAGE
        acc, top, total = take_keys(
            acc, top, total, q_tile, k, v, stride_k, stride_v, kv_head, key, at, last_block, at + BN, queries,
            log_scale, window, C, BN, CP, False, HAS_WINDOW,
        )  # fmt: skip
    for key in tl.range(last_block, length, BN, num_stages=1):
        at = tl.load(pages + key // PAGE) * PAGE + key % PAGE
        acc, top, total = take_keys(
            acc, top, total, q_tile, k, v, stride_k, stride_v, kv_head, key, at, last_block, at + length - key, queries,
            log_scale, window, C, BN, CP, True, HAS_WINDOW,
        )  # fmt: skip
    columns = tl.arange(0, CP)
    here = out + row.to(tl.int64) * (NUM_H * C) + (heads * C)[:, None] + columns[None, :]
    mask = (lanes < GROUP)[:, None] & (columns < C)[None, :]
    tl.store(here, (acc / total[:, None]).to(out.dtype.element_ty), mask=mask)


def attend_pages_kernel(
    q_THC: torch.Tensor,
    k_PKC: torch.Tensor,
    v_PKC: torch.Tensor,
    table: KeyTable,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    num_rows, num_q, size = q_THC.shape
    num_kv = k_PKC.shape[1]
    assert scale > 0 and all(x.stride()[1:] == (size, 1) for x in (q_THC, k_PKC, v_PKC))
    launch = blocks_of(ATTEND, size)
    assert PAGE % launch.keys == 0, "a block of keys lies in one page"
    out_THC = torch.empty_like(q_THC, memory_format=torch.contiguous_format)
    tile = max(LEAST_ROWS, next_power_of_2(num_q // num_kv))
    _attend_pages[(num_rows, num_kv)](
        q_THC,
        *described((k_PKC, v_PKC), launch.keys),
        out_THC,
        table.pages_SN,
        table.sequences_T,
        table.lengths_T,
        q_THC.stride(0),
        k_PKC.stride(0),
        v_PKC.stride(0),
        table.pages_SN.stride(0),
        scale * LOG2_E,
        window or 0,
        NUM_H=num_q,
        NUM_K=num_kv,
        C=size,
        CP=padded_size(size),
        HAS_WINDOW=window is not None,
        PAGE=PAGE,
        BM=tile,
        BN=launch.keys,
        num_warps=tile // 16,
        num_stages=launch.num_stages,
    )
    return out_THC


attend_pages = on_device(attend_pages_kernel, attend_pages_reference)
"""Every row's output (T, H, C), over the keys of its own sequence."""
