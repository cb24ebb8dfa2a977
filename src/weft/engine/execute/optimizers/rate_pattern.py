"""Learning rates of some modules: what a step changes there is multiplied by a factor.

Every optimizer's change of a weight grows in proportion to its learning rate. So all modules step with the largest rate
that one has, and

    w ← w_before + factor / largest · (w_after - w_before)

is the step with a module's own, up to rounding, whatever the optimizer and wherever it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from weft.adapters.adapter import Adapter
from weft.errors import ConfigError
from weft.settings.fields import answers_pattern, first_match


def largest_factor(patterns: Mapping[str, float]) -> float:
    """What multiplies the job's learning rate in the step of all modules; 1 where none has a larger one of its own."""
    return max([1.0, *patterns.values()])


def refuse_idle_rates(patterns: Mapping[str, float], paths: Sequence[str]) -> None:
    """ConfigError for a pattern that none of the adapted modules answers to."""
    for pattern in patterns:
        if not any(answers_pattern(path, pattern) for path in paths):
            raise ConfigError(
                f"no adapted module answers to {pattern!r}; they are such as {paths[0]}.",
                where="learning_rate_pattern",
            )


def scaling_changes(patterns: Mapping[str, float], adapter: Adapter) -> Callable[[], None]:
    """Keeps the weights of modules with a rate of their own; what is returned is called once the step is started."""
    largest = largest_factor(patterns)
    kept: list[tuple[float, torch.Tensor, torch.Tensor]] = []
    for path, views in adapter.split(adapter.trained()).items():
        factor = first_match(patterns, path, 1.0) / largest
        kept += [(factor, view, view.clone()) for view in views if factor != 1.0]

    def scale() -> None:
        for factor, view, before in kept:
            view.copy_(torch.lerp(before, view, factor))

    return scale
