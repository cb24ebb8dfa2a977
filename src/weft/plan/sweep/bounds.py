"""Lower bounds that no schedule of a sweep can beat, whatever its packs, ways, degrees and order.

Work. A pack H run in way q takes d_q GPUs for T_q(H), and of its M microbatches

    M ≥ Σ rows_k / C'                                 everything goes through
    M ≥ max steps_k ≥ Σ steps_k · adapter_k / room_q     because Σ adapter_k ≤ room_q

so for every x in [0, 1]: d_q · T_q(H) ≥ Σ_k w_kq(x), with
    w_kq(x) = d_q · (own_kq + large'·f·rows_k + large · (x · rows_k / C' + (1 − x) · steps_k · adapter_k / room_q))
where f ≥ 1 is the least that whole tiles add to whole samples,
and the makespan is at least Σ_k min_q w_kq(x) / G; over q that hold k alone. The small line gives the same with its own
prices; of both lines the larger sum counts, since T is at least either.

Length. No configuration ends before its own rows and steps have gone through in its best way.
"""

from __future__ import annotations

import numpy as np

from weft.plan.sweep.cost import ROUNDING, Floats, PackCost

SHARES = tuple(i / 10 for i in range(11))
"""The x that are tried; each gives a valid bound."""


def lower_bound_s(cost: PackCost) -> float:
    """Seconds that any schedule of the configurations takes at least."""
    return max(work_s(cost), length_s(cost))


def work_s(cost: PackCost) -> float:
    """All GPUs busy all the time, every configuration in its cheapest way."""
    counts = np.bincount(cost.kind_of, minlength=len(cost.kinds))
    rows, steps = cost.rows[:, None], cost.steps[:, None]
    by_rows, computed = rows / cost.filled, rows * _tiled(cost)
    with np.errstate(divide="ignore", invalid="ignore"):
        by_memory = steps * cost.adapter / cost.room[cost.width]
    fits = _fits(cost)
    best = 0.0
    for line in (cost.small, cost.large):
        for share in SHARES:
            microbatches = share * by_rows + (1 - share) * np.where(fits, by_memory, 0.0)
            work = cost.degree * (cost.own + line[1] * computed + line[0] * microbatches)
            cheapest = np.where(fits, work, np.inf).min(axis=1)
            best = max(best, float(counts @ cheapest) / cost.setting.num_gpus)
    return best


def length_s(cost: PackCost) -> float:
    """The configuration that takes longest even alone in its fastest way."""
    rows, steps = cost.rows[:, None], cost.steps[:, None]
    count = np.maximum(rows / cost.filled, steps)
    computed = rows * _tiled(cost)
    frozen = np.maximum(*(line[0] * count + line[1] * computed for line in (cost.small, cost.large)))
    alone = np.where(_fits(cost), frozen + cost.own, np.inf)
    return float(alone.min(axis=1).max())


def _tiled(cost: PackCost) -> Floats:
    """Computed rows over real ones, at the least: over all numbers of whole samples in a microbatch of way q."""
    found = []
    for filled, tile in zip(cost.filled, cost.tile, strict=True):
        real = np.arange(1, filled // cost.sample + 1) * cost.sample
        found.append((np.ceil(real / tile) * tile / real).min() * (1 - ROUNDING))
    return np.array(found)


def _fits(cost: PackCost) -> Floats:
    """Whether way q holds kind k alone."""
    return np.asarray(cost.adapter <= cost.room[cost.width])
