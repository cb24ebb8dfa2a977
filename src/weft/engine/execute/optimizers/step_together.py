"""One call for all jobs that step together, each as if alone.

On a CPU each job steps by itself. On a GPU the jobs of one kind step together where the kind has a kernel for it, and
what they did is read once, when somebody asks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from weft.engine.execute.optimizers.optimizer import Optimizer, Results
from weft.engine.execute.optimizers.rate_pattern import scaling_changes
from weft.kernels.adamw import Updated
from weft.kernels.device import is_gpu


def step_together(
    optimizers: Sequence[Optimizer], finite: Sequence[bool], finite_J: torch.Tensor | None = None
) -> Results:
    """Starts the step of every job given, each as if alone; one is left out if the loss of its global batch is not
    finite, as the host knows (`finite`) or the device alone (`finite_J`)."""
    scaled = [
        scaling_changes(optimizer.spec.learning_rate_pattern, optimizer.adapter)
        for optimizer in optimizers
        if optimizer.spec.learning_rate_pattern
    ]
    start = step_by_kind if is_gpu(optimizers[0].adapter.device) else _step_each
    results = start(optimizers, finite, finite_J)
    for scale in scaled:
        scale()
    for optimizer in optimizers:
        optimizer.adapter.changed()
    return results


def _step_each(optimizers: Sequence[Optimizer], finite: Sequence[bool], finite_J: torch.Tensor | None) -> Results:
    if finite_J is not None:
        finite = [known and found > 0 for known, found in zip(finite, finite_J.tolist(), strict=True)]
    results = [_step_alone(optimizer, is_finite) for optimizer, is_finite in zip(optimizers, finite, strict=True)]
    return lambda: results


def _step_alone(optimizer: Optimizer, is_finite: bool) -> Updated:
    """Steps one job. What that raises is an answer about this job: the steps of the others are taken."""
    try:
        return optimizer.step(is_finite)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        return Updated(math.nan, math.nan, True, error)


def step_by_kind(
    optimizers: Sequence[Optimizer], finite: Sequence[bool], finite_J: torch.Tensor | None = None
) -> Results:
    """The steps of each kind together."""
    places: dict[type[Optimizer], list[int]] = {}
    for place, optimizer in enumerate(optimizers):
        optimizer.free_memory()
        places.setdefault(type(optimizer), []).append(place)
    started = []
    for kind, own in places.items():
        # All of them as they are where there is one kind, so that nothing more is launched.
        found_J = finite_J if finite_J is None or len(places) == 1 else torch.stack([finite_J[i] for i in own])
        started.append((own, kind.start_all([optimizers[i] for i in own], [finite[i] for i in own], found_J)))

    def results() -> list[Updated]:
        found = {i: updated for own, wait in started for i, updated in zip(own, wait(), strict=True)}
        return [found[i] for i in range(len(optimizers))]

    return results
