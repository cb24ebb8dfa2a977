"""Plans a sweep: packs of configurations, their GPUs and their times.

    min  max end     s.t.  every configuration in one pack, packs of one GPU one after another, every pack within memory

NP-hard (PLoRA, section 6.1). Candidates are every partition of the GPUs into fixed groups of the degrees there are,
and for every degree d the plan that trains on d GPUs what fits there, after what needs more. The most promising are
improved; the shortest is returned with a lower bound (`bounds.py`), so its distance from the optimum is known. Tests
compare both with brute force.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from weft.plan.cost.hardware import Hardware, find_hardware
from weft.plan.cost.shape import ModelShape
from weft.plan.sweep.bounds import lower_bound_s, one_by_one_s
from weft.plan.sweep.cost import Floats, PackCost, SweepSetting
from weft.plan.sweep.types import Configuration, Pack, SweepPlan

MOST_CUT = 8
"""GPUs up to which all partitions are tried (for 8, 10 of powers of two, 22 of stages); above, groups of one size."""
CLOSE = 1.002
"""Ratio to the lower bound at which the search ends."""
NUM_IMPROVED = 3


def plan_sweep(
    configurations: Sequence[Configuration],
    shape: ModelShape,
    device: str | Hardware,
    gpus: int = 1,
    *,
    quantize: str = "none",
    recompute: str | None = None,
    capacity: int | None = None,
    memory_share: float = 0.95,
    max_degree: int | None = None,
    plain_row_bytes: int | None = None,
    in_stages: bool = False,
    groups: Sequence[int] | None = None,
) -> SweepPlan:
    """The plan for `gpus` GPUs of one kind; deterministic. `recompute` and `capacity` apply to every pack. A pack has
    at most `max_degree` GPUs: 1 where each holds a whole backbone. `groups`: the GPUs of each group that there is,
    instead of the best. `plain_row_bytes`: as in `MemoryModel`; `in_stages`: as in `SweepSetting`."""
    hardware = find_hardware(device) if isinstance(device, str) else device
    setting = SweepSetting(
        shape=shape,
        hardware=hardware,
        num_gpus=gpus if groups is None else sum(groups),
        quantize=quantize,
        recompute=recompute,
        capacity=capacity,
        memory_share=memory_share,
        max_degree=max_degree,
        plain_row_bytes=plain_row_bytes,
        in_stages=in_stages,
        groups=None if groups is None else tuple(groups),
    )
    cost = PackCost(configurations, setting)
    bound = lower_bound_s(cost)
    assigner = Assigner(cost)
    best = _best(assigner, bound)
    tokens = sum(c.num_tokens for c in configurations)
    packs = _packs(best, assigner)
    together = (shape.name, hardware.name, setting.num_gpus, setting.usable_bytes, packs, tokens, bound)
    return SweepPlan(*together, one_by_one_s(configurations, replace(setting, in_stages=False)))


def _best(assigner: Assigner, bound: float) -> list[DeviceLane]:
    """The candidate that ends first, after improving the most promising."""

    def makespan(lanes: Sequence[DeviceLane]) -> float:
        return max(assigner.end_s(lane) for lane in lanes)

    promising = sorted(_candidates(assigner), key=makespan)[:NUM_IMPROVED]
    for lanes in promising:
        if min(map(makespan, promising)) <= CLOSE * bound:
            break
        smallest = min(lane.degree for lane in lanes)
        # In phases only the last group delays the end; fixed groups never wait for each other.
        is_phased = any(lane.ready_s for lane in lanes)
        assigner.improve([lane for lane in lanes if lane.degree == smallest or not is_phased])
    return min(promising, key=makespan)


def _candidates(assigner: Assigner) -> Iterator[list[DeviceLane]]:
    cost = assigner.cost
    setting = cost.setting
    if setting.groups is not None:
        lanes = _lanes(setting.groups)
        assert assigner.fill(lanes, cost.kind_of), "every kind fits on a degree there is"
        yield lanes
        return
    for degree in setting.degrees:
        yield _in_phases(assigner, degree)
    if setting.num_gpus > MOST_CUT:
        return
    for sizes in _cuts(setting.num_gpus, setting.degrees):
        lanes = _lanes(sizes)
        if len(set(sizes)) > 1 and assigner.fill(lanes, cost.kind_of):
            yield lanes


def _lanes(sizes: Sequence[int]) -> list[DeviceLane]:
    ends = itertools.accumulate(sizes)
    return [DeviceLane(tuple(range(end - size, end))) for size, end in zip(sizes, ends, strict=True)]


def _in_phases(assigner: Assigner, least: int) -> list[DeviceLane]:
    """Kinds that need many GPUs first, then ever smaller groups down to `least`, with what fits there."""
    cost = assigner.cost
    ready = [0.0] * cost.setting.num_gpus
    lanes: list[DeviceLane] = []
    for degree in reversed(cost.setting.degrees):
        mine = [kind for kind in cost.kind_of if _degree(assigner, kind, least) == degree]
        if not mine:
            continue
        firsts = range(0, len(ready) - degree + 1, degree)
        groups = [DeviceLane(tuple(range(i, i + degree)), max(ready[i : i + degree])) for i in firsts]
        assert assigner.fill(groups, mine)
        for lane in groups:
            for gpu in lane.gpus:
                ready[gpu] = assigner.end_s(lane)
        lanes += groups
    return lanes


def _degree(assigner: Assigner, kind: int, least: int) -> int:
    """The smallest group of at least `least` GPUs that holds a kind; otherwise the largest that does."""
    fitting = [d for d in assigner.cost.setting.degrees if assigner.work_s(kind, d) < float("inf")]
    return next((d for d in fitting if d >= least), fitting[-1])


def _cuts(num_gpus: int, degrees: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All ways to write a number as a falling sum of degrees."""
    if num_gpus == 0:
        yield ()
    for i in reversed(range(len(degrees))):
        if degrees[i] <= num_gpus:
            for rest in _cuts(num_gpus - degrees[i], degrees[: i + 1]):
                yield (degrees[i], *rest)


