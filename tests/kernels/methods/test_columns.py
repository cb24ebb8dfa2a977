"""Factors and shifts of columns."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from other_slots import all_rows, table_of
from tables_fixture import NAN_SLOT, NUM_ROWS, rows_of

from weft.kernels.lora.tables import INPUTS, OUTPUTS, Site, SlotTable
from weft.kernels.methods import columns
from weft.kernels.methods.columns import (
    change_columns_kernel,
    change_columns_reference,
    column_sums_kernel,
    column_sums_reference,
    owned_copy_kernel,
)
from weft.kernels.methods.parts import ColumnChange, OtherParts

SITE = Site(0, (300, 9), 70, "both")
FIELDS = {"outputs": OUTPUTS, "inputs": INPUTS}


def changes(size: int, seed: int) -> ColumnChange:
    generator = torch.Generator().manual_seed(seed)
    return ColumnChange(*(torch.randn(size, generator=generator) for _ in range(4)))


def factors(size: int, seed: int) -> ColumnChange:
    own = changes(size, seed)
    return ColumnChange(own.factor_N, None, own.grad_factor_N, None)


def table() -> SlotTable:
    """Slots that change both parts of the outputs, one of them, the inputs, and nothing."""
    slots = [
        OtherParts({0: changes(300, 1), 1: factors(9, 2)}, {0: factors(70, 3)}),
        OtherParts({1: changes(9, 4)}),
        OtherParts({0: ColumnChange(shift_N=torch.ones(300), grad_shift_N=torch.zeros(300))}, {0: changes(70, 5)}),
        OtherParts(),
    ]
    return table_of((SITE,), slots)


def width(field: int) -> int:
    return SITE.num_out if field == OUTPUTS else SITE.num_in


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("field", FIELDS.values(), ids=FIELDS)
@pytest.mark.parametrize("shifts", [True, False])
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("run", [change_columns_reference, change_columns_kernel])
def test_change_columns_when_slots_differ_then_changes_each_row_as_its_owner_wants(run, in_place, shifts, field, dtype):
    """Rows without an owner, and of owners that change nothing there, stay as they are; NaN too."""
    x_TN = torch.randn(NUM_ROWS, width(field)).to(dtype)
    x_TN[rows_of(4)] = torch.nan
    rows, slots = all_rows(), table()
    expected_TN = x_TN.clone()
    for span in rows.spans:
        for start, size, change in slots.changes(span.slot, SITE, field):
            own = slice(span.start, span.end), slice(start, start + size)
            factor = 1.0 if change.factor_N is None else change.factor_N
            shift = 0.0 if change.shift_N is None or not shifts else change.shift_N
            expected_TN[own] = (x_TN[own].float() * factor + shift).to(dtype)
    out_TN = x_TN if in_place else torch.full_like(x_TN, 7.0)
    run(x_TN, out_TN, SITE, rows, slots, field, shifts)
    # Triton's interpreter cuts off where a GPU rounds.
    torch.testing.assert_close(out_TN, expected_TN, rtol=0 if dtype is torch.float32 else 2**-7, atol=0, equal_nan=True)


@pytest.mark.parametrize("field", FIELDS.values(), ids=FIELDS)
@pytest.mark.parametrize("run", [column_sums_reference, column_sums_kernel])
def test_column_sums_when_slots_differ_then_adds_to_each_owners_gradients(run, field, monkeypatch):
    """A neighbour's NaN reaches no other slot; with few programs, each takes several blocks."""
    monkeypatch.setattr(columns, "NUM_PROGRAMS", 3)
    dy_TN, x_TN = torch.randn(NUM_ROWS, width(field)), torch.randn(NUM_ROWS, width(field))
    dy_TN[rows_of(NAN_SLOT)] = torch.nan
    rows, slots = all_rows(), table()
    expected = gradients(slots)
    for span in rows.spans:
        for start, size, change in slots.changes(span.slot, SITE, field):
            own = slice(span.start, span.end), slice(start, start + size)
            for grad, summed in (
                (change.grad_factor_N, (dy_TN[own] * x_TN[own]).sum(dim=0)),
                (change.grad_shift_N, dy_TN[own].sum(dim=0)),
            ):
                if grad is not None:
                    expected[grad.data_ptr()] += summed
    run(dy_TN, x_TN, SITE, rows, slots, field)
    assert_gradients(slots, expected)


