"""All that `python -m benchmarks replicas` measures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from benchmarks.figures import Kind, Parts, Targets
from benchmarks.replicas.controller import measure_controller
from benchmarks.replicas.killed import measure_kills
from benchmarks.replicas.placing import measure_eight, measure_placing
from benchmarks.replicas.trained import measure_recovery, measure_scaling, measure_two_ranks
from benchmarks.report import (
    JsonFile,
    run_parts,
)
from weft.errors import ConfigError
from weft.kernels.device import has_gpu

TARGETS: Targets = {
    "place_1000_s": (Kind.SECONDS, 1.0),
    "place_1000_ratio": (Kind.TIME_RATIO, None),
    "sim8": (Kind.SPEEDUP, 7.6),
    "sim8_jobs": (Kind.SPEEDUP, None),
    "sim8_trials": (Kind.SPEEDUP, None),
    "scale2_cpu": (Kind.SPEEDUP, 1.8),
    "controller_us": (Kind.MICROSECONDS, 200.0),
    "controller_end_ms": (Kind.MILLISECONDS, None),
    "recover_s": (Kind.SECONDS, 10.0),
    "kills_differ": (Kind.DIFFERENCES, 0.0),
    "kills_repeated": (Kind.DIFFERENCES, 0.0),
    "kill_seen_s": (Kind.SECONDS, 5.0),
    "bits_two_ranks": (Kind.DIFFERENCES, 0.0),
}
PARTS: Parts = {
    "1,000 jobs placed over 64 replicas": measure_placing,
    "8 GPUs, simulated": measure_eight,
    "16 jobs over one rank and over two, of one thread each": measure_scaling,
    "a controller of 64 scripted ranks": measure_controller,
    "a rank is killed": measure_recovery,
    "20 runs of which something is killed": measure_kills,
    "two ranks on one GPU": measure_two_ranks,
}
REGIMES = dict(
    zip(
        ("place_1000_s", "sim8", "scale2_cpu", "controller_us", "recover_s", "kills_differ", "bits_two_ranks"),
        PARTS,
        strict=True,
    )
)
"""Each part by the figure that names it."""
ON_GPU = frozenset({REGIMES["bits_two_ranks"]})


def choose_parts(regimes: Sequence[str], *, has_gpu: bool) -> Parts:
    """The parts that measure those figures; all that this machine can measure if there are none."""
    for name in regimes:
        if name not in REGIMES:
            raise ConfigError(f"got {name!r}; accepted are {', '.join(REGIMES)}.", where="--regime")
        if REGIMES[name] in ON_GPU and not has_gpu:
            raise ConfigError(f"{name} needs a CUDA GPU and torch sees none.", where="--regime")
    chosen = [REGIMES[name] for name in regimes] or [title for title in PARTS if has_gpu or title not in ON_GPU]
    return {title: PARTS[title] for title in chosen}


def replicas(
    regime: Annotated[
        list[str] | None, typer.Option(help="Figure to measure; may be repeated. Default: all that can be.")
    ] = None,
    json: JsonFile = None,
) -> None:
    """Jobs over many replicas: placing and controlling them, speed, recovery, bits, and eight GPUs, simulated."""
    parts = choose_parts(regime or [], has_gpu=has_gpu())
    raise typer.Exit(run_parts(parts, TARGETS, json, on_gpu=ON_GPU))
