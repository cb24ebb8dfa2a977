"""Makes an engine over ranks that are being loaded, for a run or a sweep."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from weft.model.source import load_tokenizer
from weft.parallel.replicas.following_engine import FollowingEngine, LayoutKeeper
from weft.parallel.replicas.rank_group import RankGroup
from weft.parallel.replicas.replicated_engine import ReplicatedEngine
from weft.parallel.replicas.steered_engine import SweepReplicas
from weft.spec import RunSpec
from weft.store.wall_clock import Activity, WallClock

RunT = TypeVar("RunT", bound=RunSpec)
EngineT = TypeVar("EngineT", bound=ReplicatedEngine)


def load_replicated(
    spec: RunT,
    ranks: RankGroup,
    *,
    clock: datetime.datetime,
    wall: WallClock | None = None,
    notes: tuple[str, ...] = (),
    layouts: LayoutKeeper | None = None,
) -> tuple[RunT, ReplicatedEngine, tuple[str, ...]]:
    """An engine over ranks with a run's settings and without jobs, and notes for the user; `layouts`: its layout
    follows the jobs. In the returned run a capacity of `auto` is a number, so that all that follows agrees on it."""
    kind = ReplicatedEngine if layouts is None else partial(FollowingEngine, layouts=layouts)
    spec, engine, found = _load(kind, spec, ranks, clock, wall)
    return spec, engine, (*notes, *found)


def load_steered(
    spec: RunT, ranks: RankGroup, *, clock: datetime.datetime, wall: WallClock | None = None
) -> tuple[RunT, SweepReplicas, tuple[str, ...]]:
    """The same for jobs that are controlled while they train, such as the trials of a sweep."""
    return _load(SweepReplicas, spec, ranks, clock, wall)


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
