"""Optuna at work for a sweep: its samplers propose points, and its storages get every trial.

The sampler's study lives in memory and is rebuilt from the sweep's own record, so a resumed sweep needs nothing from
Optuna. A storage is a copy for dashboards and other studies to read.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping
from typing import Any

from weft.errors import ConfigError, MissingExtraError, install_command
from weft.spec.space import Choices, Parameter, Space, params_of, same
from weft.sweeps.record.trials_file import Trial, TrialState
from weft.sweeps.search.samplers import MAX_DRAWS, IsNew

NAME = "weft_trial"
"""The user attribute under which a stored trial says which one of the sweep it is."""


class OptunaSampler:
    """One of Optuna's samplers, asked and told."""

    def __init__(self, name: str, space: Space, seed: int, is_max: bool) -> None:
        self._optuna = import_optuna()
        self._name, self._seed = name, seed
        self._space = space
        self._distributions = {p.name: distribution(self._optuna, p) for p in space.parameters}
        self._study = self._optuna.create_study(direction="maximize" if is_max else "minimize")
        self._asked: list[tuple[dict[str, Any], Any]] = []
        """Points under way, with Optuna's own trial of each."""

    def ask(self, number: int, is_new: IsNew) -> dict[str, Any] | None:
        """A new point, if the sampler finds one."""
        for attempt in range(MAX_DRAWS):
            self._study.sampler = _sampler(self._optuna, self._name, self._seed + 1_000_003 * number + attempt)
            proposed = self._study.ask(self._distributions)
            point = {p.name: value_of(p, proposed.params[p.name]) for p in self._space.parameters}
            if is_new(point):
                self._asked.append((point, proposed))
                return point
            self._study.tell(proposed, state=self._optuna.trial.TrialState.FAIL)
        return None

    def retrace(self, number: int, point: Mapping[str, Any], is_new: IsNew) -> None:
        """Asks again: what the study keeps of its proposals, such as generations, is then as it was."""
        proposed = self.ask(number, is_new)
        if proposed is None or not all(same(proposed[name], value) for name, value in point.items()):
            # Another version of Optuna, or another budget: the trial is what the record says.
            if proposed is not None:
                self._study.tell(self._asked.pop()[1], state=self._optuna.trial.TrialState.FAIL)
            self._study.enqueue_trial({p.name: proposed_value(p, point[p.name]) for p in self._space.parameters})
            self._asked.append((dict(point), self._study.ask(self._distributions)))

    def tell(self, point: Mapping[str, Any], trial: Trial) -> None:
        """Passes on how a trial ended; one that Optuna did not propose here is added."""
        for place, (asked, proposed) in enumerate(self._asked):
            if same(params_of(asked), params_of(point)):
                del self._asked[place]
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
    """A study in an Optuna storage that gets every trial of a sweep once."""

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
        """Adds a trial that has ended, unless it is there already."""
        if trial.name not in self._known:
            self._known.add(trial.name)
            self._study.add_trial(frozen_trial(self._optuna, self._space, point, trial))


def import_optuna() -> Any:
    """Optuna, quiet; a MissingExtraError says how to get it."""
    try:
        import optuna
    except ImportError:
        raise MissingExtraError(f"Optuna is not installed; {install_command('optuna')} brings it.") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def distribution(optuna: Any, parameter: Parameter) -> Any:
    """A parameter in Optuna's terms."""
    if isinstance(parameter, Choices):
        return optuna.distributions.CategoricalDistribution([_name_of(value) for value in parameter.values])
    if parameter.whole:
        whole = 1 if parameter.log else int(parameter.step or 1)
        return optuna.distributions.IntDistribution(int(parameter.low), int(parameter.high), parameter.log, whole)
    # Optuna knows no steps on a logarithmic scale.
    step = None if parameter.log else parameter.step
    return optuna.distributions.FloatDistribution(parameter.low, parameter.high, parameter.log, step)


def value_of(parameter: Parameter, proposed: Any) -> Any:
    """What Optuna proposed, as the sweep file has it."""
    if isinstance(parameter, Choices):
        return next(value for value in parameter.values if _name_of(value) == proposed)
    return round(proposed) if parameter.whole else float(f"{proposed:.12g}")


def proposed_value(parameter: Parameter, value: Any) -> Any:
    """A value of the sweep file, as Optuna would propose it."""
    if isinstance(parameter, Choices):
        return _name_of(next(mine for mine in parameter.values if same(mine, value)))
    return value


def frozen_trial(optuna: Any, space: Space, point: Mapping[str, Any], trial: Trial) -> Any:
    """A trial that has ended, in Optuna's terms."""
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
    """A choice as Optuna can keep it: plain values as they are, anything else as text."""
    return value if value is None or isinstance(value, bool | int | float | str) else json.dumps(value)


def _sampler(optuna: Any, name: str, seed: int) -> Any:
    makers = {
        # With trials under way, a sampler that does not know them would propose the same place again.
        "tpe": lambda seed: optuna.samplers.TPESampler(seed=seed, constant_liar=True),
        "gp": lambda seed: optuna.samplers.GPSampler(seed=seed, warn_independent_sampling=False),
        "qmc": lambda seed: optuna.samplers.QMCSampler(seed=seed, warn_independent_sampling=False),
        "nsgaii": lambda seed: optuna.samplers.NSGAIISampler(seed=seed),
    }
    with warnings.catch_warnings():
        # Which of its classes Optuna calls experimental is nothing a user of sweeps can act on.
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        return makers[name](seed % 2**32)
