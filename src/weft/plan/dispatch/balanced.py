"""Balanced dispatch: every sample to one replica that holds it, so that the slowest replica ends soonest.

    min max_k T_k(n_k·)    s.t.  Σ_k n_kj = B_j,   n_kj = 0 where replica k cannot hold bucket j,   n whole

This is LobRA's equation 3 for single replicas instead of kinds, with the whole of T: chunks that are not full, and the
time pipelines take to fill. Samples of a job whose sums are ordered all go to one replica, its home (`plan/homes.py`),
and stay there; around them the others are shared out, each to where it ends soonest. Where there are none, the linear
relaxation gives a bound and a start. Its whole samples are dealt out evenly within a kind, the few that it splits go
where they end soonest; then samples or whole chunks leave the slowest replica, or are exchanged for shorter ones, as
long as that helps. Tests compare with the integer program and with brute force.
"""

from __future__ import annotations

import numpy as np

from weft.plan.dispatch.baselines import concluded
from weft.plan.dispatch.fleet import Fleet
from weft.plan.dispatch.linear import Relaxed, relax
from weft.plan.dispatch.replica_time import FloatArray, IntArray
from weft.plan.dispatch.types import Dispatch

MAX_MOVES = 120
"""Each takes some 0.1 ms with a dozen replicas."""


def dispatch(fleet: Fleet, relaxed: Relaxed | None = None) -> Dispatch:
    """Shares out a batch; deterministic, ties to the first replica. `relaxed`, if it is known, saves a solve."""
    found = relax(fleet) if relaxed is None else relaxed
    home_KR = fleet.at_home_KR
    counts_KR = _dealt(fleet, home_KR, fleet.shared_R) if fleet.homes else _rounded(fleet, found)
    for _ in range(MAX_MOVES):
        if not (_move(fleet, counts_KR, home_KR) or _exchange(fleet, counts_KR, home_KR)):
            break
    return concluded(fleet, counts_KR, found.bound_s)


def _rounded(fleet: Fleet, relaxed: Relaxed) -> IntArray:
    """Whole samples: the longest first, what does not divide evenly to the least loaded of a kind."""
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
    """Samples that are shared out around those at home: the longest first, each to where it ends soonest."""
    counts_KR = home_KR.copy()
    for bucket in reversed(np.flatnonzero(shared_R)):
        _deal(fleet, counts_KR, fleet.seconds(counts_KR), int(bucket), int(shared_R[bucket]))
    return counts_KR


def _deal(fleet: Fleet, counts_KR: IntArray, load_K: FloatArray, bucket: int, count: int) -> None:
    """So many samples of a bucket, each to where it ends soonest, in place."""
    for _ in range(count):
        after_K = np.where(fleet.holds_KR[:, bucket], load_K + fleet.sample_s_KR[:, bucket], np.inf)
        taker = int(np.argmin(after_K))
        counts_KR[taker, bucket] += 1
        load_K[taker] = after_K[taker]


def _move(fleet: Fleet, counts_KR: IntArray, home_KR: IntArray) -> bool:
    """Moves samples off the slowest replica, in place, if that makes it and the taker end sooner."""
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
    """Of each bucket one sample, or its chunk that is not full (a whole one where all are)."""
    own_R = counts_KR[slowest]
    one_R = np.minimum(own_R, 1)
    if fleet.is_packed:
        return [one_R]
    size_R = np.maximum(fleet.size_KR[slowest], 1.0).astype(np.int64)
    rest_R = np.where(own_R % size_R > 0, own_R % size_R, np.minimum(own_R, size_R))
    return [one_R, rest_R]


def _exchange(fleet: Fleet, counts_KR: IntArray, home_KR: IntArray) -> bool:
    """The slowest replica gives one sample for another, in place, if that makes it and the taker end sooner.

    What one sample adds and another saves is taken to add up; what comes of it is counted in full before it is kept.
    """
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
