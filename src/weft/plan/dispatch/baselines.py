"""Ways of sharing out a batch that others use: by length alone, and evenly over alike replicas."""

from __future__ import annotations

import numpy as np

from weft.errors import PlanError
from weft.plan.dispatch.fleet import Fleet
from weft.plan.dispatch.linear import relax
from weft.plan.dispatch.replica_time import FloatArray, IntArray
from weft.plan.dispatch.types import Dispatch


def dispatch_by_length(fleet: Fleet) -> Dispatch:
    """Every bucket goes to the replicas that take the fewest GPU-seconds for it, evenly: nobody looks at the load."""
    gpus_K = np.array([model.layout.num_devices for model in fleet.models], dtype=np.float64)
    price_KR = fleet.sample_s_KR * gpus_K[:, None]
    cheapest_KR = price_KR <= price_KR.min(axis=0) * (1 + 1e-9)
    return _shared(fleet, cheapest_KR)


def dispatch_evenly(fleet: Fleet) -> Dispatch:
    """Every bucket over all replicas, which must be able to hold it."""
    if not fleet.holds_KR.all():
        raise PlanError(
            "some replica cannot hold the longest samples; even shares need that all can.", where="dispatch"
        )
    return _shared(fleet, fleet.holds_KR)


def _shared(fleet: Fleet, wanted_KR: np.ndarray) -> Dispatch:
    """Jobs where they are at home, all other samples evenly over the wanted replicas."""
    return concluded(fleet, fleet.at_home_KR + _deal_evenly(wanted_KR, fleet.shared_R))


def concluded(fleet: Fleet, counts_KR: IntArray, bound_s: float | None = None) -> Dispatch:
    """A dispatch with these counts, priced; without a bound, that of the linear relaxation is found."""
    seconds: FloatArray = fleet.seconds(counts_KR)
    return Dispatch(
        counts=tuple(tuple(int(count) for count in own) for own in counts_KR),
        seconds=tuple(float(s) for s in seconds),
        bound_s=relax(fleet).bound_s if bound_s is None else bound_s,
        homes=fleet.homes,
    )


def _deal_evenly(wanted_KR: np.ndarray, shared_R: IntArray) -> IntArray:
    """Each bucket's samples one by one over the wanted replicas, on from where the longer bucket before it ended."""
    counts_KR = np.zeros(wanted_KR.shape, dtype=np.int64)
    turn = 0
    for bucket in reversed(range(wanted_KR.shape[1])):
        takers = np.flatnonzero(wanted_KR[:, bucket])
        count = int(shared_R[bucket])
        counts_KR[takers, bucket] = count // len(takers)
        rest = count % len(takers)
        counts_KR[takers[(turn + np.arange(rest)) % len(takers)], bucket] += 1
        turn += rest
    return counts_KR
