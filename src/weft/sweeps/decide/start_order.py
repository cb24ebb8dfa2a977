"""In which order trials start. It changes no result: a trial's point belongs to its number, whenever its turn comes."""

from __future__ import annotations

from collections import deque

from weft.errors import WeftError
from weft.spec.space import params_of, value_key
from weft.sweeps.configure import Configurations
from weft.sweeps.context import SweepContext
from weft.sweeps.ledger import Ledger
from weft.sweeps.record.trials_file import Trial, trial_name
from weft.sweeps.search.samplers import BLIND, num_planned

MOST_AHEAD = 1000
"""Trials of a sweep up to which all are looked at before the first one starts."""


def longest_first(context: SweepContext, ledger: Ledger) -> deque[Trial] | None:
    """All trials to come, those with the most steps first, so that no long one is left to train alone at the end.

    None where they cannot be known now: a sampler learns, or tokens or time run out before all have been tried.
    """
    planned = num_planned(context.spec, context.space)
    is_cut = context.spec.max_tokens is not None or context.spec.max_seconds is not None
    if context.sampler_name not in BLIND or planned is None or planned > MOST_AHEAD or is_cut:
        return None
    tried, chosen = {trial.number for trial in ledger.trials}, set[str]()
    upcoming: list[Trial] = []
    for number in range(planned):
        if number in tried:
            continue
        point = context.sampler.ask(
            number, lambda point: ledger.is_new(point) and value_key(params_of(point)) not in chosen
        )
        if point is None:
            break
        params = params_of(point)
        chosen.add(value_key(params))
        upcoming.append(Trial(number, trial_name(number), params))
    return deque(sorted(upcoming, key=lambda trial: (-_num_steps(trial, context.configurations), trial.number)))


def _num_steps(trial: Trial, configurations: Configurations) -> int:
    try:
        return configurations.num_steps(configurations.job(trial.name, trial.params))
    except WeftError:
        # It fails as soon as it is started, and says why.
        return 0
