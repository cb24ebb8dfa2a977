"""Slots come out even, within windows and capacity, with and without each job's order."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.plan.pack.balance import Items, balance
from weft.plan.pack.packer import fill_in_order
from weft.plan.pack.types import RoundLimits


@st.composite
def cases(draw: st.DrawFn, max_items: int = 7) -> tuple[Items, int, int]:
    """Items with windows, number of slots, room."""
    num_slots = draw(st.integers(1, 3))
    num_jobs = draw(st.integers(1, 2))
    first = [draw(st.integers(0, num_slots - 1)) for _ in range(num_jobs)]
    last = [draw(st.integers(f, num_slots - 1)) for f in first]
    rest = draw(st.lists(st.integers(0, num_jobs - 1), max_size=max_items - num_jobs))
    job = np.array([*range(num_jobs), *rest])
    lengths = np.array([draw(st.integers(1, 24)) for _ in job])
    work = lengths + 0.01 * lengths**2
    return Items(lengths, work, job, np.array(first)[job], np.array(last)[job]), num_slots, 24


def taken(items: Items, slot: tuple[int, ...], q: int) -> int:
    return int(items.lengths[np.array(slot) == q].sum())


def by_force(items: Items, num_slots: int, room: int) -> float | None:
    """Least work of the largest slot, over all assignments."""
    best = None
    windows = [range(a, b + 1) for a, b in zip(items.first.tolist(), items.last.tolist(), strict=True)]
    for slot in itertools.product(*windows):
        if any(taken(items, slot, q) > room for q in range(num_slots)):
            continue
        largest = max(float(items.work[np.array(slot) == q].sum()) for q in range(num_slots))
        best = largest if best is None else min(best, largest)
    return best


def is_ordered(items: Items, slot: tuple[int, ...]) -> bool:
    return all((np.diff(np.array(slot)[items.job == j]) >= 0).all() for j in set(items.job.tolist()))


@pytest.mark.parametrize("keep_order", [False, True])
@settings(max_examples=40)
@given(case=cases())
def test_fill_when_it_finds_slots_then_windows_room_and_order_hold(keep_order, case):
    items, num_slots, room = case
    slot = fill_in_order(items, num_slots, RoundLimits(room)) if keep_order else balance(*case, 0.0)
    if slot is None:
        return
    assert ((items.first <= slot) & (slot <= items.last)).all()
    assert all(taken(items, tuple(slot), q) <= room for q in range(num_slots))
    assert not keep_order or is_ordered(items, tuple(slot))


@settings(max_examples=40)
@given(cases(max_items=6))
def test_balance_when_small_then_close_to_the_optimum(case):
    items, num_slots, _ = case
    best = by_force(*case)
    slot = balance(*case, 0.0)
    assert (slot is None) >= (best is None)
    if slot is not None:
        largest = max(float(items.work[slot == q].sum()) for q in range(num_slots))
        assert best <= largest * (1 + 1e-9)
        assert largest <= best * 1.2


def test_balance_when_many_samples_then_within_a_per_mille_of_even():
    rng = np.random.default_rng(0)
    lengths = np.rint(rng.lognormal(6.5, 0.6, 64)).astype(np.int64)
    zeros = np.zeros(64, dtype=np.int64)
    level = lengths.sum() / 8
    items = Items(lengths, lengths.astype(float), zeros, zeros, zeros + 7)
    slot = balance(items, 8, 10**6, level * 0.99)
    assert np.bincount(slot, weights=lengths).max() <= level * 1.001


def test_balance_when_the_room_is_filled_to_the_last_token_then_it_still_fits():
    lengths = np.array([10, 10, 8, 8, 6, 6, 11, 7, 6])
    zeros = np.zeros(9, dtype=np.int64)
    slot = balance(Items(lengths, lengths.astype(float), zeros, zeros, zeros + 2), 3, 24, 24.0)
    assert np.bincount(slot, weights=lengths).tolist() == [24, 24, 24]


def test_fill_in_order_when_equal_samples_of_two_jobs_then_slots_are_even():
    job = np.repeat([0, 1], 8)
    lengths = np.full(16, 3)
    slot = fill_in_order(
        Items(lengths, lengths.astype(float), job, job * 1, 3 + job * 0 - (1 - job)), 4, RoundLimits(24)
    )
    assert np.bincount(slot).tolist() == [4, 4, 4, 4]


def test_fill_in_order_when_rows_need_not_be_alike_then_fewer_stay_empty():
    """A slot may end a tile early or late where its last samples fill that one better."""
    tile, rng = 1024, np.random.default_rng(0)
    empty = {1.0: 0, 0.25: 0}
    for _ in range(10):
        lengths = np.rint(rng.lognormal(6.0, 0.9, 48)).clip(1, 4096).astype(np.int64)
        job = np.repeat([0, 1], 24)
        items = Items(lengths, lengths.astype(float), job, job * 0, job * 0 + 7)
        for unlike in empty:
            slot = fill_in_order(items, 8, RoundLimits(8192, row_tile=tile, unlike=unlike))
            tokens = np.bincount(slot, weights=lengths, minlength=8).astype(np.int64)
            assert (tokens <= 8192).all()
            empty[unlike] += int((-tokens % tile).sum())
    assert empty[0.25] < 0.9 * empty[1.0], empty
