"""All figures of sweeps that need no GPU and no data file; `step` has those of real ones (`sweep32_…`)."""

from __future__ import annotations

import typer

from benchmarks.commands import JsonFile
from benchmarks.figures import Kind, Parts, Targets
from benchmarks.output import run_parts
from benchmarks.sweeps.plan import measure_sweep_plan
from benchmarks.sweeps.train import measure_early_stop, measure_sweep_together

_SIZES = ("3b", "7b", "14b", "32b")
TARGETS: Targets = {
    "plan120_s": (Kind.SECONDS, 20.0),
    "approximation_ratio": (Kind.TIME_RATIO, 1.05),
    "published_ratio": (Kind.TIME_RATIO, None),
    **{f"sim_makespan_{size}": (Kind.SPEEDUP, 7.5) for size in _SIZES},
    **{f"sim_ceiling_{size}": (Kind.SPEEDUP, None) for size in _SIZES},
    **{f"sim_makespan_{size}_{task}": (Kind.SPEEDUP, None) for task in ("gsm8k", "rte", "sst2") for size in _SIZES},
    "cpu16": (Kind.SPEEDUP, 3.0),
    "cpu16_largest_difference": (Kind.ERROR, 1e-5),
    "cpu16_same_best": (Kind.SHARE, 1.0),
    "cpu16_processes": (Kind.SPEEDUP, None),
    "cpu16_batch4": (Kind.SPEEDUP, None),
    "early_stop_tokens": (Kind.SPEEDUP, 2.0),
    "early_stop_same_best": (Kind.SHARE, None),
}
PARTS: Parts = {
    "planning": measure_sweep_plan,
    "together": measure_sweep_together,
    "early stopping": measure_early_stop,
}


def sweeps(json: JsonFile = None) -> None:
    """Sweeps: plans beside PLoRA's, configurations together, early stopping."""
    raise typer.Exit(run_parts(PARTS, TARGETS, json))
