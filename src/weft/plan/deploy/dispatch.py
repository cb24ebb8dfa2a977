"""Balanced dispatch: assigns every sample to a replica that holds it, so that the slowest replica ends soonest.

    min max_k T_k(n_k·)    s.t.  Σ_k n_kj = B_j,   n_kj = 0 where replica k cannot hold bucket j,   n whole

This is LobRA's equation 3 for single replicas instead of kinds, with the whole of T: chunks that are not full, and the
time to fill pipelines. A job that adds gradients in order has all samples on its home replica (`plan/level.py`); the
others are assigned around them, each to where it ends soonest. Without such jobs, the linear relaxation gives a bound
and a start. Its whole samples are divided evenly within a kind, the few fractional ones go where they end soonest; then
samples or whole chunks leave the slowest replica, or are exchanged for shorter ones, while that helps. Tests compare
with the integer program and with brute force.

The linear relaxation of dispatch: samples may be split, chunks are always full, pipelines take no time to fill.

    min t    s.t.  Σ_i d_ij = B_j,    Σ_j w_ij · d_ij ≤ p_i · t,    d ≥ 0

for kinds i of alike replicas, p_i of each, and w_ij the seconds of a sample in full chunks. Its optimum is a lower
bound, because any other way of running a sample takes at least w_ij; so are the time of any one sample alone on its
fastest replica, and that of a job with a home on its fastest. Solved by HiGHS in a few milliseconds. The prices of its
second constraints value a second of each kind: with them, `plan/deploy/plans.py` bounds other plans as well.

Two baselines: dispatch by length alone, and evenly over alike replicas.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from weft.errors import PlanError
from weft.plan.deploy.buckets import FloatArray, IntArray
from weft.plan.deploy.fleet import Dispatch, Fleet


@dataclass(frozen=True)
class Relaxed:
    bound_s: float
    prices_S: FloatArray
    """Value of a second of one replica, by kind."""
    counts_SR: FloatArray


def relax(fleet: Fleet, below_s: float = math.inf) -> Relaxed:
    """Solves the relaxation; with `below_s`, filling of pipelines counts for dispatches that end before it."""
    from scipy.optimize import linprog

    _, first = np.unique(fleet.kind_K, return_index=True)
    copies = np.bincount(fleet.kind_K)
    kind, bucket = np.nonzero(fleet.holds_KR[first])
    num, num_kinds = len(kind), len(copies)
    counts = np.asarray(fleet.buckets.counts)
    columns = np.arange(num)
    # Dense: such a small program is solved faster than a sparse matrix is built.
    loads = np.zeros((num_kinds, num + 1))
    seconds_SR = fleet.sample_s_KR[first] * fleet.stretch_K(below_s)[first][:, None]
    loads[kind, columns] = seconds_SR[kind, bucket] / copies[kind]
    loads[:, num] = -1.0
    shares = np.zeros((len(counts), num + 1))
    shares[bucket, columns] = 1.0
    objective = np.zeros(num + 1)
    objective[-1] = 1.0
    found = linprog(objective, A_ub=loads, b_ub=np.zeros(num_kinds), A_eq=shares, b_eq=counts, method="highs")
    if found.x is None:
        raise PlanError(f"the relaxation has no solution ({found.message}).", where="dispatch")
    shares_SR = np.zeros((num_kinds, len(counts)))
    shares_SR[kind, bucket] = found.x[:-1]
    alone_s = float(np.where(fleet.holds_KR, fleet.slope_KR + fleet.base_KR, np.inf).min(axis=0).max())
    homes_s = float(fleet.job_s_KJ.min(axis=0).max()) if len(fleet.home_JR) else 0.0
    return Relaxed(min(max(float(found.fun), alone_s, homes_s), below_s), -found.ineqlin.marginals / copies, shares_SR)


def dispatch_by_length(fleet: Fleet) -> Dispatch:
    """Each bucket goes, evenly, to the replicas that need the fewest GPU-seconds for it, regardless of load."""
    return concluded(fleet, cheapest_counts(fleet))


def cheapest_counts(fleet: Fleet) -> IntArray:
    gpus_K = np.array([model.layout.num_devices for model in fleet.models], dtype=np.float64)
    price_KR = fleet.sample_s_KR * gpus_K[:, None]
    return _shared(fleet, price_KR <= price_KR.min(axis=0) * (1 + 1e-9))


def dispatch_evenly(fleet: Fleet) -> Dispatch:
    """Every bucket over all replicas, each of which must hold it."""
    if not fleet.holds_KR.all():
        raise PlanError(
            "some replica cannot hold the longest samples; even shares need that all can.", where="dispatch"
        )
    return concluded(fleet, even_counts(fleet))


def even_counts(fleet: Fleet) -> IntArray:
    """Every bucket over the replicas that hold it."""
    return _shared(fleet, fleet.holds_KR)


def _shared(fleet: Fleet, wanted_KR: np.ndarray) -> IntArray:
    """Jobs on their homes, all other samples evenly over the wanted replicas."""
    return fleet.at_home_KR + _deal_evenly(wanted_KR, fleet.shared_R)


def concluded(fleet: Fleet, counts_KR: IntArray, bound_s: float | None = None) -> Dispatch:
    """The priced dispatch of these counts; without a bound, that of the linear relaxation is computed."""
    seconds: FloatArray = fleet.seconds(counts_KR)
    return Dispatch(
        counts=tuple(tuple(int(count) for count in own) for own in counts_KR),
        seconds=tuple(float(s) for s in seconds),
        bound_s=relax(fleet).bound_s if bound_s is None else bound_s,
        homes=fleet.homes,
    )


def _deal_evenly(wanted_KR: np.ndarray, shared_R: IntArray) -> IntArray:
    """Each bucket's samples one by one over the wanted replicas, starting after the last of the longer bucket."""
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


