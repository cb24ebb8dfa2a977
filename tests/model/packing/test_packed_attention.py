"""Attention of packed samples through the kernels that a GPU takes, against the segments one by one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from weft.adapters.routing import Routing, Rows
from weft.kernels.layers.attention import AttentionBlocks, attention_blocks
from weft.kernels.lora.tables import BARE, SampleRows
from weft.model.packing.attention import packed_attention

NUM_ROWS, SEGMENTS = 160, (Rows(0, 100), Rows(100, 131))


def gradients(routing: Routing, window: int | None) -> list[torch.Tensor]:
    """The output, and the gradients of q, k and v; all in bfloat16, which kernels take."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, heads, NUM_ROWS, 16, generator=generator).bfloat16().requires_grad_() for heads in (4, 2, 2)
    )
    output, _ = packed_attention(SimpleNamespace(weft_routing=routing), q, k, v, None, sliding_window=window)
    (output.float() * torch.linspace(-1, 1, NUM_ROWS)[None, :, None, None]).sum().backward()
    return [output.detach(), *(x.grad for x in (q, k, v))]


@pytest.mark.parametrize("window", [None, 40])
def test_kernels_when_samples_are_packed_then_each_attends_as_by_itself(window):
    spans = tuple(SampleRows(rows.start, rows.end, BARE) for rows in SEGMENTS)
    blocks = AttentionBlocks(torch.from_numpy(attention_blocks(spans, NUM_ROWS, len(spans))), spans)
    by_kernel = gradients(Routing(segments=SEGMENTS, blocks=blocks), window)
    one_by_one = gradients(Routing(segments=SEGMENTS), window)
    for found, expected in zip(by_kernel, one_by_one, strict=True):
        torch.testing.assert_close(found, expected, atol=0.02, rtol=0.02)
    assert not by_kernel[0][0, 131:].any() and not by_kernel[1][0, :, 131:].any(), "padding rows are zero"
