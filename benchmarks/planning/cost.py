"""How well the cost models predict this machine: a profile of a real backbone, checked on shapes it never saw."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from weft.cli.measure.profile import default_capacity, open_backbone
from weft.engine.execute.profile import measure_profile
from weft.kernels.device import has_gpu
from weft.plan.cost.fit import FitError
from weft.plan.cost.padded import PaddedBatch, fit_padded
from weft.plan.cost.profile import Measurement, Profile, load_profile
from weft.plan.cost.published_shapes import EMBEDDED

GPU_MODEL = "llama-3.1-8b"


def measure_cost(
    model: str | None = None,
    *,
    capacity: int | None = None,
    profile: Path | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, float]:
    """The cost models' figures, from a stored profile or from one measured now."""
    if profile is not None:
        return figures(load_profile(profile))
    model = model or (GPU_MODEL if has_gpu() else EMBEDDED)
    backbone = open_backbone(model)
    return figures(measure_profile(backbone, capacity=capacity or default_capacity(backbone), say=say))


def figures(found: Profile) -> dict[str, float]:
    """Errors on held-out shapes."""
    return {
        "memory_mape": found.errors["peak_bytes"].mape,
        "memory_reserved_mape": found.errors["reserved_bytes"].mape,
        "step_time_mape": found.time_error.mape,
        "padded_time_mape": padded_error(found).mape,
    }


def padded_error(found: Profile) -> FitError:
    """How LobRA's t(b, s) does on the same measurements: it knows batches of equal lengths and nothing of adapters."""
    layers = found.setup.num_layers
    time = fit_padded([_as_padded(m, layers) for m in found.measurements if not m.held_out])
    held = [_as_padded(m, layers) for m in found.measurements if m.held_out]
    predicted = [time.step_s([(batch.size, batch.size, batch.length)], layers) for batch in held]
    return FitError.of(predicted, [batch.seconds for batch in held])


def _as_padded(measured: Measurement, num_layers: int) -> PaddedBatch:
    load = measured.load
    size, length = load.pairs // load.longest_pairs, math.isqrt(load.longest_pairs)
    return PaddedBatch(size, length, num_layers, measured.forward_s + measured.backward_s)
