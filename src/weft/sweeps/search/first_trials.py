"""The trials that a sweep begins with: what its sampler gives while nothing is known."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from weft.errors import ConfigError
from weft.spec import JobSpec
from weft.spec.load_sweep import space_of, trial_job
from weft.spec.space import params_of, value_key
from weft.spec.sweep import SweepSpec
from weft.sweeps.record.trial import trial_name
from weft.sweeps.search.samplers import BLIND, make_sampler, num_planned, sampler_name

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
