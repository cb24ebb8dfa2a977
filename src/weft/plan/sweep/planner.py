"""Plans a sweep: packs of configurations, their GPUs and their times.

    min  max end     s.t.  every configuration in one pack, packs of one GPU one after another, every pack within memory

NP-hard (PLoRA, section 6.1). Candidates are every cut of the GPUs into groups of powers of two that stay as they are,
and for every degree d the plan that trains on d GPUs whatever fits there, after what needs more. The most promising are
improved; the shortest is returned with a lower bound (`bounds.py`), so its distance from the best is known. Tests
compare both with brute force.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from weft.plan.cost.hardware import Hardware, find_hardware
from weft.plan.cost.shape import ModelShape
from weft.plan.sweep.assign import Assigner, DeviceLane
from weft.plan.sweep.bounds import lower_bound_s
from weft.plan.sweep.cost import PackCost, SweepSetting
from weft.plan.sweep.solo import one_by_one_s
from weft.plan.sweep.types import Configuration, Pack, SweepPlan

MOST_CUT = 8
"""GPUs up to which all cuts into groups are tried (10 for 8); above, groups of one size."""
CLOSE = 1.002
"""A plan this close to its bound ends the search."""
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
) -> SweepPlan:
    """The plan for G GPUs of one kind; deterministic. Given `recompute` or `capacity`, every pack has these.

    A pack has at most `max_degree` GPUs: 1 where each holds a whole backbone.
    """
    hardware = find_hardware(device) if isinstance(device, str) else device
    setting = SweepSetting(
        shape=shape,
        hardware=hardware,
        num_gpus=gpus,
        quantize=quantize,
        recompute=recompute,
        capacity=capacity,
        memory_share=memory_share,
        max_degree=max_degree,
    )
    cost = PackCost(configurations, setting)
    bound = lower_bound_s(cost)
    assigner = Assigner(cost)
    best = _best(assigner, bound)
    tokens = sum(c.num_tokens for c in configurations)
    packs = _packs(best, assigner)
    together = (shape.name, hardware.name, gpus, setting.usable_bytes, packs, tokens, bound)
    return SweepPlan(*together, one_by_one_s(configurations, setting))


def _best(assigner: Assigner, bound: float) -> list[DeviceLane]:
    """The candidate that ends first; the most promising are improved."""

    def makespan(lanes: Sequence[DeviceLane]) -> float:
        return max(assigner.end_s(lane) for lane in lanes)

    promising = sorted(_candidates(assigner), key=makespan)[:NUM_IMPROVED]
    for lanes in promising:
        if min(map(makespan, promising)) <= CLOSE * bound:
            break
        smallest = min(lane.degree for lane in lanes)
        # In phases nobody waits for the last one alone; lanes that stay as they are have nobody waiting at all.
        is_phased = any(lane.ready_s for lane in lanes)
        assigner.improve([lane for lane in lanes if lane.degree == smallest or not is_phased])
    return min(promising, key=makespan)


def _candidates(assigner: Assigner) -> Iterator[list[DeviceLane]]:
    """Lanes filled with all kinds, in several ways."""
    cost = assigner.cost
    for degree in cost.setting.degrees:
        yield _in_phases(assigner, degree)
    if cost.setting.num_gpus > MOST_CUT:
        return
    for sizes in _cuts(cost.setting.num_gpus, cost.setting.degrees[-1]):
        lanes, first = [], 0
        for degree in sizes:
            lanes.append(DeviceLane(tuple(range(first, first + degree))))
            first += degree
        if len(set(sizes)) > 1 and assigner.fill(lanes, cost.kind_of):
            yield lanes


def _in_phases(assigner: Assigner, least: int) -> list[DeviceLane]:
    """Kinds that need many GPUs first, then on ever smaller groups, down to `least`, what fits there."""
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
    """The smallest group of at least so many GPUs that holds a kind; if none does, the largest that does."""
    fitting = [d for d in assigner.cost.setting.degrees if assigner.work_s(kind, d) < float("inf")]
    return next((d for d in fitting if d >= least), fitting[-1])


def _cuts(num_gpus: int, largest: int) -> Iterator[tuple[int, ...]]:
    """All ways to write a number as falling powers of two."""
    if num_gpus == 0:
        yield ()
    while largest:
        if largest <= num_gpus:
            for rest in _cuts(num_gpus - largest, largest):
                yield (largest, *rest)
        largest //= 2


def _packs(lanes: Sequence[DeviceLane], assigner: Assigner) -> tuple[Pack, ...]:
    """Lanes as packs, with the names of their configurations; those of one kind in the order they were given."""
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
