"""Planners for one stage that never change a job's order: greedy, exact, auto and LoRAFusion's, by name.

Problem: min number of microbatches for the samples that the greedy planner would run, subject to the capacity, each
job's own order, and a job's global batch b + 1 only after its step b. Same samples, fewer microbatches: fairness over
the program stays that of the greedy planner.

Lower bound: tokens and the other bounds of `bounds.py`, and the longest chain: a job alone, its batches one by one.
Where greedy meets the bound nothing else is done. Otherwise search by levels: all states (samples done of each job)
that k microbatches can reach, kept only where no other state has done at least as much of every job; taking more
never hurts, so that is exact. The first level that holds the end is the optimum. Exponential in the number of jobs;
`max_states` bounds the work, deterministically, and beyond it the states that have done most are kept. `budget_s` is
for those whom a slow machine would keep waiting: once it is spent, what has been found is the answer.
Jobs of different priority are left to the greedy planner, whose order between priorities is a promise.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from weft.errors import PlanError
from weft.plan.pack.bins import fewest_bins
from weft.plan.pack.greedy import pack, pack_lane, plan_lanes
from weft.plan.pack.lorafusion import LoraFusionPlanner
from weft.plan.planner import PlanFunction, Planner
from weft.plan.program import Program, Step, Turn
from weft.plan.types import JobQueue, Limits, Microbatch, Segment

AUTO_STATES, AUTO_S = 300, 0.05
"""Limits of the search of `auto`: 10 to 20 ms for a program of 16 microbatches."""
EXACT_STATES, EXACT_S = 4_000, 1.0
"""Limits of the search of `exact`: about half a second."""

State = tuple[int, ...]


@dataclass(frozen=True)
class FunctionPlanner(Planner):
    """A planner for one device made of a plain function; when it is late, microbatches are packed greedily."""

    function: PlanFunction

    def __call__(self, queues: Sequence[JobQueue], limits: Limits) -> Program:
        return self.function(queues, limits)

    @property
    def quick(self) -> Planner:
        return GREEDY

    @property
    def can_be_replaced(self) -> bool:
        return False


GREEDY = FunctionPlanner(pack)


@dataclass(frozen=True)
class ExactPlanner(Planner):
    """A planner with the fewest microbatches that its number of states lets it find; never more than greedy."""

    max_states: int
    budget_s: float
    """Most seconds for searching; with none, or with nothing found in time, the program is the greedy one."""
    has_budget = True

    def __call__(self, queues: Sequence[JobQueue], limits: Limits) -> Program:
        """The next program; lanes share the time for searching."""
        num_lanes = len({queue.lane for queue in queues})
        return plan_lanes(self.within(self.budget_s / max(num_lanes, 1))._plan_lane, queues, limits)

    def _plan_lane(self, queues: Sequence[JobQueue], limits: Limits) -> Program:
        program = pack_lane(queues, limits)
        chains = _chains(program) if self.budget_s > 0 and len({q.priority for q in queues}) == 1 else []
        fewest = lower_bound(chains, limits.capacity) if chains else len(program.microbatches)
        until = time.perf_counter() + self.budget_s
        found: list[State] | None = None
        # A narrow search first, so that a wide one that runs out of time is no worse.
        for num_states in sorted({min(self.max_states, AUTO_STATES), self.max_states}):
            num = len(program.microbatches) if found is None else len(found) - 1
            if num <= fewest:
                break
            try:
                found = _search(chains, limits.capacity, num, num_states, until) or found
            except TimeoutError:
                break
        return program if found is None else _rebuilt(program, chains, found)

    @property
    def quick(self) -> Planner:
        return GREEDY

    def within(self, budget_s: float) -> ExactPlanner:
        return replace(self, budget_s=min(self.budget_s, budget_s))


def planner_named(name: str) -> Planner:
    planners: dict[str, Planner] = {
        "greedy": GREEDY,
        "auto": ExactPlanner(AUTO_STATES, AUTO_S),
        "exact": ExactPlanner(EXACT_STATES, EXACT_S),
        "lorafusion": LoraFusionPlanner(),
    }
    if name not in planners:
        raise PlanError(f"planner is '{name}'; use {', '.join(sorted(planners))}.")
    return planners[name]


def lower_bound(chains: Sequence[Sequence[Segment]], capacity: int) -> int:
    """Fewest microbatches any order-keeping plan of these samples needs."""
    everything = [s for chain in chains for s in chain]
    alone = 0
    for chain in chains:
        num, used, step = 0, 0, -1
        for s in chain:
            if s.step != step or used + s.length > capacity:
                num, used, step = num + 1, 0, s.step
            used += s.length
        alone = max(alone, num)
    return max(alone, fewest_bins(everything, capacity))


def _chains(program: Program) -> list[list[Segment]]:
    chains: dict[str, list[Segment]] = {}
    for microbatch in program.microbatches:
        for s in microbatch.segments:
            chains.setdefault(s.job, []).append(s)
    return [chains[job] for job in sorted(chains)]


def _search(
    chains: list[list[Segment]], capacity: int, limit: int, max_states: int, until: float
) -> list[State] | None:
    """States after each microbatch of a plan with fewer than `limit`; None if none was found. TimeoutError after
    `until`."""
    end = tuple(len(c) for c in chains)
    sums = [_prefix_sums(c) for c in chains]
    start: State = (0,) * len(chains)
    came_from: dict[State, State] = {}
    level = [start]
    budget = max_states
    for _ in range(limit - 1):
        reached: dict[State, State] = {}
        for state in level:
            for after in _fillings(chains, sums, state, capacity, budget):
                reached.setdefault(after, state)
            budget -= 1
            _require_time(until)
        level = _undominated(reached, max(1, budget // max(1, limit)), sums, until)
        came_from.update((s, reached[s]) for s in level)
        if end in reached:
            came_from[end] = reached[end]
            path = [end]
            while path[-1] != start:
                path.append(came_from[path[-1]])
            return path[::-1]
        if budget <= 0:
            level = level[:1]
    return None


def _require_time(until: float) -> None:
    if time.perf_counter() > until:
        raise TimeoutError


def _prefix_sums(chain: list[Segment]) -> list[int]:
    sums = [0]
    for s in chain:
        sums.append(sums[-1] + s.length)
    return sums


def _fillings(
    chains: list[list[Segment]], sums: list[list[int]], state: State, capacity: int, most: int
) -> list[State]:
    """States after one microbatch that has no room for any job's next sample; at most so many."""
    partial: list[tuple[State, int]] = [((), 0)]
    for j, done in enumerate(state):
        grown = []
        for taken, used in partial:
            n = done
            while True:
                grown.append(((*taken, n), used + sums[j][n] - sums[j][done]))
                is_end = n == len(chains[j]) or chains[j][n].step != chains[j][done].step
                if is_end or used + sums[j][n + 1] - sums[j][done] > capacity:
                    break
                n += 1
        # The fullest are the most promising.
        partial = sorted(grown, key=lambda g: (-g[1], g[0]))[: max(most, 1)]
    return [s for s, used in partial if s != state and not _has_room(chains, state, s, capacity - used)]


