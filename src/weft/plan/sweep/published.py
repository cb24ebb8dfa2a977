"""PLoRA's planner as printed (its algorithms 1 and 2), with an open solver: the baseline ours is compared with.

F(d, K)      one pack on d GPUs with the most throughput:  max Σ h_k · rank_k / T(h)   s.t.  Σ h_k · adapter_k ≤ room
             a ratio, so solved by Dinkelbach's method: max Σ h_k · rank_k − θ · T(h) with HiGHS until θ stands still
DTM(g, K)    F for d = g', g'/2, …, 1 with g' = 2^⌊log₂ g⌋, and DTM on what is left of GPUs and configurations: 1, 3, 6,
             12, 22, 40, 71, 127 calls of F for 1 … 8 GPUs. Of all policies the one with least T(p): as policies hold
             different configurations, T(p) is the time all of K takes at the policy's throughput (its Eq. 12)
job planner  DTM on the GPUs that are free, whenever some are

Configurations that cost the same are one integer variable, and F is remembered by (d, K); neither changes an answer.
Each degree has one way of running (`cost.py`): of those that hold most kinds, the one with least work.
The paper's bound: a schedule that ends at F, its last job taking T_last on D of G GPUs, is within
F / (F − T_last·(G−D)/G) of the best, if packs of that throughput are the best there are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from weft.plan.cost.hardware import Hardware, find_hardware
from weft.plan.cost.shape import ModelShape
from weft.plan.sweep.bounds import lower_bound_s
from weft.plan.sweep.cost import PackCost, SweepSetting
from weft.plan.sweep.program import PackProgram
from weft.plan.sweep.solo import one_by_one_s
from weft.plan.sweep.types import Configuration, Pack, SweepPlan

MAX_ROUNDS = 20
"""Of Dinkelbach's method; it converges faster than linearly, in about four."""
Counts = tuple[int, ...]
"""Of every kind."""


@dataclass(frozen=True)
class PublishedPlan:
    """What PLoRA's planner returns, and what it took."""

    plan: SweepPlan
    solver_calls: int
    """Of F, as printed."""
    solves: int
    """Of F that were not remembered."""
    tail_bound: float
    """The paper's approximation ratio."""


@dataclass(frozen=True, slots=True)
class Packed:
    """One pack of a policy."""

    degree: int
    counts: Counts
    seconds: float
    throughput: float
    """Ranks per second."""


def plan_published(
    configurations: Sequence[Configuration], shape: ModelShape, device: str | Hardware, gpus: int = 1
) -> PublishedPlan:
    """The job planner's schedule of all configurations on G GPUs."""
    hardware = find_hardware(device) if isinstance(device, str) else device
    setting = SweepSetting(shape, hardware, gpus)
    cost = PackCost(configurations, setting)
    planner = JobPlanner(cost)
    packs = planner.schedule()
    tokens = sum(c.num_tokens for c in configurations)
    together = (shape.name, hardware.name, gpus, setting.usable_bytes, packs, tokens, lower_bound_s(cost))
    plan = SweepPlan(*together, one_by_one_s(configurations, setting))
    last = max(packs, key=lambda pack: pack.end_s)
    bound = tail_bound(plan.makespan_s, last.seconds, len(last.gpus), gpus)
    return PublishedPlan(plan, planner.throughput.calls, planner.throughput.solves, bound)


def tail_bound(makespan_s: float, last_s: float, last_gpus: int, num_gpus: int) -> float:
    """Theorem 6.1: AR ≤ F / (F − T_last · (G − D) / G)."""
    return makespan_s / (makespan_s - last_s * (num_gpus - last_gpus) / num_gpus)


