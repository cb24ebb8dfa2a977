"""Attention within samples and its gradient, kernel and reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from covering import each_pair

from weft.kernels.layers.attention import (
    ATTEND,
    BLOCK,
    AttentionBlocks,
    attend_kernel,
    attend_reference,
    attention_blocks,
)
from weft.kernels.layers.attention_grad import GRAD_KEYS, GRAD_QUERIES, attend_grad_kernel, attend_grad_reference
from weft.kernels.lora.tables import SampleRows

RUNS = [(attend_reference, attend_grad_reference), (attend_kernel, attend_grad_kernel)]
IDS = ["reference", "kernel"]
LENGTHS = (3, 150, 1)
"""A short sample, one of more than one block with a part of another, a single token; then padding."""
NUM_ROWS = 170


def blocks_for(lengths: tuple[int, ...], start: int = 0) -> AttentionBlocks:
    """Samples of these lengths one after the other."""
    ends = start + np.cumsum(lengths)
    spans = tuple(SampleRows(int(end) - length, int(end), 1) for end, length in zip(ends, lengths, strict=True))
    return AttentionBlocks(torch.from_numpy(attention_blocks(spans, NUM_ROWS, 4)), spans)


def rows_within(blocks: AttentionBlocks) -> torch.Tensor:
    inside_T = torch.zeros(NUM_ROWS, dtype=torch.bool)
    for span in blocks.spans:
        inside_T[span.start : span.end] = True
    return inside_T


def parts_of(qkv_TE: torch.Tensor, num_q: int, num_kv: int, size: int) -> tuple[torch.Tensor, ...]:
    """q, k and v as strided views of one buffer."""
    columns = (num_q * size, num_kv * size, num_kv * size)
    return tuple(part.unflatten(1, (-1, size)) for part in qkv_TE.split(columns, dim=1))


def both(runs, qkv_TE, dout_THC, blocks, num_kv, window):
    """out and dqkv by one pair of forward and backward."""
    _, num_q, size = dout_THC.shape
    parts = parts_of(qkv_TE, num_q, num_kv, size)
    scale = size**-0.5
    out_THC, lse_HT = runs[0](*parts, blocks, scale, window)
    dqkv_TE = runs[1](dout_THC, *parts, out_THC, lse_HT, blocks, scale, window)
    return out_THC, dqkv_TE


def plain(qkv_TE, dout_THC, blocks, num_kv, window):
    """The same in fp64 by torch's own attention, sample by sample."""
    _, num_q, size = dout_THC.shape
    leaf_TE = qkv_TE.double().requires_grad_()
    outs = []
    for span in blocks.spans:
        parts = parts_of(leaf_TE[span.start : span.end], num_q, num_kv, size)
        q, k, v = (x.transpose(0, 1) for x in parts)
        seen_LL = torch.ones(len(parts[0]), len(parts[0]), dtype=torch.bool).tril()
        seen_LL = seen_LL if window is None else seen_LL.triu(1 - window)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen_LL, enable_gqa=True)
        outs.append(out.transpose(0, 1))
    out_RHC = torch.cat(outs)
    (grad_TE,) = torch.autograd.grad(out_RHC, leaf_TE, dout_THC[rows_within(blocks)].double())
    return out_RHC.detach(), grad_TE


