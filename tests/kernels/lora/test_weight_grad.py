"""Gradients of A and B."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tables_fixture import BARE, NAN_SLOT, SLOTS, WIDE_SLOTS, Setting, one_site, plain_drop, rows_of

import weft.kernels.lora.weight_grad as module
from weft.kernels.fixed_point import Words, total_of_words
from weft.kernels.lora.weight_grad import weight_grad_kernel, weight_grad_reference

CASES = {"three": ((24, 8, 72), SLOTS), "two": ((20, 9), SLOTS), "one": ((7,), SLOTS), "wide": ((9, 8, 7), WIDE_SLOTS)}
RUNS = [weight_grad_reference, weight_grad_kernel]


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch):
    # Fewer than there are items, so that each takes several, and as the interpreter is slow.
    monkeypatch.setattr(module, "NUM_PROGRAMS", 3)


def gradients(setting: Setting) -> dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]]:
    return {
        (slot, number): (entry.grad_a_RD, entry.grad_b_OR)
        for slot, entries in setting.table.entries.items()
        for number, entry in entries.items()
    }


@pytest.mark.parametrize(("sizes", "slots"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("run", RUNS)
def test_weight_grad_when_slots_differ_then_adds_each_owners_sums(run, sizes, slots):
    """dSᵀ drop(x) and scale · dyᵀ S over the owner's rows are added to what was there."""
    setting = one_site(sizes, 70, slots=slots)
    site, rows, table = setting.sites[0], setting.rows, setting.table
    x_TD, dy_TO = setting.random(128, 70), setting.random(128, sum(sizes))
    s, ds = setting.delta(site), setting.delta(site)
    before = {key: (a.clone(), b.clone()) for key, (a, b) in gradients(setting).items()}
    run(x_TD, s.s_TR, dy_TO, ds.s_TR, site, rows, table)
    for (slot, number), (grad_a_RD, grad_b_OR) in gradients(setting).items():
        column, rank, entry = table.columns(slot, site)[number]
        begin = site.starts[number]
        a_RD, b_OR = (grad.double() for grad in before[slot, number])
        assert entry is not None
        for span in (span for span in rows.spans if span.slot == slot):
            own = slice(span.start, span.end)
            x_LD = plain_drop(x_TD[own].double(), entry, rows.keys_T[own])
            a_RD += ds.s_TR[own, column : column + rank].double().t() @ x_LD
            dy_LO = dy_TO[own, begin : begin + sizes[number]].double()
            b_OR += entry.scale * dy_LO.t() @ s.s_TR[own, column : column + rank].double()
        torch.testing.assert_close(grad_a_RD.double(), a_RD, rtol=1e-5, atol=3e-5)
        torch.testing.assert_close(grad_b_OR.double(), b_OR, rtol=1e-5, atol=3e-5)


@pytest.mark.parametrize("run", RUNS)
def test_weight_grad_when_a_neighbour_is_nan_then_changes_no_bit_of_others(run):
    """NaN rows of one slot and of no slot reach no other slot's gradients."""
    found = []
    for poisoned in (False, True):
        torch.manual_seed(5)
        setting = one_site((24, 16, 8), 48)
        site = setting.sites[0]
        tensors = [setting.random(128, 48), setting.delta(site).s_TR, setting.random(128, 48), setting.delta(site).s_TR]
        if poisoned:
            for tensor in tensors:
                tensor[rows_of(NAN_SLOT) | rows_of(BARE)] = torch.nan
        run(*tensors, site, setting.rows, setting.table)
        found.append(gradients(setting))
    for key, (a_RD, b_OR) in found[0].items():
        if key[0] == NAN_SLOT:
            assert found[1][key][0].isnan().any()
        else:
            assert a_RD.equal(found[1][key][0]) and b_OR.equal(found[1][key][1])
            assert a_RD.isfinite().all() and b_OR.isfinite().all()


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("frozen", [1, 3])
def test_weight_grad_when_an_adapters_a_is_frozen_then_all_other_gradients_are_the_same(run, frozen):
    """It has no gradient to add to, whether its modules are summed as one matrix or apart."""
    found = []
    for is_frozen in (False, True):
        torch.manual_seed(5)
        setting = one_site((24, 16), 48)
        site, table = setting.sites[0], setting.table
        tensors = [setting.random(128, 48), setting.delta(site).s_TR, setting.random(128, 40), setting.delta(site).s_TR]
        if is_frozen:
            entries = {number: replace(e, grad_a_RD=torch.empty(0)) for number, e in table.entries[frozen].items()}
            table.remove(frozen)
            assert table.put(entries) == frozen
        run(*tensors, site, setting.rows, table)
        found.append(gradients(setting))
    for key, (a_RD, b_OR) in found[0].items():
        assert b_OR.equal(found[1][key][1])
        assert key[0] == frozen or a_RD.equal(found[1][key][0])


