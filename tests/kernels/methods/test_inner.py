"""The non-linearity of bottlenecks in rank space."""

from __future__ import annotations

import pytest
import torch
from other_slots import all_rows, table_of
from tables_fixture import NAN_SLOT, NUM_ROWS, rows_of

from weft.kernels.lora.tables import Entry, Site, SlotTable
from weft.kernels.methods.inner import (
    activate_grad_kernel,
    activate_grad_reference,
    activate_kernel,
    activate_reference,
    bias_sums_kernel,
    bias_sums_reference,
)
from weft.kernels.methods.parts import ACTIVATIONS, InnerChange, OtherParts

SITE = Site(0, (16,), 16, "end")
SIZES = (72, 5, 16)
KERNELS = (activate_kernel, activate_grad_kernel, bias_sums_kernel)
REFERENCES = (activate_reference, activate_grad_reference, bias_sums_reference)


def table(activation: str) -> SlotTable:
    """Three slots with bottlenecks of several widths, and one with a LoRA there."""
    entries, slots = [], []
    for size in (*SIZES, 4):
        wide = -(-size // 8) * 8
        a_PD, b_OP, grads = torch.zeros(wide, 16), torch.zeros(16, wide), (torch.zeros(size, 16), torch.zeros(16, size))
        entries.append({0: Entry(size, a_PD, b_OP, *grads, 1.0, 0.0, 0)})
        inner = InnerChange(torch.randn(size), torch.randn(size), ACTIVATIONS[activation])
        slots.append(OtherParts(inner={0: inner}) if size in SIZES else OtherParts())
    return table_of((SITE,), slots, entries)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("runs", [REFERENCES, KERNELS], ids=["twins", "kernels"])
def test_activate_when_widths_differ_then_each_row_has_its_owners_function_and_gradient(runs, activation):
    """Autograd of f(S + bias) is the oracle; a NaN of one slot stays with it, and a LoRA's ranks are left alone."""
    torch.manual_seed(1)
    slots, rows = table(activation), all_rows()
    s_TR, ds_TR = (torch.randn(NUM_ROWS, slots.rank_class) for _ in range(2))
    s_TR[rows_of(NAN_SLOT)] = torch.nan
    a_TR, out_TR, da_TR = s_TR.clone(), torch.zeros_like(s_TR), ds_TR.clone()
    before = {slot: others.inner[0].grad_bias_W.clone() for slot, others in slots.others.items() if others.inner}
    runs[0](a_TR, out_TR, SITE, rows, slots)
    runs[1](da_TR, a_TR, SITE, rows, slots)
    runs[2](da_TR, SITE, rows, slots)
    for slot, size in enumerate(SIZES, start=1):
        if slot == NAN_SLOT:
            continue
        inner, own = slots.others[slot].inner[0], rows_of(slot)
        ins = s_TR[own, :size].clone().requires_grad_()
        bias = inner.bias_W.clone().requires_grad_()
        expected = getattr(torch.nn.functional, activation)(ins + bias)
        expected.backward(ds_TR[own, :size])
        assert ins.grad is not None and bias.grad is not None
        torch.testing.assert_close(out_TR[own, :size], expected.detach(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(da_TR[own, :size], ins.grad, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(inner.grad_bias_W, before[slot] + bias.grad, rtol=1e-4, atol=1e-4)
    assert torch.equal(a_TR[rows_of(4)], s_TR[rows_of(4)]) and torch.equal(da_TR[rows_of(4)], ds_TR[rows_of(4)])
