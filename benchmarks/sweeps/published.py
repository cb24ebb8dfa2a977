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
from typing import Any

import numpy as np

from weft.plan.cost.hardware import Hardware, find_hardware
from weft.plan.cost.shape import ModelShape
from weft.plan.sweep.bounds import lower_bound_s, one_by_one_s
from weft.plan.sweep.cost import Floats, Ints, PackCost, SweepSetting
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


class PackProgram:
    """Packs of the given kinds, at most so many of each, in one way of running: the mixed-integer program of F(d, K).

        max  Σ rank_k · h_k − θ · T(h)          T(h) = Σ own_k · h_k + W
        s.t. W ≥ line · M + line' · Σ rows_k · h_k            for both lines of the frozen step
             M ≥ Σ rows_k · h_k / C',   M ≥ s · z_s,   h_k ≤ n_k · z_s for steps_k = s
             Σ adapter_k · h_k + Σ_w wider_w · y_w ≤ room,    h_k ≤ n_k · y_w for every rank class w up to k's own
             h whole, z and y 0 or 1

    Columns h | z | y | M | W. M counts in units of the most steps, W of its time, bytes of the room: the solver's
    tolerances are absolute.
    """

    def __init__(self, cost: PackCost, way: int, kinds: Sequence[int], most: Sequence[int]) -> None:
        kind = np.asarray(kinds)
        self.most = np.asarray(most)
        self.ranks = np.array([cost.kinds[k].rank for k in kinds], dtype=float)
        self.rows, self.steps, self.own = cost.rows[kind], cost.steps[kind], cost.own[kind, way]
        self.lines = (cost.small[:, way], cost.large[:, way])
        self.filled = float(cost.filled[way])
        self.lengths = np.unique(self.steps)
        self.unit = float(self.lengths[-1])
        self.unit_s = self.unit * float(self.lines[0][0])
        rooms, adapter = cost.room[:, way], cost.adapter[kind, way]
        wider = np.maximum(rooms[:-1] - rooms[1:], 0.0)
        self.classes = np.arange(1, len(rooms))
        self.width = cost.width[kind]
        self._rows = self._constraints(adapter / rooms[0], wider / rooms[0])

    def seconds(self, counts: Ints) -> float:
        """T(h), without rounding to whole microbatches."""
        rows = float(self.rows @ counts)
        microbatches = max(rows / self.filled, float((self.steps * (counts > 0)).max()))
        frozen = max(float(line[0] * microbatches + line[1] * rows) for line in self.lines)
        return float(self.own @ counts) + frozen

    def rate(self, counts: Ints) -> float:
        """Ranks per second."""
        return float(self.ranks @ counts) / self.seconds(counts)

    def solve(self, theta: float) -> Ints:
        """The counts that maximise ranks less θ times the seconds."""
        from scipy.optimize import Bounds, LinearConstraint, milp

        n, switches = len(self.most), len(self.lengths) + len(self.classes)
        matrix, limits = self._rows
        upper = np.concatenate([self.most, np.ones(switches), [np.inf, np.inf]])
        result = milp(
            np.concatenate([theta * self.own - self.ranks, np.zeros(switches + 1), [theta * self.unit_s]]),
            integrality=np.concatenate([np.ones(n + switches), [0, 0]]),
            bounds=Bounds(np.zeros(len(upper)), upper),
            constraints=LinearConstraint(matrix, -np.inf, limits),
        )
        return np.asarray(np.round(result.x[:n]).astype(np.int64))

    def _constraints(self, adapter: Floats, wider: Floats) -> tuple[Floats, Floats]:
        n, num_z, num_y = len(self.most), len(self.lengths), len(self.classes)
        rows: list[Any] = []

        def row(h: Any = 0.0, z: Any = 0.0, y: Any = 0.0, m: float = 0.0, w: float = 0.0) -> None:
            parts = (np.zeros(n) + h, np.zeros(num_z) + z, np.zeros(num_y) + y, [m, w])
            rows.append(np.concatenate(parts))

        for line in self.lines:
            row(h=line[1] * self.rows / self.unit_s, m=line[0] * self.unit / self.unit_s, w=-1.0)
        row(h=self.rows / self.filled / self.unit, m=-1.0)
        each, z, y = np.eye(n), np.eye(num_z), np.eye(num_y)
        for index, length in enumerate(self.lengths):
            row(z=z[index] * length / self.unit, m=-1.0)
        for i in range(n):
            row(h=each[i], z=-z[np.searchsorted(self.lengths, self.steps[i])] * self.most[i])
            for index in range(self.width[i]):
                row(h=each[i], y=-y[index] * self.most[i])
        row(h=adapter, y=wider)
        limits = np.zeros(len(rows))
        limits[-1] = 1.0
        return np.array(rows), limits


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
