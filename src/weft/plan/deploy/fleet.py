"""The time of all replicas for any counts of samples, as matrix operations over replicas (K) and buckets (R).

Padded, a replica with p stages takes (LobRA's equation 12)

    Σ_j chunk_j(b_j)·⌊n_j / b_j⌋ + chunk_j(n_j mod b_j)  +  (p − 1) · the longest of these chunks

Packed, c = ⌈tokens / most_tokens⌉ even chunks of any buckets:

    (Σ_j slope_j · n_j + base · c) · (1 + (p − 1) / c)

A dispatch states how many samples of each bucket every replica runs, and which.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from weft.errors import PlanError
from weft.plan.deploy.buckets import Buckets, FloatArray, IntArray, ReplicaModel
from weft.plan.level import PlannedReplicas, choose_homes


@dataclass(frozen=True)
class Dispatch:
    counts: tuple[tuple[int, ...], ...]
    seconds: tuple[float, ...]
    bound_s: float
    homes: tuple[int, ...] = ()
    """Home replica of each job that has one, by index; its samples are among the counts."""

    @property
    def step_s(self) -> float:
        return max(self.seconds)

    @property
    def gap(self) -> float:
        """Upper bound of the relative distance from the best dispatch."""
        return self.step_s / self.bound_s - 1.0


class Fleet:
    def __init__(self, models: Sequence[ReplicaModel], buckets: Buckets, homes: Sequence[int] | None = None) -> None:
        """Raises PlanError for buckets that no replica holds. `homes`: of each job that has one; None: chosen here."""
        if not models:
            raise PlanError("there are no replicas; give at least one.", where="dispatch")
        if len({model.is_packed for model in models}) > 1:
            raise PlanError("some replicas are packed and some padded; all must be alike in that.", where="dispatch")
        longest = max(model.most_tokens for model in models)
        if buckets.bounds[-1] > longest:
            raise PlanError(
                f"samples are padded to up to {buckets.bounds[-1]:,} tokens; the largest replica holds {longest:,}.",
                where="dispatch",
            )
        self.models, self.buckets, self._given_homes = tuple(models), buckets, homes
        kinds = list({id(model): model for model in models}.values())
        number = {id(model): index for index, model in enumerate(kinds)}
        self.kind_K: IntArray = np.array([number[id(model)] for model in models])
        priced = [model.costs(buckets) for model in kinds]
        costs = [priced[kind] for kind in self.kind_K]
        self.slope_KR = np.stack([cost.slope_R for cost in costs])
        self.base_KR = np.stack([cost.base_R for cost in costs])
        self.size_KR = np.stack([cost.size_R for cost in costs])
        self.sample_s_KR = np.stack([cost.sample_s_R for cost in costs])
        """Seconds of a sample in full chunks; infinite where a replica cannot hold it."""
        self.extra_K = np.array([model.layout.stages - 1.0 for model in models])
        """Stages after the first: the chunks that a replica waits while its pipeline fills and drains."""
        self.mean_R = np.asarray(buckets.tokens) / np.asarray(buckets.counts)
        self.most_K = np.array([float(model.most_tokens) for model in models])
        self.home_JR = np.array(buckets.at_home, dtype=np.int64).reshape(len(buckets.at_home), len(buckets.bounds))

    @property
    def is_packed(self) -> bool:
        return self.models[0].is_packed

    @property
    def holds_KR(self) -> np.ndarray:
        return self.size_KR > 0

    @property
    def shared_R(self) -> IntArray:
        shared_R: IntArray = np.asarray(self.buckets.counts).astype(np.int64) - self.home_JR.sum(axis=0)
        return shared_R

    @cached_property
    def homes(self) -> tuple[int, ...]:
        if self._given_homes is not None:
            return tuple(self._given_homes)
        found = choose_homes(dict(enumerate(self.home_s)))
        return tuple(found[job] for job in range(len(found)))

    @property
    def home_s(self) -> list[tuple[float, ...]]:
        """Seconds of each job with a home by replica, in full chunks; infinite where it does not fit."""
        full_KR = np.where(self.holds_KR, self.sample_s_KR, 0.0)
        misfit_KJ = (~self.holds_KR).astype(np.int64) @ self.home_JR.T > 0
        seconds_KJ = np.where(misfit_KJ, np.inf, full_KR @ self.home_JR.T)
        return [tuple(own) for own in seconds_KJ.T.tolist()]

    def planned(self, jobs: Iterable[str]) -> PlannedReplicas:
        """The replicas in the form that a run takes; `jobs`: names of the jobs with a home."""
        return PlannedReplicas(tuple(m.most_tokens for m in self.models), dict(zip(jobs, self.home_s, strict=True)))

    @property
    def at_home_KR(self) -> IntArray:
        counts_KR = np.zeros(self.size_KR.shape, dtype=np.int64)
        np.add.at(counts_KR, list(self.homes), self.home_JR)
        return counts_KR

    @property
    def job_s_KJ(self) -> FloatArray:
        """Seconds of each job with a home alone on each replica; infinite where it does not fit."""
        return np.stack(
            [self.seconds_with_job(np.zeros_like(self.size_KR, np.int64), own_R) for own_R in self.home_JR]
        ).T

    def seconds_with_job(self, counts_KR: IntArray, job_R: IntArray) -> FloatArray:
        """Seconds of every replica with a further job; infinite where it does not fit."""
        holds_K = (self.holds_KR | (job_R == 0)).all(axis=1)
        return np.where(holds_K, self.seconds(counts_KR + job_R), np.inf)

    def stretch_K(self, below_s: float) -> FloatArray:
        """The least ratio of a replica's time to its chunks' time, in any dispatch that ends before `below_s`.

        Padded, a replica with p stages and x seconds of chunks waits (p − 1) times for its longest chunk. Either one of
        them is full, and so as long as the shortest full one, F, or all are partial, at most one per bucket of R, and
        the longest is at least x / R. So x ≤ t · (1 − min((p − 1)·F / t, (p − 1) / (R + p − 1))), and this share
        shrinks with t. Packed, with c even chunks: x / c is at least F / 2 if c > 1, and x otherwise.
        """
        full_KR = np.where(self.holds_KR, self.slope_KR * self.size_KR + self.base_KR, np.inf)
        # A replica that holds nothing runs nothing, so its value is arbitrary.
        full_K = np.where(self.holds_KR.any(axis=1), full_KR.min(axis=1), 0.0)
        rests_K = np.maximum(self.holds_KR.sum(axis=1), 1)
        if self.is_packed:
            full_K, rests_K = full_K / 2, np.ones_like(rests_K)
        share_K = self.extra_K / (rests_K + self.extra_K)
        filling_K = self.extra_K * full_K / below_s
        stretch_K: FloatArray = 1.0 / (1.0 - np.minimum(filling_K, share_K))
        return stretch_K

    def seconds(self, counts_KR: IntArray) -> FloatArray:
        if self.is_packed:
            base_K = np.max(np.where(counts_KR > 0, self.base_KR, 0.0), axis=1)
            return self._packed_s((self.slope_KR * counts_KR).sum(axis=1), counts_KR @ self.mean_R, base_K, 0)
        sums_KR, longest_KR = self._chunks(counts_KR)
        seconds_K: FloatArray = sums_KR.sum(axis=1) + self.extra_K * longest_KR.max(axis=1)
        return seconds_K

    def seconds_with(self, counts_KR: IntArray, added_KR: IntArray) -> FloatArray:
        """Seconds of every replica [k, j] if its count of bucket j changed by `added_KR`."""
        if self.is_packed:
            base_K = np.max(np.where(counts_KR > 0, self.base_KR, 0.0), axis=1)
            compute_KR = (self.slope_KR * counts_KR).sum(axis=1)[:, None] + self.slope_KR * added_KR
            tokens_KR = (counts_KR @ self.mean_R)[:, None] + self.mean_R * added_KR
            return self._packed_s(compute_KR, tokens_KR, base_K[:, None], 1)
        sums_KR, longest_KR = self._chunks(counts_KR)
        new_KR, new_longest_KR = self._chunks(counts_KR + added_KR)
        # Where the longest chunk itself shrinks this is a little too long.
        longest = np.maximum(longest_KR.max(axis=1)[:, None], new_longest_KR)
        seconds_KR: FloatArray = sums_KR.sum(axis=1)[:, None] - sums_KR + new_KR + self.extra_K[:, None] * longest
        return seconds_KR

    def _chunks(self, counts_KR: IntArray) -> tuple[FloatArray, FloatArray]:
        """Seconds of all chunks of a bucket, and of the longest of them."""
        size = np.maximum(self.size_KR, 1)
        full, rest = np.divmod(counts_KR, size)
        full_s = self.slope_KR * size + self.base_KR
        rest_s = np.where(rest > 0, self.slope_KR * rest + self.base_KR, 0.0)
        return full * full_s + rest_s, np.maximum(np.where(full > 0, full_s, 0.0), rest_s)

    def _packed_s(self, compute: FloatArray, tokens: FloatArray, base: FloatArray, num_axes: int) -> FloatArray:
        most, extra = (x[:, None] if num_axes else x for x in (self.most_K, self.extra_K))
        chunks = np.maximum(np.ceil(tokens / most - 1e-9), 1.0)
        seconds: FloatArray = (compute + base * np.where(tokens > 0, chunks, 0.0)) * (1.0 + extra / chunks)
        return seconds