@pytest.mark.parametrize("run", [column_sums_reference, column_sums_kernel])
def test_column_sums_when_only_what_was_made_is_there_then_finds_the_same(run, monkeypatch):
    """Dividing by the factor gives what the inputs would have given; a factor of 0 gets nothing."""
    monkeypatch.setattr(columns, "NUM_PROGRAMS", 3)
    dy_TN, x_TN = torch.randn(NUM_ROWS, SITE.num_out), torch.randn(NUM_ROWS, SITE.num_out)
    rows, slots, plain = all_rows(), table(), table()
    for own in (slots, plain):
        change = own.others[1].outputs[0]
        assert change.factor_N is not None
        change.factor_N[7] = 0.0
    column_sums_reference(dy_TN, x_TN, SITE, rows, plain, OUTPUTS)
    made_TN = torch.empty_like(x_TN)
    change_columns_reference(x_TN, made_TN, SITE, rows, slots, OUTPUTS)
    before = slots.others[1].outputs[0].grad_factor_N
    assert before is not None
    kept = float(before[7])
    run(dy_TN, made_TN, SITE, rows, slots, OUTPUTS, True)
    assert float(before[7]) == kept
    assert_gradients(slots, gradients(plain, like=slots), but=7)


def test_owned_copy_when_slots_change_something_then_has_their_rows():
    x_TN = torch.randn(NUM_ROWS, SITE.num_out)
    found_TN = owned_copy_kernel(x_TN, SITE, all_rows(), table(), OUTPUTS)
    assert torch.equal(found_TN[rows_of(1)], x_TN[rows_of(1)])
    assert torch.equal(found_TN[rows_of(3), :300], x_TN[rows_of(3), :300])


def test_change_when_it_keeps_what_was_there_then_has_the_owners_rows():
    x_TN, kept_TN = torch.randn(NUM_ROWS, SITE.num_out), torch.zeros(NUM_ROWS, SITE.num_out)
    before_TN = x_TN.clone()
    change_columns_kernel(x_TN, x_TN, SITE, all_rows(), table(), OUTPUTS, kept_TN=kept_TN)
    changed = x_TN != before_TN
    assert changed.any() and torch.equal(kept_TN[changed], before_TN[changed])
    assert torch.equal(kept_TN[rows_of(1)], before_TN[rows_of(1)])


def gradients(slots: SlotTable, like: SlotTable | None = None) -> dict[int, torch.Tensor]:
    """Copies of all gradients, by the addresses of those of `like`."""
    pairs = zip(_all(slots), _all(like or slots), strict=True)
    return {other.data_ptr(): own.clone() for own, other in pairs}


def assert_gradients(slots: SlotTable, expected: dict[int, torch.Tensor], but: int | None = None) -> None:
    for grad in _all(slots):
        left = torch.ones(len(grad), dtype=torch.bool)
        if but is not None and but < len(grad):
            left[but] = False
        wanted = expected[grad.data_ptr()]
        assert torch.allclose(grad[left], wanted[left], rtol=1e-4, atol=1e-4, equal_nan=True)


def _all(slots: SlotTable) -> list[torch.Tensor]:
    found = [c for others in slots.others.values() for c in (*others.outputs.values(), *others.inputs.values())]
    each: Callable[[ColumnChange], tuple[torch.Tensor | None, ...]] = lambda c: (c.grad_factor_N, c.grad_shift_N)  # noqa: E731
    return [grad for change in found for grad in each(change) if grad is not None]
