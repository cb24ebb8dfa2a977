"""A cluster file: machines, their links, the backbone, and the jobs to train.

`weft plan deploy` reads it; docs/deploy.md explains it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from weft.errors import ConfigError
from weft.settings import KnownKeywords, above, at_least, describe, read, setting, validate
from weft.spec.job import GRADIENT_SUMS, SUMS_BEFORE
from weft.spec.load import location_of, parse
from weft.spec.run import QUANTISATIONS, RECOMPUTE

MODES = ("packed", "padded")
SOURCES = ("assumed", "measured")


@dataclass(frozen=True)
class MachineSpec(KnownKeywords):
    gpu: str = setting()
    """Kind of their GPUs, as the hardware table calls it: h200, h100, a100-80, a100-40, l40s, rtx-4090."""
    gpus: int = setting(8, rule=at_least(1, 64))
    """GPUs of one machine."""
    count: int = setting(1, rule=at_least(1, 4096))
    """Machines of this kind."""
    memory_gib: float | None = setting(None, rule=above(0))
    """Memory of one GPU. Default: the table's."""
    link_gb_s: float | None = setting(None, rule=above(0))
    """GB/s that a GPU sends to another of its machine, one way. Default: the table's."""
    network_gb_s: float | None = setting(None, rule=above(0))
    """GB/s that a machine sends to another, one way, all its cards together. Default: the table's, times the GPUs."""
    links: str = setting("assumed", choices=SOURCES)
    """Origin of the two rates, which the plan shows."""


@dataclass(frozen=True)
class LengthsSpec(KnownKeywords):
    """Sample lengths by their distribution, which is assumed to be log-normal."""

    mean: float = setting(rule=at_least(16))
    """Tokens of a sample on average."""
    longest: int = setting(rule=at_least(16, 10_000_000))
    """Length at which longer samples are cut, as by max_length."""
    skewness: float = setting(2.0, rule=above(0, 50))
    """Skewness: 5 to 10 for short answers with a few long ones, about 1 for articles."""

    def __post_init__(self) -> None:
        validate(self)
        if self.mean > self.longest:
            raise ConfigError(f"the mean {self.mean:g} is above the longest, {self.longest:,}.", where="mean")


@dataclass(frozen=True)
class ClusterJobSpec(KnownKeywords):
    name: str = setting()
    """Name of the job in the plan."""
    lengths: LengthsSpec = setting()
    """Lengths of its samples: {mean, longest, skewness}."""
    global_batch_size: int = setting(32, aliases=("batch_size",), rule=at_least(1, 1_000_000))
    """Samples of its global batch."""
    r: int = setting(16, aliases=("rank",), rule=at_least(1, 4096))
    """Rank of its adapter."""
    gradient_sum: str = setting("any_order", former="sums", choices=GRADIENT_SUMS, synonyms=SUMS_BEFORE)
    """As in a jobs file, where in_order is the default: such a job has one replica as its home. With any_order replicas
    share a job's samples."""


@dataclass(frozen=True)
class ClusterSpec(KnownKeywords):
    machines: tuple[MachineSpec, ...] = setting()
    """Kinds of machines."""
    base_model: str | None = setting(None, aliases=("model",), is_path=True)
    """A published shape such as llama-3.1-70b, or what base_model of a jobs file may be. Default: the jobs file's."""
    jobs: tuple[ClusterJobSpec, ...] = setting(())
    """Jobs whose data is known by its lengths only."""
    jobs_file: str | None = setting(None, is_path=True)
    """A jobs file, whose data is read, instead of jobs; relative to the cluster file. `--jobs` names another."""
    mode: str = setting("packed", choices=MODES)
    """How samples of different lengths share a chunk: packed, as Weft trains, or padded to buckets, as LobRA does."""
    quantize: str | None = setting(None, choices=QUANTISATIONS)
    """How the frozen linears are stored. Default: as in the jobs file, or none."""
    recompute: str | None = setting(None, choices=RECOMPUTE)
    """Activations that are recomputed in backward to save memory. Default: likewise."""
    tensor: bool | None = setting(None)
    """Whether replicas may divide every layer (tensor:N), which changes bits. Default: not with `--execute`."""

    def __post_init__(self) -> None:
        validate(self)
        if not self.machines:
            raise ConfigError("there are no machines; write at least one.", where="machines")
        if self.jobs and self.jobs_file is not None:
            raise ConfigError("found both of jobs and jobs_file; write one of them.", where="jobs")
        names = [job.name for job in self.jobs]
        for index, name in enumerate(names):
            if name in names[:index]:
                raise ConfigError(f"two jobs are called {name!r}; use each name once.", where=f"jobs.{index}.name")


def load_cluster(path: Path) -> ClusterSpec:
    tree, lines = parse(path, "cluster")
    try:
        if not isinstance(tree, Mapping):
            raise ConfigError(f"expected settings such as base_model and machines, got {describe(tree)}.")
        return read(ClusterSpec, tree)
    except ConfigError as error:
        raise error.at(location_of(error.where, path, lines, {}, ClusterSpec)) from None
