"""Makes an engine over ranks that are being loaded, for a run or a sweep."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from weft.model.source import load_tokenizer
from weft.parallel.replicas.following_engine import FollowingEngine
from weft.parallel.replicas.layout_keeper import LayoutKeeper
from weft.parallel.replicas.rank_group import RankGroup
from weft.parallel.replicas.replicated_engine import ReplicatedEngine
from weft.parallel.replicas.steered_engine import SweepReplicas
from weft.spec import RunSpec
from weft.wall_clock import Activity, WallClock

RunT = TypeVar("RunT", bound=RunSpec)
EngineT = TypeVar("EngineT", bound=ReplicatedEngine)


def load_replicated(
    spec: RunT,
    ranks: RankGroup,
    *,
    clock: datetime.datetime,
    wall: WallClock | None = None,
    notes: tuple[str, ...] = (),
) -> tuple[RunT, ReplicatedEngine, tuple[str, ...]]:
    """An engine over ranks with a run's settings and without jobs, and what is worth telling; `notes`: besides.

    The run comes back with a number where its capacity is `auto`, so that all that follows agrees on it.
    """
    spec, engine, told = _load(ReplicatedEngine, spec, ranks, clock, wall)
    return spec, engine, (*notes, *told)


def load_steered(
    spec: RunT, ranks: RankGroup, *, clock: datetime.datetime, wall: WallClock | None = None
) -> tuple[RunT, SweepReplicas, tuple[str, ...]]:
    """The same for jobs that are steered while they train, such as the trials of a sweep."""
    return _load(SweepReplicas, spec, ranks, clock, wall)


def load_following(
    spec: RunT,
    ranks: RankGroup,
    layouts: LayoutKeeper,
    *,
    clock: datetime.datetime,
    wall: WallClock | None = None,
    notes: tuple[str, ...] = (),
) -> tuple[RunT, ReplicatedEngine, tuple[str, ...]]:
    """The same in a layout that follows the jobs."""
    spec, engine, told = _load(partial(FollowingEngine, layouts=layouts), spec, ranks, clock, wall)
    return spec, engine, (*notes, *told)


def _load(
    kind: Callable[..., EngineT], spec: RunT, ranks: RankGroup, clock: datetime.datetime, wall: WallClock | None
) -> tuple[RunT, EngineT, tuple[str, ...]]:
    wall = wall or WallClock()
    try:
        tokenizer = load_tokenizer(spec.base_model)
        engine = kind(ranks, tokenizer, clock=clock, wall=wall, tenant_weights=spec.tenant_weights)
    except BaseException:
        ranks.abandon()
        raise
    wall.add_start(Activity.LOADING)
    return dataclasses.replace(spec, capacity=engine.limits.capacity), engine, engine.notes
