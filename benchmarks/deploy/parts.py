"""All that `python -m benchmarks deploy` measures. Plans and dispatch are timed here; what they save is predicted."""

from __future__ import annotations

from benchmarks.deploy.fusing import measure_fuse
from benchmarks.deploy.planning import measure_dispatch, measure_plans
from benchmarks.deploy.saving import measure_7b, measure_savings
from benchmarks.figures import Kind, Parts, Targets

TARGETS: Targets = {
    "plan64_s": (Kind.SECONDS, 5.0),
    "plan256_s": (Kind.SECONDS, 20.0),
    "plan1024_s": (Kind.SECONDS, 120.0),
    "dispatch_ms": (Kind.MILLISECONDS, 50.0),
    "gpu_seconds_saving": (Kind.SHARE, 0.45),
    "gpu_seconds_saving_packed": (Kind.SHARE, None),
    "gpu_seconds_saving_packed_weft": (Kind.SHARE, None),
    "ablation_length": (Kind.SHARE, None),
    "ablation_balanced": (Kind.SHARE, None),
    "ablation_bucketing": (Kind.SHARE, None),
    "htask64_s": (Kind.SECONDS, 0.5),
}
PARTS: Parts = {
    "plans of 70B-like replicas on 64, 256 and 1,024 GPUs": measure_plans,
    "1,500 samples shared out over 12 replicas": measure_dispatch,
    "GPU-seconds of twelve tasks on 64 GPUs, predicted": measure_savings,
    "six tasks of 7B on 16 GPUs, predicted from published tables": measure_7b,
    "64 tasks fused": measure_fuse,
}
