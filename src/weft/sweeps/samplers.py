"""Samplers of a search space: a grid, random draws, or Optuna's proposals.

A sampler proposes one point after another and receives the end of each trial. The points of grid and random depend only
on the seed and the trial's number, so a resumed sweep continues as if it had never stopped.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from weft.data.order import permutation
from weft.errors import ConfigError, MissingExtraError, install_command
from weft.spec import JobSpec
from weft.spec.load_sweep import space_of, trial_job
from weft.spec.space import Choices, Parameter, Space, params_of, same, value_key
from weft.spec.sweep import SweepSpec
from weft.sweeps.trials_file import Trial, TrialState, trial_name

SpacePoint = Mapping[str, Any]
IsNew = Callable[[SpacePoint], bool]
BLIND = ("grid", "random")
"""Samplers that do not depend on results."""
LARGEST_GRID = 1000
"""Points of a grid that are trained without confirmation."""
MAX_DRAWS = 100
"""Draws of known points in a row after which the space counts as used up."""
LARGEST_SHUFFLED = 10**7
"""Points of a grid up to which the whole order is shuffled."""


class Sampler(ABC):
    """Proposes points; one that learns from results overrides `report` and `retrace`."""

    @abstractmethod
    def propose(self, number: int, is_new: IsNew) -> dict[str, Any] | None:
        """The new point of the n-th trial; None once there are no more."""

    def report(self, point: SpacePoint, trial: Trial) -> None:  # noqa: B027 - a blind sampler needs no results
        """Learns from a trial that has ended."""

    def retrace(self, number: int, point: SpacePoint, is_new: IsNew) -> None:  # noqa: B027 - a blind one has no state
        """Restores the state after the n-th proposal of an interrupted sweep."""


@dataclass(frozen=True)
class Grid(Sampler):
    """All points in order; with a smaller budget, a random subset."""

    space: Space
    trials: int | None
    seed: int

    def propose(self, number: int, is_new: IsNew) -> dict[str, Any] | None:
        """The n-th point, or the next new one: a resumed sweep may have another budget."""
        total = self.space.num_points
        assert total is not None, "a grid is countable"
        if number >= total:
            return None
        points = (self.space.point_at(self._index((number + i) % total, total)) for i in range(total))
        return next((point for point in points if is_new(point)), None)

    def _index(self, number: int, total: int) -> int:
        if self.trials is None or self.trials >= total:
            return number
        if total <= LARGEST_SHUFFLED:
            return int(_order(total, self.seed)[number])
        # Too many to shuffle; equal steps through all of them repeat none.
        return number * (total // self.trials) % total


@dataclass(frozen=True)
class RandomDraws(Sampler):
    """Independently drawn points, without repetition while others can be found."""

    space: Space
    seed: int

    def propose(self, number: int, is_new: IsNew) -> dict[str, Any] | None:
        for attempt in range(MAX_DRAWS):
            rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence((self.seed, number, attempt))))
            shares = rng.random(len(self.space.parameters))
            point = {p.name: p.draw(float(share)) for p, share in zip(self.space.parameters, shares, strict=True)}
            if is_new(point):
                return point
        return None


@functools.lru_cache(maxsize=1)
def _order(total: int, seed: int) -> npt.NDArray[np.int64]:
    # The third number distinguishes it from any job with the same seed.
    return permutation(total, (seed, 0, 2))


def sampler_name(spec: SweepSpec, space: Space) -> str:
    """The sampler, with `auto` resolved; a ConfigError if it cannot sample this space."""
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
    total = space.num_distinct
    if sampler_name(spec, space) == "grid":
        return min(total or 0, spec.trials or total or 0)
    return spec.trials


def make_sampler(spec: SweepSpec, space: Space) -> Sampler:
    name = sampler_name(spec, space)
    if name == "grid":
        return Grid(space, spec.trials, spec.seed)
    if name == "random":
        return RandomDraws(space, spec.seed)
    return OptunaSampler(name, space, spec.seed, spec.objective.is_max)


AT_A_TIME = 32
"""Default number of trials that train together on a replica, unless a planned pack is wider."""
AT_A_TIME_ADAPTIVE = 8
"""The default for samplers that learn from results: with more, they would choose blindly."""


def num_at_a_time(spec: SweepSpec, sampler: str) -> int:
    return spec.max_jobs or (AT_A_TIME if sampler in (*BLIND, "qmc") else AT_A_TIME_ADAPTIVE)


def first_points(spec: SweepSpec) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names and parameters of trials, as long as the sampler finds new points."""
    sampler, known = make_sampler(spec, space_of(spec)), set[str]()
    for number in itertools.count():
        point = sampler.propose(number, lambda point: value_key(params_of(point)) not in known)
        if point is None:
            return
        params = params_of(point)
        known.add(value_key(params))
        yield trial_name(number), params