class Throughput:
    """Computes F(d, K) once for each pair and remembers it."""

    def __init__(self, cost: PackCost) -> None:
        self.cost = cost
        self.calls = 0
        self.solves = 0
        self.ways = {degree: self._way(degree) for degree in cost.setting.degrees}
        self._known: dict[tuple[int, Counts], Packed | None] = {}

    def _way(self, degree: int) -> int:
        cost = self.cost
        fits = cost.adapter <= cost.room[cost.width]
        work = cost.own + cost.rows[:, None] * (cost.large[1] + cost.large[0] / cost.filled)
        ways = np.flatnonzero(cost.degree == degree)
        return int(min(ways, key=lambda q: (-fits[:, q].sum(), work[fits[:, q], q].sum())))

    def __call__(self, degree: int, left: Counts) -> Packed | None:
        """The pack with most throughput; None if nothing that is left fits."""
        self.calls += 1
        key = degree, left
        if key not in self._known:
            self.solves += 1
            self._known[key] = self._solve(degree, left)
        return self._known[key]

    def _solve(self, degree: int, left: Counts) -> Packed | None:
        cost, way = self.cost, self.ways[degree]
        room = cost.room[cost.width, way]
        kinds = [k for k, count in enumerate(left) if count and cost.adapter[k, way] <= room[k]]
        if not kinds:
            return None
        program = PackProgram(cost, way, kinds, [left[k] for k in kinds])
        counts = np.eye(len(kinds), dtype=np.int64)[0]
        for _ in range(MAX_ROUNDS):
            found = program.solve(program.rate(counts))
            if not found.any() or program.rate(found) <= program.rate(counts) * (1 + 1e-9):
                break
            counts = found
        whole = [0] * len(left)
        for kind, count in zip(kinds, counts, strict=True):
            whole[kind] = int(count)
        seconds = cost.seconds(_listed(whole), way)
        return Packed(degree, tuple(whole), seconds, float(program.ranks @ counts) / seconds)


class JobPlanner:
    """Algorithm 2: fills free GPUs by DTM until everything has been scheduled."""

    def __init__(self, cost: PackCost) -> None:
        self.cost = cost
        self.throughput = Throughput(cost)

    def dtm(self, gpus: int, left: Counts) -> list[Packed]:
        """Algorithm 1: the policy with most throughput for so many free GPUs."""
        policies: list[list[Packed]] = []

        def helper(free: int, policy: list[Packed], rest: Counts) -> None:
            if free <= 0 or not any(rest):
                policies.append(policy)
                return
            degree = 1 << (free.bit_length() - 1)
            while degree:
                found = self.throughput(degree, rest)
                if found is None:
                    helper(free - degree, policy, rest)
                else:
                    after = tuple(a - b for a, b in zip(rest, found.counts, strict=True))
                    helper(free - degree, [*policy, found], after)
                degree //= 2

        helper(gpus, [], left)
        return max(policies, key=lambda policy: sum(pack.throughput for pack in policy))

    def schedule(self) -> tuple[Pack, ...]:
        """Packs in the order in which they start."""
        cost = self.cost
        names: dict[int, deque[str]] = {}
        for kind, configuration in zip(cost.kind_of, cost.configurations, strict=True):
            names.setdefault(kind, deque()).append(configuration.name)
        left = tuple(len(names[kind]) for kind in range(len(cost.kinds)))
        free_at = [0.0] * cost.setting.num_gpus
        now, packs = 0.0, list[Pack]()
        while any(left):
            free = [gpu for gpu, at in enumerate(free_at) if at <= now * (1 + 1e-12)]
            for found in self.dtm(len(free), left):
                gpus, free = tuple(free[: found.degree]), free[found.degree :]
                way = cost.ways[self.throughput.ways[found.degree]]
                kinds = _listed(found.counts)
                own = tuple(names[kind].popleft() for kind in kinds)
                end = now + found.seconds
                used = cost.gpu_bytes(kinds, way)
                packs.append(
                    Pack(
                        configurations=own,
                        gpus=gpus,
                        start_s=now,
                        end_s=end,
                        capacity=way.capacity,
                        recompute=way.recompute,
                        gpu_bytes=used,
                    )
                )
                for gpu in gpus:
                    free_at[gpu] = end
                left = tuple(a - b for a, b in zip(left, found.counts, strict=True))
            now = min((at for at in free_at if at > now * (1 + 1e-12)), default=now)
        return tuple(packs)


def _listed(counts: Sequence[int]) -> list[int]:
    return [kind for kind, count in enumerate(counts) for _ in range(count)]
