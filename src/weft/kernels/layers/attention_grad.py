"""The gradient of causal attention within samples, without atomics: two kernels that write each result once.

With p as in `attention` and dy the gradient of out:
    delta_i = dy_i · out_i,   dp_ij = dy_i · v_j,   ds_ij = scale · p_ij (dp_ij − delta_i)
    dq_i = Σ_j ds_ij k_j,   dk_j = Σ_i ds_ij q_i,   dv_j = Σ_i p_ij dy_i        dk and dv also over the group's G heads
p is made again from lse. The first kernel walks over the keys of a block of queries and writes delta and dq. The second
walks over the queries of a block of keys and writes dk and dv: head by head the diagonal, then head by head the rest,
then the last queries of a sample that do not fill a block.

Blocks count from the sample's own start and sums are fp32 in that fixed order; p and ds are rounded to the type of q
before their products. Rows past a sample's end are loaded as zeros, so a NaN in another sample or in padding changes
nothing. Rows in no sample are left unwritten.

Shape suffixes as in `attention`; E = (H + 2K) C, the query heads, then the key heads, then the value heads.
"""

from __future__ import annotations

import torch

from weft.kernels.launch import jit, on_device, tl
from weft.kernels.layers.attention import (
    BLOCK,
    LOG2_E,
    AttentionBlocks,
    Blocks,
    blocks_of,
    described,
    key_blocks,
    packed_heads,
    padded_size,
    query_block,
    resident_tile,
    scores,
    tile,
    visible,
)


