"""Rows in front of samples that an adapter fills."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from other_slots import all_rows, table_of
from tables_fixture import NUM_ROWS

from weft.kernels.lora.tables import Site
from weft.kernels.methods.leading_rows import (
    put_rows_kernel,
    put_rows_reference,
    rows_grad_kernel,
    rows_grad_reference,
)
from weft.kernels.methods.parts import LeadingRows, OtherParts

SITE, MODULE, WIDTH = Site(0, (8,), 8), 1, 150
NUMBERS = (1, 40, 17)
"""Rows of each slot; no sample is shorter."""


def slots() -> list[OtherParts[int]]:
    torch.manual_seed(2)
    own = [LeadingRows(torch.randn(number, WIDTH), torch.randn(number, WIDTH)) for number in NUMBERS]
    return [*(OtherParts(rows={MODULE: rows}) for rows in own), OtherParts()]


@pytest.mark.parametrize("run", [put_rows_reference, put_rows_kernel])
def test_put_rows_when_slots_differ_then_every_sample_begins_with_its_owners_rows(run):
    parts, rows = slots(), all_rows()
    table = table_of((SITE,), parts, row_sites={MODULE: "rows"})
    x_TN = torch.randn(NUM_ROWS, WIDTH + 10)
    expected_TN = x_TN.clone()
    for span in rows.spans:
        own = parts[span.slot - 1].rows.get(MODULE) if span.slot else None
        if own is not None:
            expected_TN[span.start : span.start + len(own.rows_VN), 10:] = own.rows_VN
    run(x_TN[:, 10:], MODULE, rows, table)
    assert torch.equal(x_TN, expected_TN)


@pytest.mark.parametrize("clears", [True, False])
@pytest.mark.parametrize("with_kernel", [True, False])
def test_rows_grad_when_slots_differ_then_adds_what_arrives_at_their_rows(with_kernel, clears):
    """Of a part of the columns; what has been added may be cleared."""
    offset, width = 30, 100
    run: Callable[..., None] = partial(rows_grad_kernel, whole=WIDTH) if with_kernel else rows_grad_reference
    parts, rows = slots(), all_rows()
    table = table_of((SITE,), parts, row_sites={MODULE: "rows"})
    dx_TN = torch.randn(NUM_ROWS, width)
    before_TN, expected = dx_TN.clone(), [own.rows[MODULE].grad_VN.clone() for own in parts if own.rows]
    left_TN = dx_TN.clone()
    for span in rows.spans:
        if span.slot and parts[span.slot - 1].rows:
            own = slice(span.start, span.start + NUMBERS[span.slot - 1])
            expected[span.slot - 1][:, offset : offset + width] += before_TN[own]
            left_TN[own] = 0.0 if clears else left_TN[own]
    run(dx_TN, offset=offset, module=MODULE, rows=rows, table=table, clears=clears)
    assert torch.equal(dx_TN, left_TN)
    for own, wanted in zip(parts, expected, strict=False):
        torch.testing.assert_close(own.rows[MODULE].grad_VN, wanted)
