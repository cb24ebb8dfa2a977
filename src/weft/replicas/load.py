"""Chooses the devices of replicas, and starts an engine over them for a run."""

from __future__ import annotations

import dataclasses
import datetime
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from weft.backbone.load import choose_device, load_tokenizer
from weft.errors import ConfigError
from weft.kernels.device import gpus, is_gpu
from weft.replicas.messages import RankOrder
from weft.replicas.rank_pool import RankPool, Ranks
from weft.replicas.replicated_engine import ReplicatedEngine
from weft.replicas.steered_engine import SteeredEngine
from weft.spec import BackboneSpec, JobSpec, RunSpec
from weft.wall_clock import Activity, WallClock

RunT = TypeVar("RunT", bound=RunSpec)
EngineT = TypeVar("EngineT", bound=ReplicatedEngine)
AUTO = "auto"
VISIBLE = "CUDA_VISIBLE_DEVICES"
"""What torch sees of a machine's GPUs."""


@dataclass(frozen=True)
class ReplicaPlaces:
    """Where the replicas of a run are."""

    variables: Sequence[Mapping[str, str]]
    """Of each rank's environment."""
    open_pool: Callable[[RankOrder, Sequence[Mapping[str, str]]], Ranks] = RankPool
    """Makes what starts and hears the ranks."""
    manner: str = "each in a process of its own"
    """How they are there, for whoever reads along."""


def rank_variables(replicas: str | None, devices: str | None, backbone: BackboneSpec) -> list[dict[str, str]]:
    """What the environment of each rank says: which GPU is its own. ConfigError for more than there are."""
    number = _number(replicas)
    if not is_gpu(choose_device(backbone)):
        if devices is not None:
            raise ConfigError("are for GPUs, and this run is on a CPU; use --replicas.", where="--devices")
        return [{} for _ in range(number or 1)]
    visible = _visible(len(gpus()))
    chosen = _chosen(devices, len(visible))
    number = number or len(chosen)
    if number > len(chosen):
        found = f"got {number}; there {'is' if len(chosen) == 1 else 'are'} {len(chosen)}"
        raise ConfigError(f"{found} GPU{'' if len(chosen) == 1 else 's'}.", where="--replicas")
    return [{VISIBLE: visible[place]} for place in chosen[:number]]


def _number(replicas: str | None) -> int | None:
    """How many are asked for; None: as many as there are GPUs."""
    if replicas is None or replicas == AUTO:
        return None
    if not replicas.isdecimal() or int(replicas) < 1:
        raise ConfigError(f"got {replicas!r}; accepted are auto and numbers from 1.", where="--replicas")
    return int(replicas)


def _visible(count: int) -> list[str]:
    """What CUDA calls the GPUs that torch sees."""
    named = [name.strip() for name in os.environ.get(VISIBLE, "").split(",") if name.strip()]
    return named[:count] if named else [str(place) for place in range(count)]


def _chosen(devices: str | None, count: int) -> list[int]:
    if devices is None:
        return list(range(count))
    places = [part.strip() for part in devices.split(",")]
    for part in places:
        if not part.isdecimal() or int(part) >= count:
            raise ConfigError(f"got {part!r}; accepted are numbers from 0 to {count - 1}.", where="--devices")
    return [int(part) for part in places]


def rank_order(spec: RunSpec, jobs: Sequence[JobSpec]) -> RankOrder:
    """How every rank of a run sets itself up; `jobs` are those to come, or some of each kind."""
    return RankOrder(
        backbone=spec.backbone,
        capacity=spec.capacity,
        longest=max(job.max_length for job in jobs),
        planner=spec.planner,
        adapters=tuple(job.adapter for job in jobs),
        max_jobs=spec.max_jobs,
        memory_limit=spec.memory_limit,
        tenant_weights=dict(spec.tenant_weights),
    )


def load_replicated(
    spec: RunT,
    jobs: Sequence[JobSpec],
    places: ReplicaPlaces,
    *,
    clock: datetime.datetime,
    wall: WallClock | None = None,
) -> tuple[RunT, ReplicatedEngine, tuple[str, ...]]:
    """An engine over replicas with a run's settings and without jobs, and what is worth telling.

    The run comes back with a number where its capacity is `auto`, so that all that follows agrees on it.
    """
    return _load(ReplicatedEngine, spec, rank_order(spec, jobs), places, clock, wall)


def load_steered(
    spec: RunT,
    jobs: Sequence[JobSpec],
    places: ReplicaPlaces,
    *,
    clock: datetime.datetime,
    wall: WallClock | None = None,
) -> tuple[RunT, SteeredEngine, tuple[str, ...]]:
    """The same for jobs that are steered while they train, such as the trials of a sweep."""
    order = dataclasses.replace(rank_order(spec, jobs), is_steered=True)
    return _load(SteeredEngine, spec, order, places, clock, wall)


def _load(
    kind: type[EngineT],
    spec: RunT,
    order: RankOrder,
    places: ReplicaPlaces,
    clock: datetime.datetime,
    wall: WallClock | None,
) -> tuple[RunT, EngineT, tuple[str, ...]]:
    wall = wall or WallClock()
    tokenizer = load_tokenizer(spec.base_model)
    engine = kind(order, tokenizer, places.variables, clock=clock, wall=wall, open_pool=places.open_pool)
    wall.add_start(Activity.LOADING)
    return dataclasses.replace(spec, capacity=engine.limits.capacity), engine, engine.notes