def _packs(lanes: Sequence[DeviceLane], assigner: Assigner) -> tuple[Pack, ...]:
    """The packs of all lanes with named configurations; those of one kind keep their order."""
    cost = assigner.cost
    names: dict[int, deque[str]] = {}
    for kind, configuration in zip(cost.kind_of, cost.configurations, strict=True):
        names.setdefault(kind, deque()).append(configuration.name)
    packs = []
    for lane in lanes:
        start = lane.ready_s
        for cut in assigner.split(lane).cuts:
            way = cost.ways[cut.way]
            own = tuple(names[kind].popleft() for kind in cut.kinds)
            used = cost.gpu_bytes(cut.kinds, way)
            packs.append(
                Pack(
                    configurations=own,
                    gpus=lane.gpus,
                    start_s=start,
                    end_s=start + cut.seconds,
                    capacity=way.capacity,
                    recompute=way.recompute,
                    gpu_bytes=used,
                )
            )
            start += cut.seconds
    return tuple(sorted(packs, key=lambda pack: (pack.start_s, pack.gpus)))


MAX_PACK = 64
"""Maximum number of configurations of one pack; far more than fill a microbatch."""


@dataclass(frozen=True, slots=True)
class Cut:
    kinds: tuple[int, ...]
    way: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Split:
    """Packs in turn, the longest first; `seconds` is inf if one does not fit."""

    seconds: float
    cuts: tuple[Cut, ...] = ()


class Splitter:
    def __init__(self, cost: PackCost) -> None:
        self.cost = cost
        self._known: dict[tuple[int, tuple[int, ...]], Split] = {}

    def split(self, kinds: Sequence[int], degree: int) -> Split:
        key = degree, tuple(sorted(kinds))
        if key not in self._known:
            steps, ranks = self.cost.steps, [kind.rank for kind in self.cost.kinds]
            by_steps = sorted(kinds, key=lambda k: (-steps[k], -ranks[k], k))
            by_rank = sorted(kinds, key=lambda k: (-ranks[k], -steps[k], k))
            found = [self._cut(by_steps, degree)]
            if by_rank != by_steps:
                found.append(self._cut(by_rank, degree))
            self._known[key] = min(found, key=lambda split: split.seconds)
        return self._known[key]

    def _cut(self, order: Sequence[int], degree: int) -> Split:
        n = len(order)
        best = np.full(n + 1, np.inf)
        best[0] = 0.0
        came: list[tuple[int, int, float]] = [(0, 0, 0.0)] * (n + 1)
        for start in range(n):
            if not np.isfinite(best[start]):
                break
            end = min(n, start + MAX_PACK)
            seconds, ways = self.cost.prefixes(order[start:end], degree)
            for offset in np.flatnonzero(best[start] + seconds < best[start + 1 : end + 1]):
                stop = start + int(offset) + 1
                best[stop] = best[start] + seconds[offset]
                came[stop] = start, int(ways[offset]), float(seconds[offset])
        if not np.isfinite(best[n]):
            return Split(float("inf"))
        cuts, stop = [], n
        while stop:
            start, way, seconds_s = came[stop]
            cuts.append(Cut(tuple(order[start:stop]), way, seconds_s))
            stop = start
        return Split(float(best[n]), tuple(sorted(cuts, key=lambda cut: (-cut.seconds, cut.kinds))))