MAX_MOVES = 120
"""Limit of moves, some 0.1 ms each with a dozen replicas."""


def dispatch(fleet: Fleet, relaxed: Relaxed | None = None) -> Dispatch:
    """The dispatch of a batch; deterministic, ties to the first replica. `relaxed`: a known relaxation."""
    found = relax(fleet) if relaxed is None else relaxed
    counts_KR = balanced_counts(fleet) if fleet.homes else _levelled(fleet, _rounded(fleet, found))
    return concluded(fleet, counts_KR, found.bound_s)


def balanced_counts(fleet: Fleet) -> IntArray:
    """A dispatch without the relaxation, so at once: the longest samples first, each to where it ends soonest."""
    return _levelled(fleet, _dealt(fleet, fleet.at_home_KR, fleet.shared_R))


def _levelled(fleet: Fleet, counts_KR: IntArray) -> IntArray:
    home_KR = fleet.at_home_KR
    for _ in range(MAX_MOVES):
        if not (_move(fleet, counts_KR, home_KR) or _exchange(fleet, counts_KR, home_KR)):
            break
    return counts_KR


def _rounded(fleet: Fleet, relaxed: Relaxed) -> IntArray:
    """Whole samples: the longest first, the remainder to the least loaded of a kind."""
    whole_SR = np.floor(relaxed.counts_SR + 1e-6).astype(np.int64)
    counts_KR = np.zeros(fleet.size_KR.shape, dtype=np.int64)
    members = [np.flatnonzero(fleet.kind_K == kind) for kind in range(len(whole_SR))]
    left_R = np.asarray(fleet.buckets.counts).astype(np.int64) - whole_SR.sum(axis=0)
    load_K = np.zeros(len(counts_KR))
    for bucket in reversed(range(len(left_R))):
        for kind, own in enumerate(members):
            each, rest = divmod(int(whole_SR[kind, bucket]), len(own))
            counts_KR[own, bucket] += each
            counts_KR[own[np.argsort(load_K[own], kind="stable")[:rest]], bucket] += 1
        _deal(fleet, counts_KR, load_K, bucket, int(left_R[bucket]))
        load_K = fleet.seconds(counts_KR)
    return counts_KR


def _dealt(fleet: Fleet, home_KR: IntArray, shared_R: IntArray) -> IntArray:
    """Divisible samples around those at home: the longest first, each to where it ends soonest."""
    counts_KR = home_KR.copy()
    for bucket in reversed(np.flatnonzero(shared_R)):
        _deal(fleet, counts_KR, fleet.seconds(counts_KR), int(bucket), int(shared_R[bucket]))
    return counts_KR


