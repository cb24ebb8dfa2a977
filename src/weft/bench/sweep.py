"""All figures of sweeps. Nothing here needs a GPU or a data file."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from weft.bench.figures import Figure, Kind
from weft.bench.sweep_plan import measure_sweep_plan

TARGETS: dict[str, tuple[Kind, float | None]] = {
    "plan120_s": (Kind.SECONDS, 20.0),
    "approximation_ratio": (Kind.TIME_RATIO, 1.05),
    "published_ratio": (Kind.TIME_RATIO, None),
    **{f"sim_makespan_{size}": (Kind.SPEEDUP, 7.5) for size in ("3b", "7b", "14b", "32b")},
    **{f"sim_ceiling_{size}": (Kind.SPEEDUP, None) for size in ("3b", "7b", "14b", "32b")},
    **{f"sim_makespan_{size}_gsm8k": (Kind.SPEEDUP, None) for size in ("3b", "7b", "14b", "32b")},
    **{f"sim_makespan_{size}_rte": (Kind.SPEEDUP, None) for size in ("3b", "7b", "14b", "32b")},
}
"""What is shown of the measured values; the others go into the JSON file alone."""
PARTS: dict[str, Callable[[], dict[str, float]]] = {
    "planning": measure_sweep_plan,
}


def measure_sweep() -> Iterator[tuple[str, dict[str, float], list[Figure]]]:
    """Part by part: its name, all its values, and those with a place in the table."""
    for name, measure in PARTS.items():
        values = measure()
        yield name, values, [Figure(key, values[key], *TARGETS[key]) for key in TARGETS if key in values]
