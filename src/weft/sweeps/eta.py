"""How much longer a sweep will take, as far as its trials so far tell."""

from __future__ import annotations

from collections.abc import Sequence

from weft.spec.sweep import SweepSpec
from weft.sweeps.record.trials_file import Trial


def remaining_s(trials: Sequence[Trial], num_planned: int | None, seconds: float, spec: SweepSpec) -> float | None:
    """Seconds that are left if steps go on taking as long as they have; None before anything is known.

    Trials under way count with all their steps, those to come with as many as those that have ended took on average:
    early stopping is in that. A budget of tokens or time may end it sooner.
    """
    trained = [trial for trial in trials if not trial.origin]
    done, tokens = sum(trial.steps for trial in trained), sum(trial.tokens for trial in trained)
    if not done or seconds <= 0:
        return None
    found = []
    if spec.max_tokens is not None and tokens:
        found.append(seconds * max(spec.max_tokens / tokens - 1, 0.0))
    if spec.max_seconds is not None:
        found.append(max(spec.max_seconds - seconds, 0.0))
    if num_planned is not None:
        left = float(sum(trial.total_steps - trial.steps for trial in trained if not trial.state.is_final))
        ended = [trial.steps for trial in trained if trial.state.is_final] or [t.total_steps for t in trained]
        left += max(num_planned - len(trials), 0) * sum(ended) / len(ended)
        found.append(seconds * left / done)
    return min(found, default=None)
