"""Sums in any order on a GPU: no order of samples shows, whether words spill or not, and what was collected is gone."""

from __future__ import annotations

import pytest
import torch

from weft.kernels.fixed_point import Words, collect, total_of_words
from weft.kernels.lora.tables import Entry, SampleRows, Site, SlotTable, TableSizes, row_tables
from weft.kernels.lora.weight_grad import weight_grad_kernel

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")
RANK, LENGTH, NUM_OWNERS, NUM_SAMPLES = 16, 200, 3, 12
SITES = {"qkv": ((1024, 256, 256), 1024), "down": ((512,), 1800)}


def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator(GPU).manual_seed(sum(shape)), device=GPU).to(dtype)


def summed(order: list[int], sizes: tuple[int, ...], num_in: int, size: float, dropout: float) -> list[Words]:
    """The words of all owners, A and B in turn, with samples in an order."""
    site, width = Site(0, sizes, num_in, "site"), len(sizes) * RANK
    table, found = SlotTable((site,), GPU), []
    for _ in range(NUM_OWNERS):
        entries, words = (
            {},
            [Words.of_nothing(torch.empty(n, device=GPU)) for n in (width * num_in, site.num_out * RANK)],
        )
        for part, (start, outputs) in enumerate(zip(site.starts, sizes, strict=True)):
            shapes = (RANK, num_in), (outputs, RANK)
            weights, grads = (
                [torch.zeros(shape, dtype=d, device=GPU) for shape in shapes] for d in (torch.bfloat16, torch.float32)
            )
            own = words[0].part(part * RANK * num_in, shapes[0]), words[1].part(start * RANK, shapes[1])
            entries[part] = Entry(RANK, *weights, *grads, 2.0, dropout, 5 + part, *own)
        table.put(entries)
        found += words
    spans = [SampleRows(p * LENGTH, (p + 1) * LENGTH, 1 + s % NUM_OWNERS) for p, s in enumerate(order)]
    x_TD, dy_TO, s_TR = (drawn(NUM_SAMPLES, LENGTH, n)[order].reshape(-1, n) for n in (num_in, site.num_out, width))
    keys_T = torch.arange(NUM_SAMPLES * LENGTH, dtype=torch.int32, device=GPU).view(NUM_SAMPLES, -1)[order].reshape(-1)
    rows = row_tables(spans, TableSizes(NUM_SAMPLES * LENGTH, NUM_SAMPLES), keys_T)
    s_TR = (s_TR.float() * size).bfloat16()
    weight_grad_kernel(x_TD, s_TR, dy_TO, s_TR, site, rows, table)
    return found


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("size", [1e-6, 1e-2, 3.0])
@pytest.mark.parametrize("site", SITES)
def test_any_order_sums_when_samples_come_in_any_order_then_are_the_same_and_collected_once(site, size, dropout):
    orders = [list(range(NUM_SAMPLES)), list(range(NUM_SAMPLES))[::-1], torch.randperm(NUM_SAMPLES).tolist()]
    runs = [summed(order, *SITES[site], size, dropout) for order in orders]
    totals = [[total_of_words(words) for words in run] for run in runs]
    assert bool(runs[0][0].spilled_1) == (size > 1e-3) and all(total.any() for total in totals[0])
    for other in totals[1:]:
        assert all(a.equal(b) for a, b in zip(totals[0], other, strict=True))
    for words, total in zip(runs[0], totals[0], strict=True):
        grad_P = torch.ones_like(total)
        collect(words, grad_P)
        assert grad_P.equal(1 + total) and not any(w.any() for w in (words.fine_P, words.coarse_P, words.spilled_1))