def _deal(fleet: Fleet, counts_KR: IntArray, load_K: FloatArray, bucket: int, count: int) -> None:
    """Adds so many samples of a bucket, each where it ends soonest, in place."""
    for _ in range(count):
        after_K = np.where(fleet.holds_KR[:, bucket], load_K + fleet.sample_s_KR[:, bucket], np.inf)
        taker = int(np.argmin(after_K))
        counts_KR[taker, bucket] += 1
        load_K[taker] = after_K[taker]


def _move(fleet: Fleet, counts_KR: IntArray, home_KR: IntArray) -> bool:
    """Moves samples off the slowest replica, in place, if it and the taker then end sooner."""
    seconds_K = fleet.seconds(counts_KR)
    slowest = int(np.argmax(seconds_K))
    best = (float(seconds_K[slowest]) * (1 - 1e-9), -1, -1, 0)
    for wanted_R in _move_sizes(fleet, counts_KR, slowest):
        moved_R = np.minimum(wanted_R, counts_KR[slowest] - home_KR[slowest])
        moved_KR = np.broadcast_to(moved_R, counts_KR.shape)
        giver_R = fleet.seconds_with(counts_KR, -moved_KR)[slowest]
        taker_KR = np.where(fleet.holds_KR & (moved_R > 0), fleet.seconds_with(counts_KR, moved_KR), np.inf)
        taker_KR[slowest] = np.inf
        worse_KR = np.maximum(taker_KR, giver_R[None, :])
        taker, bucket = np.unravel_index(int(np.argmin(worse_KR)), worse_KR.shape)
        best = min(best, (float(worse_KR[taker, bucket]), int(taker), int(bucket), int(moved_R[bucket])))
    _, to, of_bucket, size = best
    if size == 0:
        return False
    counts_KR[slowest, of_bucket] -= size
    counts_KR[to, of_bucket] += size
    return True


def _move_sizes(fleet: Fleet, counts_KR: IntArray, slowest: int) -> list[IntArray]:
    """Numbers of samples to move, by bucket: one, or a partial chunk (a whole one where all are full)."""
    own_R = counts_KR[slowest]
    one_R = np.minimum(own_R, 1)
    if fleet.is_packed:
        return [one_R]
    size_R = np.maximum(fleet.size_KR[slowest], 1.0).astype(np.int64)
    rest_R = np.where(own_R % size_R > 0, own_R % size_R, np.minimum(own_R, size_R))
    return [one_R, rest_R]


def _exchange(fleet: Fleet, counts_KR: IntArray, home_KR: IntArray) -> bool:
    """Exchanges one sample of the slowest replica, in place, if it and the taker then end sooner. The candidates are
    ranked as if the two effects added up; the best is priced in full before it is kept."""
    seconds_K = fleet.seconds(counts_KR)
    slowest = int(np.argmax(seconds_K))
    ones_KR = np.ones_like(counts_KR)
    adds_KR = np.where(fleet.holds_KR, fleet.seconds_with(counts_KR, ones_KR) - seconds_K[:, None], np.inf)
    saves_KR = np.where(counts_KR > home_KR, seconds_K[:, None] - fleet.seconds_with(counts_KR, -ones_KR), -np.inf)
    # At [k, given, got]: the slowest gives one of a bucket to replica k and gets one of another bucket from it.
    giver_RR = seconds_K[slowest] - saves_KR[slowest][:, None] + adds_KR[slowest][None, :]
    taker_KRR = seconds_K[:, None, None] + adds_KR[:, :, None] - saves_KR[:, None, :]
    worse_KRR = np.maximum(giver_RR[None], taker_KRR)
    worse_KRR[slowest] = np.inf
    taker, given, got = np.unravel_index(int(np.argmin(worse_KRR)), worse_KRR.shape)
    if not worse_KRR[taker, given, got] < seconds_K[slowest] * (1 - 1e-9):
        return False
    tried_KR = counts_KR.copy()
    tried_KR[slowest, given] -= 1
    tried_KR[taker, given] += 1
    tried_KR[slowest, got] += 1
    tried_KR[taker, got] -= 1
    tried_K = fleet.seconds(tried_KR)
    if max(tried_K[slowest], tried_K[taker]) >= seconds_K[slowest] * (1 - 1e-9):
        return False
    counts_KR[:] = tried_KR
    return True
