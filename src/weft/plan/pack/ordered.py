"""Even microbatches without changing any job's order: planners choose cut points and neighbours, not the order.

Problem: min max_q work(q), subject to the capacity, the jobs' windows, and sample i of a job in no later slot than its
sample i + 1. Slots are filled one after another. For each, how many of its next samples every job gives is chosen such
that the larger of two is smallest: this slot's work, and the level the slots after it need at least (for every deadline
e, the work of the jobs whose windows end by e, shared by the slots up to e). O(slots · MAX_COMBINATIONS · jobs).

Where rows are computed in whole tiles, a slot costs its tiles however few tokens the last one has. Then the choice is
what leaves fewest rows empty, near the number of tiles that the slots need on average, as long as no slot behind it
will need more than it can hold.
"""

from __future__ import annotations

import numpy as np

from weft.plan.pack.balance import Items, Real, Whole
from weft.plan.pack.types import RoundLimits

MAX_COMBINATIONS = 4096
"""Choices weighed for one slot; with four jobs that is seven or eight cut points of each."""
SAFE_FILL = 0.97
"""Of a slot, that those behind may need on average: samples cannot be cut to fill one to the last token."""
OVERFULL = 4.0
"""What needing more than that counts against as many empty rows."""


def fill_in_order(items: Items, num_slots: int, limits: RoundLimits) -> Whole | None:
    """The slot of every sample, items of a job being in its order; None if they were not made to fit."""
    room = limits.room
    jobs = [np.flatnonzero(items.job == j) for j in range(int(items.job.max()) + 1)]
    first = [int(items.first[own[0]]) for own in jobs]
    last = [int(items.last[own[0]]) for own in jobs]
    work = [np.concatenate([[0.0], np.cumsum(items.work[own])]) for own in jobs]
    tokens = [np.concatenate([[0], np.cumsum(items.lengths[own])]) for own in jobs]
    done = [0] * len(jobs)
    slot = np.full(len(items.work), -1, dtype=np.int64)
    token_s = float(items.work.sum() / items.lengths.sum())
    for q in range(num_slots):
        left = np.array([w[-1] - w[d] for w, d in zip(work, done, strict=True)])
        level = float(_levels(left[None, :], last, q, num_slots)[0])
        here = [j for j in range(len(jobs)) if first[j] <= q <= last[j] and done[j] < len(jobs[j])]
        if not here:
            continue
        cuts = _cut_points(here, done, work, last, q, level)
        grid = np.stack([c.ravel() for c in np.meshgrid(*cuts, indexing="ij")], axis=1)
        given = np.stack([work[j][grid[:, i]] - work[j][done[j]] for i, j in enumerate(here)], axis=1)
        own = [_padded(tokens[j][grid[:, i]] - tokens[j][done[j]], limits.padding_multiple) for i, j in enumerate(here)]
        taken: Whole = np.sum(own, axis=0)
        after = np.repeat(left[None, :], len(grid), axis=0)
        after[:, here] -= given
        load = given.sum(axis=1)
        needed = _levels(after, last, q + 1, num_slots)
        score = (
            np.maximum(load, needed)
            if limits.row_tile == 1
            else token_s * _empty_rows(taken, min(room, level / token_s), needed / token_s - SAFE_FILL * room, limits)
        )
        # Of equal ones the one nearest to the level.
        score = np.where(taken <= room, score + 1e-6 * np.abs(load - level), np.inf)
        best = int(score.argmin())
        if score[best] == np.inf:
            return None
        for i, j in enumerate(here):
            slot[jobs[j][done[j] : grid[best, i]]] = q
            done[j] = int(grid[best, i])
    return slot if (slot >= 0).all() else None


def _empty_rows(tokens: Whole, level: float, beyond: Real, limits: RoundLimits) -> Real:
    """What choices cost, in rows: those left empty, those away from the level's tiles, and tokens beyond the room."""
    rows = _padded(tokens, limits.row_tile)
    usual = np.ceil(level / limits.row_tile) * limits.row_tile
    cost: Real = (rows - tokens) + limits.unlike * np.abs(rows - usual) + OVERFULL * np.maximum(beyond, 0.0)
    return cost


def _padded(tokens: Whole, multiple: int) -> Whole:
    return -(-tokens // multiple) * multiple


def _levels(left: Real, last: list[int], q: int, num_slots: int) -> Real:
    """Least work the fullest slot from q on must have, for each row of work left by job."""
    level = np.zeros(len(left))
    for e in sorted({*last, num_slots - 1}):
        due = [j for j, end in enumerate(last) if end <= e]
        level = np.maximum(level, left[:, due].sum(axis=1) / (e - q + 1) if e >= q else 0.0)
    return level


def _cut_points(
    here: list[int], done: list[int], work: list[Real], last: list[int], q: int, level: float
) -> list[Whole]:
    """For each job the numbers of samples worth weighing, around those that fill the slot by earliest deadline."""
    free = level
    middle: dict[int, int] = {}
    for j in sorted(here, key=lambda j: (last[j], j)):
        reach = np.searchsorted(work[j], work[j][done[j]] + free, side="right") - 1
        middle[j] = max(int(reach), done[j])
        free -= work[j][middle[j]] - work[j][done[j]]
    spread = 0
    cuts: list[Whole] = []
    while True:
        wider = []
        for j in here:
            end = len(work[j]) - 1
            if last[j] == q:
                wider.append(np.array([end]))
            else:
                wider.append(np.arange(max(done[j], middle[j] - spread), min(end, middle[j] + spread) + 1))
        is_same = bool(cuts) and all(len(a) == len(b) for a, b in zip(cuts, wider, strict=True))
        if cuts and (is_same or np.prod([len(c) for c in wider]) > MAX_COMBINATIONS):
            return cuts
        cuts, spread = wider, spread + 1