def _has_room(chains: list[list[Segment]], before: State, after: State, free: int) -> bool:
    for chain, done, n in zip(chains, before, after, strict=True):
        if n < len(chain) and chain[n].step == chain[done].step and chain[n].length <= free:
            return True
    return False


def _undominated(reached: dict[State, State], most: int, sums: list[list[int]], until: float) -> list[State]:
    """States that no other has overtaken in every job, those with most tokens done first."""
    ranked = sorted(reached, key=lambda s: (-sum(t[n] for t, n in zip(sums, s, strict=True)), s))
    kept: list[State] = []
    for state in ranked:
        if len(kept) == most:
            break
        _require_time(until)
        if not any(all(a >= b for a, b in zip(other, state, strict=True)) for other in kept):
            kept.append(state)
    return kept


def _rebuilt(program: Program, chains: list[list[Segment]], path: list[State]) -> Program:
    stepped = {step for turn in program.turns for step in turn.steps}
    turns = [turn for turn in program.turns[:1] if not turn.microbatch.segments]
    for before, after in pairwise(path):
        runs = [chain[a:b] for chain, a, b in zip(chains, before, after, strict=True)]
        ended = [
            Step(run[-1].job, run[-1].step)
            for chain, run, n in zip(chains, runs, after, strict=True)
            if run and (n == len(chain) or chain[n].step != run[-1].step)
        ]
        microbatch = Microbatch(tuple(s for run in runs for s in run))
        turns.append(Turn(microbatch, tuple(step for step in ended if step in stepped)))
    return Program.from_turns(turns)
