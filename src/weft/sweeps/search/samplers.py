"""Which points of a search space are tried: a grid, random draws, or what Optuna proposes.

A sampler is asked for one point after another and told how each ended. What grid and random draw for the n-th trial
depends on the seed and n alone, so a resumed sweep goes on as if it had never stopped.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from weft.data.order import permutation
from weft.errors import ConfigError
from weft.spec import JobSpec
from weft.spec.load_sweep import space_of, trial_job
from weft.spec.space import Space, params_of, value_key
from weft.spec.sweep import SweepSpec
from weft.sweeps.record.trials_file import Trial, trial_name

SpacePoint = Mapping[str, Any]
"""A value for each parameter of a space."""
IsNew = Callable[[SpacePoint], bool]
BLIND = ("grid", "random")
"""Samplers whose points depend on nothing that is seen."""
LARGEST_GRID = 1000
"""Points of a grid that are trained without being asked twice."""
MAX_DRAWS = 100
"""Draws in a row that may repeat known points before the space counts as used up."""
LARGEST_SHUFFLED = 10**7
"""Points of a grid whose order is drawn as a whole."""


class Sampler(Protocol):
    """Proposes points."""

    def ask(self, number: int, is_new: IsNew) -> dict[str, Any] | None:
        """The point of the n-th trial, one that is new; None once there are no more."""

    def tell(self, point: SpacePoint, trial: Trial) -> None:
        """How the trial of a point ended."""

    def retrace(self, number: int, point: SpacePoint, is_new: IsNew) -> None:
        """What it proposed for the n-th trial before the sweep was interrupted."""


@dataclass(frozen=True)
class Grid:
    """All points in order; with a budget below their number, a random part of them."""

    space: Space
    trials: int | None
    seed: int

    def ask(self, number: int, is_new: IsNew) -> dict[str, Any] | None:
        """The n-th point, or the next one that is new: a resumed sweep may have another budget."""
        total = self.space.num_points
        assert total is not None, "a grid is countable"
        if number >= total:
            return None
        points = (self.space.point_at(self._index((number + i) % total, total)) for i in range(total))
        return next((point for point in points if is_new(point)), None)

    def _index(self, place: int, total: int) -> int:
        if self.trials is None or self.trials >= total:
            return place
        if total <= LARGEST_SHUFFLED:
            return int(_order(total, self.seed)[place])
        # Too many to put in order; equal steps through all of them meet none twice.
        return place * (total // self.trials) % total

    def tell(self, point: SpacePoint, trial: Trial) -> None:
        """Nothing depends on it."""

    def retrace(self, number: int, point: SpacePoint, is_new: IsNew) -> None:
        """Nothing depends on it."""


@dataclass(frozen=True)
class RandomDraws:
    """Points drawn one by one, none twice while others can be found."""

    space: Space
    seed: int

    def ask(self, number: int, is_new: IsNew) -> dict[str, Any] | None:
        """A new point."""
        for attempt in range(MAX_DRAWS):
            rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence((self.seed, number, attempt))))
            shares = rng.random(len(self.space.parameters))
            point = {p.name: p.draw(float(share)) for p, share in zip(self.space.parameters, shares, strict=True)}
            if is_new(point):
                return point
        return None

    def tell(self, point: SpacePoint, trial: Trial) -> None:
        """Nothing depends on it."""

    def retrace(self, number: int, point: SpacePoint, is_new: IsNew) -> None:
        """Nothing depends on it."""


@functools.lru_cache(maxsize=1)
def _order(total: int, seed: int) -> npt.NDArray[np.int64]:
    # A third number, so that no job with the same seed repeats the draw.
    return permutation(total, (seed, 0, 2))


def sampler_name(spec: SweepSpec, space: Space) -> str:
    """What `auto` means here; a ConfigError says why a sampler cannot do this space."""
    total, name = space.num_points, spec.sampler
    if name == "auto":
        fits = total is not None and (spec.trials is None or total <= spec.trials)
        name = "grid" if fits or not spec.has_budget else "random"
    if name == "grid" and total is None:
        endless = next(p.name for p in space.parameters if p.values is None)
        hint = "Give it choices or a step" if spec.sampler == "grid" else "Set trials, max_tokens or max_seconds"
        wrong = (
            "a grid needs countable values, and this is a range."
            if spec.sampler == "grid"
            else ("has endlessly many values, so the sweep needs a budget.")
        )
        raise ConfigError(wrong, where=f"space.{endless}", hint=f"{hint}, or use another sampler.")
    if name == "grid" and total is not None and total > LARGEST_GRID and not (spec.has_budget or spec.all_points):
        raise ConfigError(
            f"the grid has {total:,} points and there is no budget.",
            where="space",
            hint="--trials N tries N of them, --all tries every one.",
        )
    if name != "grid" and not spec.has_budget:
        raise ConfigError(f"{name} never ends by itself; set trials, max_tokens or max_seconds.", where="sampler")
    return name


def num_planned(spec: SweepSpec, space: Space) -> int | None:
    """Trials there will be, as far as that is known."""
    total = space.num_distinct
    if sampler_name(spec, space) == "grid":
        return min(total or 0, spec.trials or total or 0)
    return spec.trials


def make_sampler(spec: SweepSpec, space: Space) -> Sampler:
    """The sampler a sweep asks for."""
    name = sampler_name(spec, space)
    if name == "grid":
        return Grid(space, spec.trials, spec.seed)
    if name == "random":
        return RandomDraws(space, spec.seed)
    from weft.sweeps.search.optuna_study import OptunaSampler

    return OptunaSampler(name, space, spec.seed, spec.objective.is_max)


AT_A_TIME = 32
"""Trials that train together on a replica unless max_jobs says otherwise, or a planned pack is wider."""
AT_A_TIME_ADAPTIVE = 8
"""The same for samplers that learn from values: with more under way they would choose blindly."""


def num_at_a_time(spec: SweepSpec, sampler: str) -> int:
    """How many trials train together on a replica."""
    return spec.max_jobs or (AT_A_TIME if sampler in (*BLIND, "qmc") else AT_A_TIME_ADAPTIVE)


def first_points(spec: SweepSpec) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names and parameters of trials, as long as the sampler finds new ones."""
    sampler, known = make_sampler(spec, space_of(spec)), set[str]()
    for number in itertools.count():
        point = sampler.ask(number, lambda point: value_key(params_of(point)) not in known)
        if point is None:
            return
        params = params_of(point)
        known.add(value_key(params))
        yield trial_name(number), params


def first_trials(spec: SweepSpec) -> list[JobSpec]:
    """The jobs of those that begin together; one that cannot be is left out, and says so when its turn comes."""
    space = space_of(spec)
    planned, most = num_planned(spec, space), num_at_a_time(spec, sampler_name(spec, space))
    count = most if planned is None else min(planned, most)
    found: list[JobSpec] = []
    for name, params in itertools.islice(first_points(spec), count):
        with suppress(ConfigError):
            found.append(trial_job(spec, name, params))
    return found