MAX_TRIES = 120
"""Changes tried for one assignment, about a millisecond each."""


@dataclass
class DeviceLane:
    gpus: tuple[int, ...]
    ready_s: float = 0.0
    kinds: list[int] = field(default_factory=list)

    @property
    def degree(self) -> int:
        return len(self.gpus)


class Assigner:
    def __init__(self, cost: PackCost) -> None:
        self.cost = cost
        self.splitter = Splitter(cost)
        self._work = {degree: self._estimates(degree) for degree in cost.setting.degrees}

    def _estimates(self, degree: int) -> Floats:
        """Seconds of every kind in full microbatches; inf where it does not fit."""
        cost, ways = self.cost, self.cost.degree == degree
        line = cost.large[:, ways]
        work = cost.own[:, ways] + cost.rows[:, None] * (line[1] + line[0] / cost.filled[ways])
        fits = cost.adapter[:, ways] <= cost.room[cost.width][:, ways]
        return np.asarray(np.where(fits, work, np.inf).min(axis=1))

    def work_s(self, kind: int, degree: int) -> float:
        """Estimated seconds that a kind adds to a lane; inf where it does not fit."""
        return float(self._work[degree][kind])

    def split(self, lane: DeviceLane) -> Split:
        return self.splitter.split(lane.kinds, lane.degree) if lane.kinds else Split(0.0)

    def end_s(self, lane: DeviceLane) -> float:
        return lane.ready_s + self.split(lane).seconds

    def fill(self, lanes: Sequence[DeviceLane], kinds: Sequence[int]) -> bool:
        """Assigns kinds to lanes, longest first; False if one fits on none."""
        loads = [lane.ready_s for lane in lanes]
        widest = max(lane.degree for lane in lanes)
        for kind in sorted(kinds, key=lambda k: (-self.work_s(k, widest), k)):
            ends = [load + self.work_s(kind, lane.degree) for load, lane in zip(loads, lanes, strict=True)]
            taker = int(np.argmin(ends))
            if not np.isfinite(ends[taker]):
                return False
            lanes[taker].kinds.append(kind)
            loads[taker] = ends[taker]
        return True

    def improve(self, lanes: Sequence[DeviceLane]) -> None:
        """Moves kinds between lanes while the last of them then ends sooner."""
        tries_left = MAX_TRIES
        while tries_left > 0:
            last = max(lanes, key=self.end_s)
            others = sorted((lane for lane in lanes if lane is not last), key=self.end_s)
            changes = ((lane, *change) for lane in others for change in self._changes(last, lane))
            for lane, mine, theirs in itertools.islice(changes, tries_left):
                tries_left -= 1
                if self._accept(last, lane, mine, theirs):
                    break
            else:
                return

    def _accept(self, last: DeviceLane, lane: DeviceLane, mine: list[int], theirs: list[int]) -> bool:
        """Makes a change if the later of both lanes then ends sooner."""
        limit = self.end_s(last) * (1 - 1e-9)
        if last.ready_s + self._seconds(mine, last.degree) >= limit:
            return False
        if lane.ready_s + self._seconds(theirs, lane.degree) >= limit:
            return False
        last.kinds, lane.kinds = mine, theirs
        return True

    def _seconds(self, kinds: list[int], degree: int) -> float:
        return self.splitter.split(kinds, degree).seconds if kinds else 0.0

    def _changes(self, last: DeviceLane, lane: DeviceLane) -> Iterator[tuple[list[int], list[int]]]:
        """Both lanes' kinds after a move, or after an exchange for a smaller one."""
        for kind in sorted(set(last.kinds), key=lambda k: (self.work_s(k, last.degree), k)):
            rest = _without(last.kinds, kind)
            yield rest, [*lane.kinds, kind]
            for other in sorted(set(lane.kinds)):
                if self.work_s(other, last.degree) < self.work_s(kind, last.degree):
                    yield [*rest, other], [*_without(lane.kinds, other), kind]


def _without(kinds: Sequence[int], kind: int) -> list[int]:
    rest = list(kinds)
    rest.remove(kind)
    return rest