def first_trials(spec: SweepSpec) -> list[JobSpec]:
    """The jobs that begin together; invalid ones are left out, and fail in their turn."""
    space = space_of(spec)
    planned, most = num_planned(spec, space), num_at_a_time(spec, sampler_name(spec, space))
    count = most if planned is None else min(planned, most)
    found: list[JobSpec] = []
    for name, params in itertools.islice(first_points(spec), count):
        with suppress(ConfigError):
            found.append(trial_job(spec, name, params))
    return found


NAME = "weft_trial"
"""User attribute of a stored trial with its name in the sweep."""


class OptunaSampler(Sampler):
    def __init__(self, name: str, space: Space, seed: int, is_max: bool) -> None:
        self._optuna = import_optuna()
        self._name, self._seed = name, seed
        self._space = space
        self._distributions = {p.name: distribution(self._optuna, p) for p in space.parameters}
        self._study = self._optuna.create_study(direction="maximize" if is_max else "minimize")
        self._proposed: list[tuple[dict[str, Any], Any]] = []

    def propose(self, number: int, is_new: IsNew) -> dict[str, Any] | None:
        for attempt in range(MAX_DRAWS):
            self._study.sampler = _sampler(self._optuna, self._name, self._seed + 1_000_003 * number + attempt)
            proposed = self._study.ask(self._distributions)
            point = {p.name: value_of(p, proposed.params[p.name]) for p in self._space.parameters}
            if is_new(point):
                self._proposed.append((point, proposed))
                return point
            self._study.tell(proposed, state=self._optuna.trial.TrialState.FAIL)
        return None

    def retrace(self, number: int, point: Mapping[str, Any], is_new: IsNew) -> None:
        """Proposes again, which restores the study's internal state, such as generations."""
        proposed = self.propose(number, is_new)
        if proposed is None or not all(same(proposed[name], value) for name, value in point.items()):
            # Another version of Optuna, or another budget: the record decides.
            if proposed is not None:
                self._study.tell(self._proposed.pop()[1], state=self._optuna.trial.TrialState.FAIL)
            self._study.enqueue_trial({p.name: proposed_value(p, point[p.name]) for p in self._space.parameters})
            self._proposed.append((dict(point), self._study.ask(self._distributions)))

    def report(self, point: Mapping[str, Any], trial: Trial) -> None:
        """Passes on the end of a trial; one that was not proposed here is added."""
        for index, (known, proposed) in enumerate(self._proposed):
            if same(params_of(known), params_of(point)):
                del self._proposed[index]
                for seen in trial.points:
                    if math.isfinite(seen.value):
                        proposed.report(seen.value, seen.step)
                state = _state(self._optuna, trial)
                # A pruned trial's value is the last one it reported.
                value = trial.value if trial.state is TrialState.DONE else None
                self._study.tell(proposed, value, state=state)
                return
        self._study.add_trial(frozen_trial(self._optuna, self._space, point, trial))


