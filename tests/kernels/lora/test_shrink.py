"""From activations to rank space."""

from __future__ import annotations

import pytest
import torch
from tables_fixture import BARE, NAN_SLOT, SLOTS, WIDE_SLOTS, one_site, plain_drop, rows_of

from weft.kernels.lora.shrink import shrink_grad_kernel, shrink_grad_reference, shrink_kernel, shrink_reference
from weft.kernels.lora.tables import padded

CASES = {"three": ((24, 8, 130), SLOTS), "two": ((20, 9), SLOTS), "one": ((7,), SLOTS), "wide": ((9, 8, 7), WIDE_SLOTS)}
FORWARD = [shrink_reference, shrink_kernel]
BACKWARD = [shrink_grad_reference, shrink_grad_kernel]


@pytest.mark.parametrize(("sizes", "slots"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("run", FORWARD)
def test_shrink_when_slots_differ_then_gives_each_row_its_owners_product(run, sizes, slots):
    """Each part's columns hold drop(x) Aᵀ and its padding zeros."""
    setting = one_site(sizes, 133, slots=slots)
    site, rows, table = setting.sites[0], setting.rows, setting.table
    x_TD, s_TR = setting.random(128, 133), setting.empty_ranks(site)
    run(x_TD, s_TR, site, rows, table)
    for span in rows.spans:
        own = slice(span.start, span.end)
        for column, rank, entry in table.columns(span.slot, site):
            if entry is not None:
                dropped_LD = plain_drop(x_TD[own].double(), entry, rows.keys_T[own])
                expected_LR = dropped_LD @ entry.a_PD[:rank].double().t()
                torch.testing.assert_close(
                    s_TR[own, column : column + rank].double(), expected_LR, rtol=1e-5, atol=1e-5
                )
                assert (s_TR[own, column + rank : column + padded(rank)] == 0).all()
    assert s_TR[75:80].isnan().all(), "rows without an adapter are left alone"


@pytest.mark.parametrize(("sizes", "slots"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("run", BACKWARD)
def test_shrink_grad_when_slots_differ_then_gives_each_row_its_owners_product(run, sizes, slots):
    """Each part's columns hold dy B of that part's outputs and its padding zeros."""
    setting = one_site(sizes, 40, slots=slots)
    site, rows, table = setting.sites[0], setting.rows, setting.table
    dy_TO, ds_TR = setting.random(128, sum(sizes)), setting.empty_ranks(site)
    run(dy_TO, ds_TR, site, rows, table)
    for span in rows.spans:
        own = slice(span.start, span.end)
        found = zip(site.starts, sizes, table.columns(span.slot, site), strict=True)
        for begin, size, (column, rank, entry) in found:
            if entry is not None:
                expected_LR = dy_TO[own, begin : begin + size].double() @ entry.b_OP[:, :rank].double()
                torch.testing.assert_close(
                    ds_TR[own, column : column + rank].double(), expected_LR, rtol=1e-5, atol=1e-5
                )
                assert (ds_TR[own, column + rank : column + padded(rank)] == 0).all()


@pytest.mark.parametrize("run", FORWARD + BACKWARD)
def test_shrink_when_a_neighbour_is_nan_then_changes_no_bit_of_others(run):
    """NaN weights and rows of one slot stay in its own rows."""
    outs = []
    for nan_slot in (BARE, NAN_SLOT):
        torch.manual_seed(5)
        setting = one_site((24, 16, 8), 48, nan_slot=nan_slot)
        x_TD = setting.random(128, 48)
        if nan_slot:
            x_TD[rows_of(NAN_SLOT)] = torch.nan
        outs.append(setting.empty_ranks(setting.sites[0]))
        run(x_TD, outs[-1], setting.sites[0], setting.rows, setting.table)
    mine_T = ~rows_of(NAN_SLOT)
    same = (outs[0] == outs[1]) | (outs[0].isnan() & outs[1].isnan())
    assert same[mine_T].all()
    assert outs[0][rows_of(3), :16].isfinite().all() and outs[1][rows_of(NAN_SLOT)].isnan().all()


@pytest.mark.parametrize("run", FORWARD)
def test_shrink_when_nothing_may_drop_then_reads_the_whole_input(run):
    """In evaluation dropout does not apply, whatever the adapters' settings."""
    setting = one_site((24, 8), 40, slots=SLOTS, drops=False)
    site, rows, table = setting.sites[0], setting.rows, setting.table
    x_TD, s_TR = setting.random(128, 40), setting.empty_ranks(site)
    run(x_TD, s_TR, site, rows, table)
    entry = table.entry(NAN_SLOT, 0)
    assert entry is not None and entry.dropout > 0
    expected_LR = x_TD[1:71].double() @ entry.a_PD.double().t()
    torch.testing.assert_close(s_TR[1:71, : entry.rank].double(), expected_LR, rtol=1e-5, atol=1e-5)
