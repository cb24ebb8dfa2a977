"""Where in a round each job may stand, so that no no-op is needed between rounds.

Between a job's last sample of one round and its first of the next must lie `distance` microbatches. At every boundary
between two rounds job j gets a place s_j in 0 … distance − 1: the round after starts it no earlier than slot s_j, the
round before ends it distance − 1 − s_j slots before its end. Then the distance holds, whatever the numbers of slots.

Problem: choose s at every boundary and the number of slots m of every round, min Σ_rounds m · (fixed + level), where
the level is the largest slot's work were samples divisible: by Hall's theorem, over all ranges of slots, the work of
the jobs that must stay inside, shared by the slots of the range. The same in tokens must not exceed the room.

Method: one place for each job that is best for all rounds alike; then boundary after boundary the best place given the
one before, looking one round ahead. O(rounds · places · jobs). Few jobs: all places are tried; many: those that
differ from the common ones in one job. Proven by tests: the distance holds for whatever is chosen.

Legend: R rounds, J jobs, K candidate places, A first slots, B last slots.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from weft.plan.pack.balance import Mask, Real, Whole

MAX_TRIED = 1024
"""Places that are all tried: five jobs on four stages."""
_SPARE_WEIGHT = 0.1
"""Large enough to decide between equals, small enough not to ask for more slots."""
_COMMON_ROUNDS = 64
"""Rounds looked at to choose the common places; more change nothing."""


@dataclass(frozen=True)
class Demand:
    """Work and tokens of every round's jobs, and the numbers of slots to choose from."""

    work_RJ: Real
    tokens_RJ: Real
    spare_R: Real
    """Work that ranges of slots should have to spare in each round, since samples are not divisible."""
    counts: Sequence[range]
    distance: int
    fixed: float
    room: int


def slot_counts(fewest: int, num_samples: int, distance: int) -> range:
    """Numbers of slots worth trying for a round.

    Twice the distance more than needed leave every slot to half of the jobs or more; a further one only costs.
    """
    low = max(fewest, distance)
    return range(low, max(low, min(low + 2 * distance, num_samples + distance - 1)) + 1)


def choose_slots(demand: Demand, start_J: Whole, *, is_end: bool) -> list[Whole]:
    """Places of the jobs at every boundary, from before the first round (given) to after the last.

    Where nothing follows the last round, jobs may run up to its end.
    """
    distance, (num_rounds, num_jobs) = demand.distance, demand.work_RJ.shape
    if distance == 1:
        return [start_J] * (num_rounds + 1)
    common_J, all_KJ = _common_places(demand)
    end_J = np.full(num_jobs, distance - 1, dtype=np.int64) if is_end else common_J
    places = [start_J]
    for r in range(num_rounds - 1):
        time_K = _likely_s(demand, r, places[-1][None, :], all_KJ)
        ahead_J = end_J if r + 2 == num_rounds else common_J
        time_K = time_K + _likely_s(demand, r + 1, all_KJ, ahead_J[None, :])
        places.append(all_KJ[int(time_K.argmin())])
    return [*places, end_J]


def round_s(demand: Demand, r: int, before_KJ: Whole, after_KJ: Whole) -> Real:
    """Lower bound of a round's time, by places (rows, of either one may do for all) and slots; inf: no room."""
    counts, distance = demand.counts[r], demand.distance
    work_KAB = _inside(demand.work_RJ[r], before_KJ, after_KJ, distance)
    tokens_KAB = _inside(demand.tokens_RJ[r], before_KJ, after_KJ, distance)
    return _times(demand, work_KAB, tokens_KAB, counts)


def _likely_s(demand: Demand, r: int, before_KJ: Whole, after_KJ: Whole) -> Real:
    """What a round will take with its best number of slots, by places.

    Mostly its bound; ranges of slots with work to spare tell good places from those that are only just possible.
    """
    distance = demand.distance
    # More slots than these are seldom best, and time counts here.
    counts = demand.counts[r][: distance + 1]
    work_KAB = _inside(demand.work_RJ[r], before_KJ, after_KJ, distance)
    tokens_KAB = _inside(demand.tokens_RJ[r], before_KJ, after_KJ, distance)
    is_part = (work_KAB > 0) & (work_KAB < demand.work_RJ[r].sum() * (1 - 1e-9))
    bound = _times(demand, work_KAB, tokens_KAB, counts).min(axis=1)
    spared = _times(demand, work_KAB + demand.spare_R[r] * is_part, tokens_KAB, counts).min(axis=1)
    times = bound + _SPARE_WEIGHT * spared
    # No room costs much, not everything: another boundary may help.
    worst = float(np.max(times, where=np.isfinite(times), initial=1.0))
    finite: Real = np.where(np.isfinite(times), times, 2 * worst)
    return finite


def _inside(amount_J: Real, before_KJ: Whole, after_KJ: Whole, distance: int) -> Real:
    """What jobs must have between slot a and the slot b of the last ones, by places."""
    edges = np.arange(distance)
    starts_KAJ: Mask = before_KJ[:, None, :] >= edges[:, None]
    ends_KBJ: Mask = after_KJ[:, None, :] <= edges[:, None]
    inside_KAB: Real = (starts_KAJ * amount_J) @ ends_KBJ.transpose(0, 2, 1).astype(np.float64)
    return inside_KAB


def _times(demand: Demand, work_KAB: Real, tokens_KAB: Real, counts: range) -> Real:
    """Slots times the largest, by places and number of slots; inf where tokens have no room."""
    edges, times = np.arange(demand.distance), []
    for m in counts:
        # Jobs that begin at a or later and end at the latest at m − distance + b have no other slots.
        num_AB = (m - demand.distance + 1 + edges[None, :] - edges[:, None]).astype(np.float64)
        share_AB = 1.0 / np.where(num_AB > 0, num_AB, 1e-300)
        level_K = (work_KAB * share_AB).max(axis=(1, 2))
        has_room_K = (tokens_KAB * share_AB).max(axis=(1, 2)) <= demand.room
        times.append(np.where(has_room_K, m * (level_K + demand.fixed), np.inf))
    return np.stack(times, axis=1)


def _common_places(demand: Demand) -> tuple[Whole, Whole]:
    """The places that are best if all boundaries had the same, and the candidates for single boundaries."""
    distance, num_jobs = demand.distance, demand.work_RJ.shape[1]
    rounds = range(0, len(demand.counts), max(1, len(demand.counts) // _COMMON_ROUNDS))

    def time_s(places_KJ: Whole) -> Real:
        total = np.zeros(len(places_KJ))
        for r in rounds:
            total += _likely_s(demand, r, places_KJ, places_KJ)
        return total

    if distance**num_jobs <= MAX_TRIED:
        all_KJ = np.array(list(itertools.product(range(distance), repeat=num_jobs)), dtype=np.int64)
        return all_KJ[int(time_s(all_KJ).argmin())], all_KJ
    # Jobs dealt out evenly are a good start, and good themselves where jobs are alike.
    best_J, best = np.arange(num_jobs) * distance // num_jobs, np.inf
    while True:
        all_KJ = np.repeat(best_J[None, :], distance * num_jobs, axis=0)
        all_KJ[np.arange(len(all_KJ)), np.arange(len(all_KJ)) // distance] = np.arange(len(all_KJ)) % distance
        times = time_s(all_KJ)
        if times.min() >= best * (1 - 1e-9):
            return best_J, all_KJ
        best_J, best = all_KJ[int(times.argmin())], float(times.min())
