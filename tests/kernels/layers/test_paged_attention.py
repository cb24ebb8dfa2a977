"""Attention of single rows over keys in pages, kernel and reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from covering import each_pair

from weft.kernels.layers.attention import AttentionBlocks, attend_reference, attention_blocks
from weft.kernels.layers.paged_attention import PAGE, KeyTable, attend_pages_kernel, attend_pages_reference
from weft.kernels.lora.tables import SampleRows

RUNS = [attend_pages_reference, attend_pages_kernel]
LENGTHS = (1, PAGE, PAGE + 1, 150)
PAGES = ((5,), (2,), (7, 1), (3, 6, 4))
"""Pages of each sequence, in no order; what they do not hold is NaN."""


def expected(q_THC: torch.Tensor, samples: list[torch.Tensor], num_kv: int, window: int | None) -> torch.Tensor:
    """Each sequence's last row by `attend` over the whole of it."""
    outs = []
    for q_HC, kv_LE in zip(q_THC, samples, strict=True):
        length = len(kv_LE)
        k_LKC, v_LKC = (part.unflatten(1, (num_kv, -1)) for part in kv_LE.chunk(2, dim=1))
        spans = (SampleRows(0, length, 1),)
        blocks = AttentionBlocks(torch.from_numpy(attention_blocks(spans, length, 1)), spans)
        q_LHC = q_HC.expand(length, *q_HC.shape).contiguous()
        outs.append(attend_reference(q_LHC, k_LKC, v_LKC, blocks, 0.25, window)[0][-1])
    return torch.stack(outs)


@pytest.mark.parametrize(
    ("number", "heads", "window"), each_pair(range(len(RUNS)), [(4, 2, 16), (3, 1, 20), (2, 2, 64)], [None, 1, 70])
)
def test_attend_pages_when_keys_lie_in_pages_then_each_row_equals_its_sequence_alone(number, heads, window):
    num_q, num_kv, size = heads
    rows_PE = torch.full((8 * PAGE, 2 * num_kv * size), torch.nan)
    samples = [torch.randn(length, 2 * num_kv * size) for length in LENGTHS]
    pages_SN = torch.zeros((len(LENGTHS) + 1, 4), dtype=torch.int32)
    for index, (sample, pages) in enumerate(zip(samples, PAGES, strict=True)):
        pages_SN[index + 1, : len(pages)] = torch.tensor(pages)
        for start, page in zip(range(0, len(sample), PAGE), pages, strict=True):
            piece = sample[start : start + PAGE]
            rows_PE[page * PAGE : page * PAGE + len(piece)] = piece
    order = [3, 0, 2, 1]
    q_THC = torch.randn(len(order) + 1, num_q, size)
    table = KeyTable(
        pages_SN,
        torch.tensor([*(index + 1 for index in order), 0], dtype=torch.int32),
        torch.tensor([*(LENGTHS[index] for index in order), 0], dtype=torch.int32),
    )
    k_PKC, v_PKC = (part.unflatten(1, (num_kv, size)) for part in rows_PE.chunk(2, dim=1))
    with np.errstate(invalid="ignore"):
        out_THC = RUNS[number](q_THC, k_PKC, v_PKC, table, 0.25, window)
    whole_THC = expected(q_THC[:-1], [samples[index] for index in order], num_kv, window)
    torch.testing.assert_close(out_THC[:-1], whole_THC, rtol=1e-5, atol=2e-6)