@pytest.mark.parametrize("run", RUNS)
def test_weight_grad_when_a_slot_has_no_rows_then_leaves_its_gradients(run):
    """A slot that is in the table and not in the microbatch keeps every bit."""
    setting = one_site((24, 16), 48, slots=(*SLOTS, SLOTS[0]))
    site = setting.sites[0]
    before_RD = gradients(setting)[5, 0][0].clone()
    s = setting.delta(site)
    run(setting.random(128, 48), s.s_TR, setting.random(128, 40), s.s_TR, site, setting.rows, setting.table)
    assert gradients(setting)[5, 0][0].equal(before_RD)


def test_weight_grad_kernel_when_rows_do_not_drop_then_nothing_is_dropped():
    found = []
    for run in RUNS:
        torch.manual_seed(5)
        setting = one_site((24, 8), 70, drops=False)
        site, rows, table = setting.sites[0], setting.rows, setting.table
        x_TD, dy_TO, s_TR = setting.random(128, 70), setting.random(128, 32), setting.delta(site).s_TR
        run(x_TD, s_TR, dy_TO, s_TR, site, rows, table)
        found.append([grad for pair in gradients(setting).values() for grad in pair])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=3e-5)


def with_words(setting: Setting) -> list[Words]:
    """Lets every other slot have free sums; returns all words."""
    found: list[Words] = []
    for slot, entries in list(setting.table.entries.items()):
        if slot % 2:
            # Those of A lie one after another, as the gradients do.
            grads = [entry.grad_a_RD for entry in entries.values()]
            flat, start = Words.of_nothing(torch.empty(sum(grad.numel() for grad in grads))), 0
            free = {}
            for number, entry in entries.items():
                words = [flat.part(start, entry.grad_a_RD.shape), Words.of_nothing(entry.grad_b_OR)]
                start += entry.grad_a_RD.numel()
                free[number] = replace(entry, words_a=words[0], words_b=words[1])
                found += words
            setting.table.remove(slot)
            assert setting.table.put(free) == slot
    return found


@pytest.mark.parametrize(("sizes", "slots"), [CASES["three"], CASES["wide"]], ids=["three", "wide"])
def test_weight_grad_when_some_sums_are_free_then_words_hold_what_is_added_and_others_have_the_bits_they_had(
    sizes, slots
):
    """The kernel's words come to the reference's sums; gradients of slots with ordered sums do not notice."""
    totals, grads = [], []
    for run, is_any_order in ((weight_grad_reference, True), (weight_grad_kernel, True), (weight_grad_kernel, False)):
        torch.manual_seed(0)
        setting = one_site(sizes, 70, slots=slots)
        site = setting.sites[0]
        x_TD, dy_TO = setting.random(128, 70), setting.random(128, sum(sizes))
        s, ds = setting.delta(site), setting.delta(site)
        before = {key: [each.clone() for each in own] for key, own in gradients(setting).items()}
        words = with_words(setting) if is_any_order else []
        run(x_TD, s.s_TR, dy_TO, ds.s_TR, site, setting.rows, setting.table)
        totals.append([total_of_words(each) for each in words])
        grads.append(gradients(setting))
        if is_any_order:
            for (slot, number), own in grads[-1].items():
                assert slot % 2 == 0 or all(a.equal(b) for a, b in zip(own, before[slot, number], strict=True))
    assert any(total.any() for total in totals[0])
    for own, other in zip(totals[0], totals[1], strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=3e-5)
    for key in (key for key in grads[1] if key[0] % 2 == 0):
        assert all(a.equal(b) for a, b in zip(grads[1][key], grads[2][key], strict=True))
