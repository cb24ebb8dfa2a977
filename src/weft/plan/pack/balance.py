"""Even microbatches: assigns samples to a fixed number of slots so that the largest slot costs least.

Problem: min max_q Σ_{i in q} work_i, subject to each sample in one slot of its job's window [first, last] and the
tokens of every slot ≤ room. Longest work first into the least loaded slot, then moves and swaps between the
largest slot and the others, best first, until within the tolerance of the bound or no pair helps. O(n · slots) and
O(n²/slots) per exchange. Tests compare with brute force on small instances; the caller holds the lower bound.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weft.plan.pack.bins import subset
from weft.plan.pack.types import TOLERANCE

Whole = npt.NDArray[np.int64]
Real = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

MAX_SWEEPS = 200
"""Limit far above what is needed (about 6 for 64 samples in 9 slots)."""
NUM_KICKS = 12
"""Random restarts near the best filling, for the few rounds that are not even at once."""
_KICK_MOVES = 8
_UNITS = 4096
"""Resolution of even splits; finer than any cost model."""
_CHECKED = 64
"""Best exchanges tried in one sweep."""
_SEED = 20260104


@dataclass(frozen=True)
class Items:
    lengths: Whole
    work: Real
    job: Whole
    first: Whole
    last: Whole


@dataclass
class _Slots:
    items: Items
    room: int
    slot: Whole
    taken: list[int]
    sizes: list[int]
    """Lengths of the items as a list, which is faster item by item."""

    def put(self, i: int, q: int) -> None:
        old = int(self.slot[i])
        if old >= 0:
            self.taken[old] -= self.sizes[i]
        self.taken[q] += self.sizes[i]
        self.slot[i] = q


def balance(items: Items, num_slots: int, room: int, level: float) -> Whole | None:
    """The slot of every sample, or None if they do not fit. The search ends close to the level."""
    slot = np.full(len(items.lengths), -1, dtype=np.int64)
    slots = _Slots(items, room, slot, [0] * num_slots, items.lengths.tolist())
    _longest_first(slots)
    rng = np.random.default_rng(_SEED)
    best: tuple[float, Whole] | None = None
    for kick in range(NUM_KICKS + 1):
        if kick:
            _kick(slots, rng, best and best[1])
        if max(slots.taken) > room:
            _exchange(slots, items.lengths.astype(np.float64), 0.0, may_overflow=True)
        if max(slots.taken) > room:
            continue
        _exchange(slots, items.work, level * (1 + TOLERANCE / 4), may_overflow=False)
        largest = _largest(slots, items.work)
        if best is None or largest < best[0]:
            best = largest, slots.slot.copy()
        if best[0] <= level * (1 + TOLERANCE * 0.9):
            break
    return best and best[1]


def _largest(slots: _Slots, work: Real) -> float:
    """Work of the largest slot with more than one sample; a single sample cannot be evened out."""
    load_Q = np.bincount(slots.slot, weights=work, minlength=len(slots.taken))
    is_shared = np.bincount(slots.slot, minlength=len(slots.taken)) > 1
    return float(load_Q.max(where=is_shared, initial=0.0))


def _kick(slots: _Slots, rng: np.random.Generator, start: Whole | None) -> None:
    """Moves a few samples anywhere in their windows, from the best filling so far if there is one."""
    if start is not None:
        for i in np.flatnonzero(slots.slot != start).tolist():
            slots.put(i, int(start[i]))
    for i in rng.integers(0, len(slots.slot), _KICK_MOVES).tolist():
        slots.put(i, int(rng.integers(slots.items.first[i], slots.items.last[i] + 1)))


def _longest_first(slots: _Slots) -> None:
    items = slots.items
    load = [0.0] * len(slots.taken)
    first, last, work = items.first.tolist(), items.last.tolist(), items.work.tolist()
    for i in np.argsort(-items.work, kind="stable").tolist():
        n = slots.sizes[i]
        # A slot that overflows is the last resort; exchanges repair it.
        q = min(range(first[i], last[i] + 1), key=lambda q: (slots.taken[q] + n > slots.room, load[q]))
        slots.put(i, q)
        load[q] += work[i]


def _exchange(slots: _Slots, work: Real, good_enough: float, *, may_overflow: bool) -> None:
    """Evens out the slots by moves and swaps, that with the greatest gain first."""
    items = slots.items
    numbers = np.arange(len(slots.taken))
    may_IQ = (items.first[:, None] <= numbers) & (numbers <= items.last[:, None])
    for _ in range(MAX_SWEEPS):
        if may_overflow and max(slots.taken) <= slots.room:
            return
        if not may_overflow and _largest(slots, work) <= good_enough:
            return
        if not _sweep(slots, work, may_IQ, may_overflow=may_overflow) and not _split_again(
            slots, work, may_IQ, may_overflow=may_overflow
        ):
            return


def _sweep(slots: _Slots, work: Real, may_IQ: Mask, *, may_overflow: bool) -> bool:
    """Applies the moves and swaps that lower the sum of squared loads most, one per slot; False if none does."""
    slot, num, lengths = slots.slot.copy(), len(work), slots.items.lengths
    load_Q = np.bincount(slot, weights=work, minlength=may_IQ.shape[1])
    # Columns: swap with sample k, or move to slot q. Sample i gives `change` to the slot there.
    target = np.concatenate([slot, np.arange(len(load_Q))])
    change = work[:, None] - np.concatenate([work, np.zeros(len(load_Q))])
    gain = change * (load_Q[slot][:, None] - load_Q[target] - change)
    may_swap = may_IQ[:, slot]
    fits = np.concatenate([may_swap & may_swap.T, may_IQ], axis=1) & (slot[:, None] != target) & (change > 0)
    if not may_overflow:
        shift = lengths[:, None] - np.concatenate([lengths, np.zeros(len(load_Q), dtype=np.int64)])
        free = slots.room - np.array(slots.taken)
        fits &= (shift <= free[target]) & (-shift <= free[slot][:, None])
    least = 1e-9 * float(load_Q.max()) ** 2
    flat = np.where(fits, gain, 0.0).ravel()
    found = np.flatnonzero(flat > least)
    if len(found) > _CHECKED:
        found = found[flat[found] >= np.partition(flat[found], -_CHECKED)[-_CHECKED]]
    touched: set[int] = set()
    for index in found[np.argsort(-flat[found], kind="stable")].tolist():
        i, column = divmod(index, len(target))
        p, q = int(slot[i]), int(target[column])
        # Gains between unchanged slots are still right.
        if p in touched or q in touched:
            continue
        if _apply(slots, i, column if column < num else None, q, may_overflow=may_overflow):
            touched |= {p, q}
    return bool(touched)


def _split_again(slots: _Slots, work: Real, may_IQ: Mask, *, may_overflow: bool) -> bool:
    """Divides the samples of the largest slot and one other evenly, by subset sums; False if no other slot helps."""
    load_Q = np.bincount(slots.slot, weights=work, minlength=may_IQ.shape[1])
    if may_overflow:
        top = int(np.argmax(slots.taken))
    else:
        is_shared = np.bincount(slots.slot, minlength=len(load_Q)) > 1
        top = int(np.where(is_shared, load_Q, -1.0).argmax())
    units = np.rint(work * (_UNITS / load_Q[top])).astype(np.int64)
    for q in np.argsort(load_Q, kind="stable").tolist():
        own = np.flatnonzero((slots.slot == top) | (slots.slot == q))
        is_free = may_IQ[own, top] & may_IQ[own, q]
        stays = int(units[own[~is_free & (slots.slot[own] == top)]].sum())
        half = (int(units[own].sum()) + 1) // 2
        if q == top or stays >= half:
            continue
        free = own[is_free]
        chosen = free[subset([int(n) for n in units[free]], half - stays)]
        old = slots.slot.copy()
        before = load_Q[top], max(slots.taken[top], slots.taken[q])
        inside = set(chosen.tolist())
        for i in free.tolist():
            slots.put(i, top if i in inside else q)
        after = np.bincount(slots.slot, weights=work, minlength=len(load_Q))[[top, q]].max()
        taken = max(slots.taken[top], slots.taken[q])
        if (taken < before[1]) if may_overflow else (taken <= slots.room and after < before[0] * (1 - 1e-6)):
            return True
        for i in free.tolist():
            slots.put(i, int(old[i]))
    return False


def _apply(slots: _Slots, i: int, k: int | None, q: int, *, may_overflow: bool) -> bool:
    """Moves i to slot q, and k (if any) the other way; False, without a change, if there is no room."""
    p = int(slots.slot[i])
    more = slots.sizes[i] - (0 if k is None else slots.sizes[k])
    into, left = slots.taken[q] + more, slots.taken[p] - more
    if max(into, left) > max(slots.room, (max(slots.taken[p], slots.taken[q]) - 1) * may_overflow):
        return False
    slots.put(i, q)
    if k is not None:
        slots.put(k, p)
    return True
