"""Shares weighted things out to buckets as evenly as possible.

Problem: given weights w_1 … w_n ≥ 0 and P ≤ n buckets, none empty: min Σ_b (load_b − mean)², the variance of the loads.
The mean is fixed by P, so this is the least sum of squared loads.

Method: heaviest first into the lightest bucket, then moves of one and swaps of two while they help, O(n²) per pass. Up
to 12 things, where that leaves a gap to the bound, a branch and bound search finds the least: tests prove it against
all partitions. Bound: what is left to share out flows like water onto the lowest loads. Above 12 the answer comes with
its bound, so that its gap is known. Deterministic; ties go to the lowest number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.errors import PlanError

MAX_EXACT = 12
"""Most things that are searched exhaustively: the hardest such instances take some hundredths of a second."""
RELATIVE_GAIN = 1e-12
"""A smaller gain is rounding, and would let moves go round in circles."""


@dataclass(frozen=True, slots=True)
class Balance:
    """Things, by number, in buckets."""

    buckets: tuple[tuple[int, ...], ...]
    """Each ascending, in the order of their first."""
    variance: float
    """Of the buckets' loads."""
    variance_bound: float
    """No sharing out has less."""


def balance(weights: Sequence[float], num_buckets: int) -> Balance:
    """The most even buckets found, with a proven bound; exact for up to 12 things."""
    if not 1 <= num_buckets <= len(weights):
        raise PlanError(f"{len(weights)} things cannot fill {num_buckets} buckets; use 1 to {len(weights)}.")
    if min(weights) < 0:
        raise PlanError(f"a weight is {min(weights)}; weights are 0 or more.")
    heaviest = sorted(range(len(weights)), key=lambda i: (-weights[i], i))
    places = improve(_heaviest_first(weights, heaviest, num_buckets), weights, num_buckets)
    bound = _bound(weights, heaviest, num_buckets)
    if len(weights) <= MAX_EXACT and _squares(places, weights, num_buckets) > bound * (1 + RELATIVE_GAIN):
        places = _Search(weights, heaviest, num_buckets, places).best
        bound = _squares(places, weights, num_buckets)
    return _result(places, weights, num_buckets, bound)


def improve(places: Sequence[int], weights: Sequence[float], num_buckets: int) -> list[int]:
    """Moves and swaps things between buckets, given by number for each thing, while the loads become more even."""
    best = list(places)
    loads = _loads(best, weights, num_buckets)
    threshold = RELATIVE_GAIN * sum(x * x for x in loads)
    changed = True
    while changed:
        changed = False
        for i, weight in enumerate(weights):
            source = best[i]
            # From the larger to the smaller load, d less here and d more there saves 2 d (difference − d). Moving a
            # thing that is alone in its bucket saves nothing, so none becomes empty.
            target = min(range(num_buckets), key=loads.__getitem__)
            if weight * (loads[source] - loads[target] - weight) > threshold:
                best[i] = target
                loads[source], loads[target] = loads[source] - weight, loads[target] + weight
                changed = True
                continue
            for k in range(len(weights)):
                other, d = best[k], weight - weights[k]
                if d > 0 and d * (loads[source] - loads[other] - d) > threshold:
                    best[i], best[k] = other, source
                    loads[source], loads[other] = loads[source] - d, loads[other] + d
                    changed = True
                    break
    return best


def _heaviest_first(weights: Sequence[float], heaviest: Sequence[int], num_buckets: int) -> list[int]:
    places, loads, counts = [0] * len(weights), [0.0] * num_buckets, [0] * num_buckets
    for i in heaviest:
        # Among equal loads the emptier one, so that things of no weight leave no bucket empty.
        bucket = min(range(num_buckets), key=lambda b: (loads[b], counts[b], b))
        places[i] = bucket
        loads[bucket] += weights[i]
        counts[bucket] += 1
    return places


class _Search:
    """Depth first over all partitions, heaviest thing first, cut where the water bound cannot beat the best."""

    def __init__(self, weights: Sequence[float], heaviest: Sequence[int], num_buckets: int, start: list[int]) -> None:
        self.weights, self.heaviest, self.num_buckets = weights, heaviest, num_buckets
        self.best, self.best_squares = start, _squares(start, weights, num_buckets)
        self.rest = [sum(weights[i] for i in heaviest[k:]) for k in range(len(heaviest) + 1)]
        self.visit(0, [], [0] * len(weights))

    def visit(self, depth: int, loads: list[float], places: list[int]) -> None:
        """Places thing `depth` in every open bucket and in a fresh one; buckets are opened in order."""
        num_left = len(self.heaviest) - depth
        if not num_left:
            squares = sum(x * x for x in loads)
            if squares < self.best_squares * (1 - RELATIVE_GAIN):
                self.best, self.best_squares = places.copy(), squares
            return
        if num_left < self.num_buckets - len(loads):
            # Things of next to no weight would leave a bucket empty.
            return
        padded = loads + [0.0] * (self.num_buckets - len(loads))
        if _water(padded, self.rest[depth]) >= self.best_squares * (1 - RELATIVE_GAIN):
            return
        thing = self.heaviest[depth]
        for bucket in range(len(loads)):
            if loads[bucket] not in loads[:bucket]:
                places[thing] = bucket
                raised = [x + self.weights[thing] if b == bucket else x for b, x in enumerate(loads)]
                self.visit(depth + 1, raised, places)
        if len(loads) < self.num_buckets:
            places[thing] = len(loads)
            self.visit(depth + 1, [*loads, self.weights[thing]], places)


def _bound(weights: Sequence[float], heaviest: Sequence[int], num_buckets: int) -> float:
    """Least sum of squares: the k heaviest in k buckets of their own, the rest water; the best over k is a bound.

    Only heavy things that no water reaches make it larger than even loads: k with the k-th above the water's level.
    """
    loads = [0.0] * num_buckets
    rest = sum(weights)
    for bucket, i in enumerate(heaviest[:num_buckets]):
        level = rest / (num_buckets - bucket)
        if weights[i] <= level:
            break
        loads[bucket] = weights[i]
        rest -= weights[i]
    return _water(loads, max(rest, 0.0))


def _water(loads: Sequence[float], amount: float) -> float:
    """Sum of squares after `amount` has flowed onto the lowest loads."""
    ascending = sorted(loads)
    filled = 0.0
    for count, load in enumerate(ascending, 1):
        filled += load
        level = (filled + amount) / count
        if count == len(ascending) or level <= ascending[count]:
            return count * level * level + sum(x * x for x in ascending[count:])
    raise AssertionError("the last bucket ends the loop")


def _loads(places: Sequence[int], weights: Sequence[float], num_buckets: int) -> list[float]:
    loads = [0.0] * num_buckets
    for place, weight in zip(places, weights, strict=True):
        loads[place] += weight
    return loads


def _squares(places: Sequence[int], weights: Sequence[float], num_buckets: int) -> float:
    return sum(x * x for x in _loads(places, weights, num_buckets))


def _result(places: Sequence[int], weights: Sequence[float], num_buckets: int, bound: float) -> Balance:
    mean = sum(weights) / num_buckets
    members = [tuple(i for i, place in enumerate(places) if place == b) for b in range(num_buckets)]
    variance = sum((x - mean) ** 2 for x in _loads(places, weights, num_buckets)) / num_buckets
    return Balance(tuple(sorted(members)), variance, min(variance, max(bound / num_buckets - mean * mean, 0.0)))
