"""What the same training would have taken one trial after another, measured on a few of the trials.

Each of them trains alone on the same backbone for a few steps, as in `weft demo`; trials between them in tokens per
step are interpolated. Evaluations, planning and checkpoints are counted as they were: they cost the same either way.
Loading the backbone anew for every trial, as most tools do, is not counted.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from weft.engine.engine import Engine
from weft.engine.events import StepDone
from weft.errors import WeftError
from weft.sweeps.record.trials_file import Trial
from weft.sweeps.sweep_engine import SweepEngine
from weft.sweeps.trial_loop import SweepRun

NUM_MEASURED = 4
"""Trials that are measured alone, from the one with the fewest tokens per step to the one with the most."""
WARM_STEPS, SOLO_STEPS = 2, 6
MOST_OF_THE_TIME, LEAST_S = 0.05, 2.0
"""Measuring stops after this part of the sweep's own time, or this many seconds if that is more."""


def can_be_alone(engine: SweepEngine) -> bool:
    """Whether a trial can be measured beside the sweep: on a whole backbone in this process."""
    return engine.num_replicas == 1 and not engine.executor.facts.takes_programs


def one_by_one_seconds(run: SweepRun) -> float | None:
    """Seconds the sweep would have taken with one trial at a time; None if nothing was trained here."""
    trained = [trial for trial in run.trials if trial.steps and trial.tokens and not trial.origin]
    spent = run.trial_time
    if not trained or not spent.training_tokens:
        return None
    until = time.perf_counter() + max(LEAST_S, MOST_OF_THE_TIME * run.ledger.seconds)
    measured: list[tuple[float, float]] = []
    for trial in _spread(trained):
        seconds = _seconds_per_step(run, trial)
        if seconds is not None:
            measured.append((trial.tokens / trial.steps, seconds))
        if time.perf_counter() > until:
            break
    if not measured:
        return None
    sizes, costs = zip(*sorted(measured), strict=True)
    alone = sum(t.steps * float(np.interp(t.tokens / t.steps, sizes, costs)) for t in trained)
    # A resumed sweep knows the speed of this session only, so that of the earlier ones is taken to be the same.
    together = run.ledger.tokens * spent.training_s / spent.training_tokens
    return max(run.ledger.seconds - together, 0.0) + alone


def _spread(trials: Sequence[Trial]) -> list[Trial]:
    ordered = sorted(trials, key=lambda trial: (trial.tokens / trial.steps, trial.number))
    places = np.linspace(0, len(ordered) - 1, min(NUM_MEASURED, len(ordered)))
    return [ordered[round(place)] for place in places]


def _seconds_per_step(run: SweepRun, trial: Trial) -> float | None:
    context = run.context
    job = context.configurations.job(trial.name, trial.params)
    # Evaluations would be measured as training.
    job = replace(job, eval_data=None, early_stopping_patience=None)
    assert isinstance(context.engine, Engine), "measured on the replica of this process"
    engine = Engine(context.engine.executor.beside(), capacity=context.spec.capacity)
    try:
        data = replace(context.configurations.data(context.configurations.job(trial.name, trial.params)), eval=None)
        engine.submit(job, data, base_dir=context.base_dir)
    except WeftError:
        return None
    times = [time.perf_counter()]
    for event in engine.events():
        if isinstance(event, StepDone):
            times.append(time.perf_counter())
            if event.step >= WARM_STEPS + SOLO_STEPS:
                engine.cancel(trial.name)
    warm = min(WARM_STEPS, len(times) - 2)
    return (times[-1] - times[warm]) / (len(times) - 1 - warm) if warm >= 0 else None