def attend_grad_reference(
    dout_THC: torch.Tensor,
    q_THC: torch.Tensor,
    k_TKC: torch.Tensor,
    v_TKC: torch.Tensor,
    out_THC: torch.Tensor,
    lse_HT: torch.Tensor,
    blocks: AttentionBlocks,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """The reference implementation of `attend_grad`, in fp64 inside, from q, k, v; rows in no sample are zero."""
    groups = (k_TKC.shape[1], -1)
    dqkv_TE = torch.zeros((len(q_THC), (q_THC.shape[1] + 2 * k_TKC.shape[1]) * q_THC.shape[2]), device=q_THC.device)
    for span in blocks.spans:
        mine = slice(span.start, span.end)
        q_LKGC, dout_LKGC = (x[mine].double().unflatten(1, groups) for x in (q_THC, dout_THC))
        p_KGLM = torch.softmax(scores(q_THC[mine], k_TKC[mine], scale, window), dim=-1)
        dp_KGLM = torch.einsum("lkgc,mkc->kglm", dout_LKGC, v_TKC[mine].double())
        ds_KGLM = scale * p_KGLM * (dp_KGLM - (p_KGLM * dp_KGLM).sum(-1, keepdim=True))
        dq_LKGC = torch.einsum("kglm,mkc->lkgc", ds_KGLM, k_TKC[mine].double())
        dk_MKC = torch.einsum("kglm,lkgc->mkc", ds_KGLM, q_LKGC)
        dv_MKC = torch.einsum("kglm,lkgc->mkc", p_KGLM, dout_LKGC)
        dqkv_TE[mine] = torch.cat([x.flatten(1) for x in (dq_LKGC, dk_MKC, dv_MKC)], dim=1)
    return dqkv_TE.to(q_THC.dtype)


GRAD_QUERIES = {64: Blocks(64, 64, 1, 4, 2), 128: Blocks(128, 64, 2, 8, 3), 256: Blocks(64, 32, 1, 8, 2)}
"""By padded head size, as for `attend`. At 128 two programs share a multiprocessor: one multiplies while the other
takes exponentials."""

GRAD_KEYS = {64: Blocks(64, 64, 1, 4, 2), 128: Blocks(64, 128, 1, 8, 3), 256: Blocks(32, 64, 1, 8, 2)}
"""The same; heads of a group follow each other rather than share a tile. dk and dv fill half of the registers, and more
queries at a time would not fit beside them."""


@jit
def _grad_queries(  # type: ignore[no-untyped-def]
    dy, q, k, v, out, lse, padded_lse, padded_delta, dqkv, lines, stride_q, stride_k, stride_v, num_rows, num_padded,
    scale, log_scale, window,
    NUM_H: tl.constexpr, NUM_K: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, HAS_WINDOW: tl.constexpr,
    BLOCK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PACK: tl.constexpr,
):  # fmt: skip
    first, begin, end, padded_start, rows, heads, head = query_block(lines, NUM_H, BM, PACK, BLOCK)
    if first >= end:
        return
    kv_head = head // (NUM_H // NUM_K)
    dy_tile = resident_tile(dy, NUM_H * C, rows, (heads * C)[:, None], end, C, CP)
    out_tile = resident_tile(out, NUM_H * C, rows, (heads * C)[:, None], end, C, CP)
    delta_rows = tl.sum(dy_tile.to(tl.float32) * out_tile.to(tl.float32), 1)
    # Past the end p becomes exp2(−inf), in both kernels: no query there adds anything.
    lse_rows = tl.load(lse + heads.to(tl.int64) * num_rows + rows, mask=rows < end, other=float("inf"))
    padded_rows = heads.to(tl.int64) * num_padded + padded_start + rows - begin
    tl.store(padded_lse + padded_rows, lse_rows)
    tl.store(padded_delta + padded_rows, delta_rows)
    q_tile = resident_tile(q, stride_q, rows, (heads * C)[:, None], end, C, CP)
    dq = tl.zeros((BM, CP), dtype=tl.float32)
    first_block, diagonal, edge, last = key_blocks(first, begin, end, window, HAS_WINDOW, BM // PACK, BN)
    for key in range(first_block, edge, BN):
        dq = _take_keys(
            dq, q_tile, dy_tile, k, v, stride_k, stride_v, kv_head, key, diagonal, end, rows, lse_rows, delta_rows,
            log_scale, window, C, BN, CP, False, HAS_WINDOW,
        )  # fmt: skip
    for key in tl.range(edge, last, BN, num_stages=1):
        dq = _take_keys(
            dq, q_tile, dy_tile, k, v, stride_k, stride_v, kv_head, key, diagonal, end, rows, lse_rows, delta_rows,
            log_scale, window, C, BN, CP, True, HAS_WINDOW,
        )  # fmt: skip
    columns = tl.arange(0, CP)
    width = (NUM_H + 2 * NUM_K) * C
    here = dqkv + rows.to(tl.int64)[:, None] * width + (heads * C)[:, None] + columns[None, :]
    mask = (rows < end)[:, None] & (columns < C)[None, :]
    tl.store(here, (dq * scale).to(dqkv.dtype.element_ty), mask=mask)


@jit
def _take_keys(  # type: ignore[no-untyped-def]
    dq, q, dy, k, v, stride_k, stride_v, head, first, diagonal, end, rows, lse, delta, log_scale, window,
    C: tl.constexpr, BN: tl.constexpr, CP: tl.constexpr, CHECKED: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """dq / scale after one more block of keys."""
    k_tile = tile(k, stride_k, head, first, end, C, BN, CP, CHECKED)
    v_tile = tile(v, stride_v, head, first, end, C, BN, CP, CHECKED)
    s = tl.dot(q, tl.trans(k_tile), input_precision="ieee")
    dp = tl.dot(dy, tl.trans(v_tile), input_precision="ieee")
    p = tl.exp2(s * log_scale - lse[:, None])
    if HAS_WINDOW or first >= diagonal:
        keys = first + tl.arange(0, BN)
        p = tl.where(visible(rows[:, None], keys[None, :], window, HAS_WINDOW), p, 0.0)
    ds = p * (dp - delta[:, None])
    return tl.dot(ds.to(k_tile.dtype), k_tile, dq, input_precision="ieee")


@jit
def _grad_keys(  # type: ignore[no-untyped-def]
    dy, q, k, v, padded_lse, padded_delta, dqkv, lines, stride_q, stride_k, stride_v, num_padded,
    scale, log_scale, window,
    NUM_H: tl.constexpr, NUM_K: tl.constexpr, C: tl.constexpr, CP: tl.constexpr, HAS_WINDOW: tl.constexpr,
    BLOCK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    line = lines + tl.program_id(1) * 4
    start, begin, end, padded_start = tl.load(line), tl.load(line + 1), tl.load(line + 2), tl.load(line + 3)
    if start >= end:
        return
    # Lines come by the number of keys before a block. Its mirror image within the sample has as many queries after it.
    mirrored = begin + (tl.cdiv(end - begin, BLOCK) - 1) * BLOCK - (start - begin)
    first = mirrored + tl.program_id(0) // NUM_K * BN
    if first >= end:
        return
    kv_head = tl.program_id(0) % NUM_K
    GROUP: tl.constexpr = NUM_H // NUM_K
    keys = first + tl.arange(0, BN)
    k_tile = resident_tile(k, stride_k, keys, kv_head * C, end, C, CP)
    v_tile = resident_tile(v, stride_v, keys, kv_head * C, end, C, CP)
    dk = tl.zeros((BN, CP), dtype=tl.float32)
    dv = tl.zeros((BN, CP), dtype=tl.float32)
    last = tl.minimum(end, first + BN - 1 + window) if HAS_WINDOW else end
    num_blocks = tl.cdiv(last - first, BM)
    # Blocks of queries that end within the sample; at most one more reaches over its end.
    num_whole = tl.minimum(num_blocks, (end - first) // BM)
    num_diagonal = tl.minimum(num_whole, (BN + BM - 1) // BM)
    num_later = num_whole - num_diagonal
    padded_start += first - begin
    # One loop over all heads rather than a loop in a loop: the loads of the next head start while this one ends. And
    # no branch in it, unlike the walks over keys: with two sums in flight it makes the assembler wait for each product.
    for step in range(0, GROUP * num_diagonal):
        dk, dv = _take_queries(
            dk, dv, k_tile, v_tile, q, dy, padded_lse, padded_delta, stride_q, num_padded,
            kv_head * GROUP + step // num_diagonal, first, padded_start, step % num_diagonal * BM, end, keys, log_scale,
            window, NUM_H, C, BM, CP, True, False, HAS_WINDOW,
        )  # fmt: skip
    for step in range(0, GROUP * num_later):
        dk, dv = _take_queries(
            dk, dv, k_tile, v_tile, q, dy, padded_lse, padded_delta, stride_q, num_padded,
            kv_head * GROUP + step // num_later, first, padded_start, (num_diagonal + step % num_later) * BM, end, keys,
            log_scale, window, NUM_H, C, BM, CP, False, False, HAS_WINDOW,
        )  # fmt: skip
    for step in tl.range(0, GROUP * (num_blocks - num_whole), num_stages=1):
        dk, dv = _take_queries(
            dk, dv, k_tile, v_tile, q, dy, padded_lse, padded_delta, stride_q, num_padded,
            kv_head * GROUP + step, first, padded_start, num_whole * BM, end, keys, log_scale, window,
            NUM_H, C, BM, CP, True, True, HAS_WINDOW,
        )  # fmt: skip
    columns = tl.arange(0, CP)
    width = (NUM_H + 2 * NUM_K) * C
    here = dqkv + keys.to(tl.int64)[:, None] * width + ((NUM_H + kv_head) * C + columns)[None, :]
    mask = (keys < end)[:, None] & (columns < C)[None, :]
    tl.store(here, (dk * scale).to(dqkv.dtype.element_ty), mask=mask)
    tl.store(here + NUM_K * C, dv.to(dqkv.dtype.element_ty), mask=mask)


@jit
def _take_queries(  # type: ignore[no-untyped-def]
    dk, dv, k, v, q, dy, padded_lse, padded_delta, stride_q, num_padded, head, first, padded_start, offset, end, keys,
    log_scale, window,
    NUM_H: tl.constexpr, C: tl.constexpr, BM: tl.constexpr, CP: tl.constexpr,
    MASKED: tl.constexpr, CHECKED: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """dk / scale and dv after one more block of one head's queries."""
    rows = first + offset + tl.arange(0, BM)
    q_tile = tile(q, stride_q, head, first + offset, end, C, BM, CP, CHECKED)
    dy_tile = tile(dy, NUM_H * C, head, first + offset, end, C, BM, CP, CHECKED)
    lse = padded_lse.load([head * num_padded + padded_start + offset])
    delta = padded_delta.load([head * num_padded + padded_start + offset])
    s = tl.dot(k, tl.trans(q_tile), input_precision="ieee")
    p = tl.exp2(s * log_scale - lse[None, :])
    if MASKED or HAS_WINDOW:
        p = tl.where(visible(rows[None, :], keys[:, None], window, HAS_WINDOW), p, 0.0)
    dv = tl.dot(p.to(dy_tile.dtype), dy_tile, dv, input_precision="ieee")
    dp = tl.dot(v, tl.trans(dy_tile), input_precision="ieee")
    ds = p * (dp - delta[None, :])
    dk = tl.dot(ds.to(q_tile.dtype), q_tile, dk, input_precision="ieee")
    return dk, dv


def attend_grad_kernel(
    dout_THC: torch.Tensor,
    q_THC: torch.Tensor,
    k_TKC: torch.Tensor,
    v_TKC: torch.Tensor,
    out_THC: torch.Tensor,
    lse_HT: torch.Tensor,
    blocks: AttentionBlocks,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    from triton.tools.tensor_descriptor import TensorDescriptor

    num_rows, num_q, size = q_THC.shape
    num_kv = k_TKC.shape[1]
    assert scale > 0 and all(x.stride()[1:] == (size, 1) for x in (q_THC, k_TKC, v_TKC))
    assert dout_THC.is_contiguous() and out_THC.is_contiguous() and lse_HT.is_contiguous()
    dqkv_TE = torch.empty((num_rows, (num_q + 2 * num_kv) * size), dtype=q_THC.dtype, device=q_THC.device)
    num_lines = len(blocks.lines_N4)
    # lse and delta by position in padded samples, not by row: their blocks are aligned, as the copy engine needs.
    padded_2P = torch.empty((2, num_q * num_lines * BLOCK), dtype=torch.float32, device=q_THC.device)
    strides = tuple(x.stride(0) for x in (q_THC, k_TKC, v_TKC))
    scales = (scale, scale * LOG2_E, window or 0)
    model = {
        "NUM_H": num_q,
        "NUM_K": num_kv,
        "C": size,
        "CP": padded_size(size),
        "HAS_WINDOW": window is not None,
        "BLOCK": BLOCK,
    }
    by_query = blocks_of(GRAD_QUERIES, size)
    pack = packed_heads(by_query, num_q // num_kv)
    _grad_queries[(num_q // pack * (BLOCK * pack // by_query.queries), num_lines)](
        dout_THC, q_THC, *described((k_TKC, v_TKC), by_query.keys), out_THC, lse_HT, *padded_2P, dqkv_TE,
        blocks.lines_N4, *strides, num_rows, num_lines * BLOCK, *scales, **model,
        BM=by_query.queries, BN=by_query.keys, PACK=pack,
        num_warps=by_query.num_warps, num_stages=by_query.num_stages,
    )  # fmt: skip
    by_key = blocks_of(GRAD_KEYS, size)
    # What the second kernel reads past a sample's end, the first has written.
    assert by_query.queries // pack >= by_key.queries
    _grad_keys[(num_kv * (BLOCK // by_key.keys), num_lines)](
        *described((dout_THC, q_THC), by_key.queries), k_TKC, v_TKC,
        *(TensorDescriptor(x_P, [len(x_P)], [1], [by_key.queries]) for x_P in padded_2P), dqkv_TE, blocks.lines_N4,
        *strides, num_lines * BLOCK, *scales, **model,
        BM=by_key.queries, BN=by_key.keys, num_warps=by_key.num_warps, num_stages=by_key.num_stages,
    )  # fmt: skip
    return dqkv_TE


attend_grad = on_device(attend_grad_kernel, attend_grad_reference)
"""dqkv_TE: the gradients of q, k and v side by side, from the gradient of out and what `attend` returned."""
