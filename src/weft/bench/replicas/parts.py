"""All that `weft bench replicas` measures."""

from __future__ import annotations

from weft.bench.figures import Kind, Parts, Targets
from weft.bench.replicas.planning import measure_placing
from weft.bench.replicas.simulated import measure_eight

TARGETS: Targets = {
    "place_1000_s": (Kind.SECONDS, 1.0),
    "place_1000_ratio": (Kind.TIME_RATIO, None),
    "sim8": (Kind.SPEEDUP, 7.6),
    "sim8_jobs": (Kind.SPEEDUP, None),
    "sim8_trials": (Kind.SPEEDUP, None),
}
PARTS: Parts = {"1,000 jobs placed over 64 replicas": measure_placing, "8 GPUs, simulated": measure_eight}
