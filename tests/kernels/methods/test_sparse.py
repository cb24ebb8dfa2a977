"""Sparse differences to weights."""

from __future__ import annotations

import pytest
import torch
from other_slots import all_rows, table_of
from tables_fixture import NAN_SLOT, NUM_ROWS, rows_of

from weft.kernels.lora.tables import Site, SlotTable
from weft.kernels.methods import sparse
from weft.kernels.methods.parts import OtherParts, SparsePart
from weft.kernels.methods.sparse import (
    sparse_grad_kernel,
    sparse_grad_reference,
    sparse_input_kernel,
    sparse_input_reference,
    sparse_kernel,
    sparse_reference,
)

SITE = Site(0, (40, 9), 70, "both")


def part(size: int, number: int) -> SparsePart:
    """A difference on random positions; most of them are of few outputs."""
    weights = torch.linspace(1.0, 0.0, size)[:, None].expand(size, SITE.num_in).reshape(-1) ** 4 + 1e-3
    positions = torch.multinomial(weights, number).sort().values.to(torch.int32)
    outputs, inputs = positions // SITE.num_in, positions % SITE.num_in
    order, values = torch.argsort(inputs, stable=True), torch.randn(number)
    starts = [
        torch.searchsorted(ascending, torch.arange(most + 1, dtype=torch.int32), out_int32=True)
        for ascending, most in ((outputs, size), (inputs[order], SITE.num_in))
    ]
    grad = torch.randn(number)
    return SparsePart(outputs, inputs, values, grad, starts[0], starts[1], outputs[order], values[order])


def table() -> SlotTable:
    """Slots with a difference to both weights, to one, to the other, and to none."""
    torch.manual_seed(3)
    slots = [OtherParts(sparse=own) for own in ({0: part(40, 200), 1: part(9, 70)}, {1: part(9, 5)}, {0: part(40, 3)})]
    return table_of((SITE,), [*slots, OtherParts()])


def dense(slots: SlotTable, slot: int) -> torch.Tensor:
    """Δ of the whole site."""
    whole = torch.zeros(SITE.num_out, SITE.num_in)
    for module, own in slots.others.get(slot, OtherParts[int]()).sparse.items():
        whole[SITE.starts[module] + own.outputs_V.long(), own.inputs_V.long()] = own.values_V
    return whole


@pytest.mark.parametrize("run", [sparse_reference, sparse_kernel])
def test_sparse_when_slots_differ_then_adds_each_owners_product(run):
    """A NaN of a neighbour reaches no other slot."""
    slots, rows = table(), all_rows()
    x_TN, y_TN = torch.randn(NUM_ROWS, SITE.num_in), torch.randn(NUM_ROWS, SITE.num_out)
    x_TN[rows_of(NAN_SLOT)] = torch.nan
    expected_TN = y_TN.clone()
    for span in rows.spans:
        own = slice(span.start, span.end)
        expected_TN[own] += x_TN[own] @ dense(slots, span.slot).t()
    run(x_TN, y_TN, SITE, rows, slots)
    left = ~rows_of(NAN_SLOT) & ~rows_of(4)
    torch.testing.assert_close(y_TN[left], expected_TN[left], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("run", [sparse_input_reference, sparse_input_kernel])
def test_sparse_input_when_slots_differ_then_adds_each_owners_product(run):
    slots, rows = table(), all_rows()
    dy_TN, dx_TN = torch.randn(NUM_ROWS, SITE.num_out), torch.randn(NUM_ROWS, SITE.num_in)
    expected_TN = dx_TN.clone()
    for span in rows.spans:
        own = slice(span.start, span.end)
        expected_TN[own] += dy_TN[own] @ dense(slots, span.slot)
    run(dy_TN, dx_TN, SITE, rows, slots)
    torch.testing.assert_close(dx_TN, expected_TN, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("run", [sparse_grad_reference, sparse_grad_kernel])
def test_sparse_grad_when_slots_differ_then_adds_to_each_owners_gradients(run, monkeypatch):
    """A NaN of a neighbour reaches no other slot; with few programs, each takes several blocks."""
    monkeypatch.setattr(sparse, "NUM_PROGRAMS", 3)
    slots, rows = table(), all_rows()
    dy_TN, x_TN = torch.randn(NUM_ROWS, SITE.num_out), torch.randn(NUM_ROWS, SITE.num_in)
    dy_TN[rows_of(NAN_SLOT)] = torch.nan
    expected = {}
    for slot in (1, 3):
        whole = torch.zeros(SITE.num_out, SITE.num_in)
        for span in rows.by_slot()[slot]:
            whole += dy_TN[span.start : span.end].t() @ x_TN[span.start : span.end]
        for module, own in slots.others[slot].sparse.items():
            found = whole[SITE.starts[module] + own.outputs_V.long(), own.inputs_V.long()]
            expected[slot, module] = own.grad_V + found
    run(x_TN, dy_TN, SITE, rows, slots)
    for (slot, module), wanted in expected.items():
        torch.testing.assert_close(slots.others[slot].sparse[module].grad_V, wanted, rtol=1e-4, atol=1e-4)