class OptunaStorage:
    """A study in an Optuna storage that receives every trial of a sweep once."""

    def __init__(self, url: str, study_name: str, space: Space, is_max: bool) -> None:
        self._optuna = import_optuna()
        self._space = space
        direction = "maximize" if is_max else "minimize"
        try:
            self._study = self._optuna.create_study(
                storage=url, study_name=study_name, direction=direction, load_if_exists=True
            )
        except Exception as error:  # whatever a database driver raises means the same to a user
            raise ConfigError(f"cannot be opened ({' '.join(str(error).split())[:200]}).", where="storage") from None
        self._known = {trial.user_attrs.get(NAME) for trial in self._study.trials}

    def add(self, point: Mapping[str, Any], trial: Trial) -> None:
        if trial.name not in self._known:
            self._known.add(trial.name)
            self._study.add_trial(frozen_trial(self._optuna, self._space, point, trial))


def import_optuna() -> Any:
    """Imports Optuna without its log; raises MissingExtraError if it is not installed."""
    try:
        import optuna
    except ImportError:
        raise MissingExtraError(f"Optuna is not installed; {install_command('optuna')} brings it.") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def distribution(optuna: Any, parameter: Parameter) -> Any:
    if isinstance(parameter, Choices):
        return optuna.distributions.CategoricalDistribution([_name_of(value) for value in parameter.values])
    if parameter.whole:
        whole = 1 if parameter.log else int(parameter.step or 1)
        return optuna.distributions.IntDistribution(int(parameter.low), int(parameter.high), parameter.log, whole)
    # Optuna has no steps on a logarithmic scale.
    step = None if parameter.log else parameter.step
    return optuna.distributions.FloatDistribution(parameter.low, parameter.high, parameter.log, step)


def value_of(parameter: Parameter, proposed: Any) -> Any:
    if isinstance(parameter, Choices):
        return next(value for value in parameter.values if _name_of(value) == proposed)
    return round(proposed) if parameter.whole else float(f"{proposed:.12g}")


def proposed_value(parameter: Parameter, value: Any) -> Any:
    if isinstance(parameter, Choices):
        return _name_of(next(mine for mine in parameter.values if same(mine, value)))
    return value


def frozen_trial(optuna: Any, space: Space, point: Mapping[str, Any], trial: Trial) -> Any:
    params = {p.name: proposed_value(p, point[p.name]) for p in space.parameters}
    state = _state(optuna, trial)
    seen = {p.step: p.value for p in trial.points if math.isfinite(p.value)}
    return optuna.trial.create_trial(
        state=state,
        value=trial.value if trial.state is TrialState.DONE else None,
        params=params,
        distributions={parameter.name: distribution(optuna, parameter) for parameter in space.parameters},
        intermediate_values=seen if state is not optuna.trial.TrialState.FAIL else {},
        user_attrs={NAME: trial.name, "reason": trial.reason, "tokens": trial.tokens},
    )


def _state(optuna: Any, trial: Trial) -> Any:
    states = optuna.trial.TrialState
    known = {TrialState.DONE: states.COMPLETE, TrialState.STOPPED: states.PRUNED, TrialState.FAILED: states.FAIL}
    return known[trial.state]


def _name_of(value: Any) -> Any:
    """A choice in a form that Optuna can store: plain values as they are, others as text."""
    return value if value is None or isinstance(value, bool | int | float | str) else json.dumps(value)


def _sampler(optuna: Any, name: str, seed: int) -> Any:
    makers = {
        # Without the constant liar, running trials would be proposed again.
        "tpe": lambda seed: optuna.samplers.TPESampler(seed=seed, constant_liar=True),
        "gp": lambda seed: optuna.samplers.GPSampler(seed=seed, warn_independent_sampling=False),
        "qmc": lambda seed: optuna.samplers.QMCSampler(seed=seed, warn_independent_sampling=False),
        "nsgaii": lambda seed: optuna.samplers.NSGAIISampler(seed=seed),
    }
    with warnings.catch_warnings():
        # Users of sweeps cannot act on Optuna's experimental classes.
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return makers[name](seed % 2**32)