def random(num_q: int, num_kv: int, size: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(NUM_ROWS, (num_q + 2 * num_kv) * size).to(dtype), torch.randn(NUM_ROWS, num_q, size).to(dtype)


@pytest.mark.parametrize(
    ("number", "heads", "window"), each_pair(range(len(RUNS)), [(4, 2, 16), (1, 1, 20)], [None, 1, 40, 140])
)
def test_attend_when_samples_are_packed_then_equals_each_alone(number, heads, window):
    """Output and gradients are those of torch's attention over one sample at a time, whatever padding holds."""
    runs, num_kv = RUNS[number], heads[1]
    qkv_TE, dout_THC = random(*heads)
    blocks = blocks_for(LENGTHS)
    inside_T = rows_within(blocks)
    qkv_TE[~inside_T], dout_THC[~inside_T] = torch.nan, torch.nan
    out_THC, dqkv_TE = both(runs, qkv_TE, dout_THC, blocks, num_kv, window)
    expected_RHC, expected_TE = plain(qkv_TE, dout_THC, blocks, num_kv, window)
    torch.testing.assert_close(out_THC[inside_T].double(), expected_RHC, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(dqkv_TE[inside_T].double(), expected_TE[inside_T], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [128, 256])
def test_attend_kernel_when_launched_as_for_larger_heads_then_agrees_with_its_reference(size, monkeypatch):
    """Every launch in the tables gives the reference's numbers, on small heads for speed."""
    for table in (ATTEND, GRAD_QUERIES, GRAD_KEYS):
        monkeypatch.setitem(table, 64, table[size])
    qkv_TE, dout_THC = random(4, 2, 16)
    blocks = blocks_for(LENGTHS)
    inside_T = rows_within(blocks)
    pairs = zip(*(both(runs, qkv_TE, dout_THC, blocks, 2, None) for runs in RUNS), strict=True)
    for reference, kernel in pairs:
        torch.testing.assert_close(kernel[inside_T], reference[inside_T], rtol=1e-5, atol=1e-5)


def test_attend_kernel_when_fp16_then_rounds_as_its_reference():
    """In half precision kernel and reference agree to a few units in the last place."""
    qkv_TE, dout_THC = random(2, 1, 16, torch.float16)
    blocks = blocks_for(LENGTHS)
    inside_T = rows_within(blocks)
    pairs = zip(*(both(runs, qkv_TE, dout_THC, blocks, 1, None) for runs in RUNS), strict=True)
    for reference, kernel in pairs:
        assert kernel.dtype == torch.float16
        torch.testing.assert_close(kernel[inside_T], reference[inside_T], rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("window", [None, 20])
def test_attend_kernel_when_a_sample_lies_elsewhere_beside_nan_then_keeps_its_bits(window):
    """A sample's output and gradients depend neither on its place nor on its neighbours, NaN or not."""
    qkv_TE, dout_THC = random(2, 1, 16)
    first = blocks_for((130, 20))
    own, moved = slice(0, 130), slice(13, 143)
    alone = both(RUNS[1], qkv_TE, dout_THC, first, 1, window)
    other_TE, other_THC = torch.full_like(qkv_TE, torch.nan), torch.full_like(dout_THC, torch.nan)
    other_TE[moved], other_THC[moved] = qkv_TE[own], dout_THC[own]
    with np.errstate(invalid="ignore"):  # of the neighbours' own numbers
        beside = both(RUNS[1], other_TE, other_THC, blocks_for((13, 130, 27)), 1, window)
    for mine, elsewhere in zip(alone, beside, strict=True):
        assert mine[own].isfinite().all() and mine[own].equal(elsewhere[moved])


def test_attention_blocks_when_made_then_cover_each_sample_once_longest_work_first():
    """Lines hold every row of every sample once, blocks with most keys before them first; the rest is empty."""
    blocks = blocks_for((3, 150, 1, 5), start=2)
    lines = blocks.lines_N4.numpy()
    used = lines[lines[:, 0] < lines[:, 2]]
    assert len(lines) == 2 + 4 and not lines[len(used) :].any()
    rows = [row for first, _, end, _ in used for row in range(first, min(first + BLOCK, end))]
    assert sorted(rows) == list(range(2, 161))
    assert {(int(line[1]), int(line[2])) for line in used} == {(span.start, span.end) for span in blocks.spans}
    before = [int(line[0] - line[1]) for line in used]
    assert before == sorted(before, reverse=True) and before[0] == BLOCK
    positions = sorted(int(line[3] + line[0] - line[1]) for line in used)
    assert positions == [BLOCK * number for number in range(len(used))]


def test_attention_blocks_when_every_sample_needs_a_part_block_then_still_fit():
    """The table has room for the worst samples of its size."""
    spans = tuple(SampleRows(end - BLOCK - 1, end, 1) for end in range(BLOCK + 1, 4 * (BLOCK + 1) + 1, BLOCK + 1))
    lines = attention_blocks(spans, 4 * (BLOCK + 1), 4)
    assert (lines[:, 0] < lines[:, 2]).sum() == 8 <= len(lines)
