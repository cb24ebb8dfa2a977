"""Options that several verbs have: locations of runs, and how a run is divided over devices.

In a path `~` is the user's home, and an empty one is refused, not taken for the current directory. A run may also be at
a URL that fsspec knows, such as s3://bucket/runs/first.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from weft.errors import ConfigError, not_accepted
from weft.plan.layout import AUTO, parse_layout
from weft.plan.layout import Layout as ReplicaLayouts
from weft.plan.pipeline.build import Schedule
from weft.processes import number_or_auto
from weft.report.readable import print_line

if TYPE_CHECKING:
    from weft.model.resolve import ResolvedModel
    from weft.parallel.auto_layout import ChosenLayout, Machine
    from weft.parallel.replicas.hosts import ReplicaHosts
    from weft.parallel.stages.load_stages import StageLayout
    from weft.plan.level import PlannedReplicas
    from weft.spec import BackboneSpec, JobSpec, RunSpec
    from weft.store.mirror import RunUrl


def user_path(text: str) -> Path:
    if not text:
        raise typer.BadParameter("is empty; name a file or a directory.")
    return Path(text).expanduser()


def run_location(text: str, option: str = "--out") -> Path | RunUrl:
    if "://" not in text:
        return user_path(text)
    if text.startswith("file://"):
        return user_path(text.removeprefix("file://"))
    from weft.store.mirror import RunUrl

    return RunUrl(text.rstrip("/"), option=option)


def path_option(help: str, *names: str, metavar: str = "PATH") -> Any:
    return typer.Option(*names, parser=user_path, metavar=metavar, help=help)


def path_argument(help: str, metavar: str = "PATH") -> Any:
    return typer.Argument(parser=user_path, metavar=metavar, help=help)


def open_for_training(
    location: Path | RunUrl, *, resume: bool, notify: Callable[[str], None]
) -> contextlib.AbstractContextManager[Path]:
    """The local directory of a run; that of a run at a URL is owned and uploaded until the block ends."""
    if isinstance(location, Path):
        return contextlib.nullcontext(location)
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return location.open_for_training(Path(home) / "weft" / "runs", resume=resume, notify=notify)


def open_for_reading(location: Path | RunUrl) -> contextlib.AbstractContextManager[Path]:
    """The local directory of a run; for a run at a URL a copy without tensors."""
    return contextlib.nullcontext(location) if isinstance(location, Path) else location.open_for_reading()


Out = Annotated[
    Any,
    typer.Option(
        parser=run_location, metavar="PATH", help="Where results go, or a URL such as s3://…. Default: output_dir."
    ),
]


Replicas = Annotated[
    str | None,
    typer.Option(metavar="N", help="Copies of the backbone, each with its own jobs; auto: one on every GPU."),
]
Devices = Annotated[
    str | None,
    typer.Option(
        metavar="LIST",
        help="The GPUs to use, such as 0,2; a copy of the backbone, or one of --layout's devices, on each.",
    ),
]
Listen = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help="Let --replicas ranks join from any machine, by `weft rank --connect`."),
]
Cluster = Annotated[
    str | None,
    typer.Option(metavar="ADDRESS", help="Train on a Ray cluster: local, auto, ray://HOST:PORT or HOST:PORT."),
]
GpuType = Annotated[
    str | None, typer.Option(metavar="TYPE", help="With --cluster: the type of GPU to use, such as H100.")
]


@dataclass(frozen=True)
class ReplicaOptions:
    replicas: str | None = None
    devices: str | None = None
    cluster: str | None = None
    gpu_type: str | None = None
    listen: str | None = None

    @property
    def flags(self) -> list[str]:
        given = {
            "--replicas": self.replicas,
            "--devices": self.devices,
            "--cluster": self.cluster,
            "--gpu-type": self.gpu_type,
            "--listen": self.listen,
        }
        return [part for name, value in given.items() if value is not None for part in (name, value)]

    def hosts(self, backbone: BackboneSpec) -> ReplicaHosts | None:
        """Hosts of the replicas; None if this process is enough. ConfigError for an impossible combination."""
        if self.listen is not None and (self.cluster is not None or self.devices is not None):
            flag, how = ("--cluster", "starts ranks itself") if self.cluster else ("--devices", "are the GPUs here")
            raise ConfigError(f"{how}; with --listen others start ranks.", where=flag)
        if self.cluster is not None:
            return self._cluster_hosts(self.cluster, backbone)
        if self.gpu_type is not None:
            raise ConfigError("is for a cluster; give --cluster, or use --devices.", where="--gpu-type")
        if self.replicas is None and self.devices is None and self.listen is None:
            return None
        from weft.parallel.replicas.hosts import joined_hosts, local_hosts

        if self.listen is not None:
            return joined_hosts(self.listen, self.replicas)
        return local_hosts(self.replicas, self.devices, backbone)

    def check(self, backbone: BackboneSpec) -> None:
        """ConfigError for an impossible combination; does not connect to a cluster."""
        if self.cluster is None:
            self.hosts(backbone)

    def _cluster_hosts(self, cluster: str, backbone: BackboneSpec) -> ReplicaHosts:
        if self.devices is not None:
            raise on_cluster_devices("--replicas")
        number = number_or_auto(self.replicas or AUTO, "--replicas", 1)
        from weft.parallel.ray.api import find_hosts

        return find_hosts(cluster, number, backbone, gpu_type=self.gpu_type)


def on_cluster_devices(number_flag: str) -> ConfigError:
    """The error for --devices beside --cluster."""
    message = f"are the GPUs of this machine; on a cluster, use {number_flag} and --gpu-type."
    return ConfigError(message, where="--devices")


def print_join_command(hosts: ReplicaHosts, console: Console) -> None:
    """Prints how to start ranks that the controller does not start itself."""
    if hosts.invitation:
        print_line(console, f"ranks     {hosts.invitation}")


def print_note(console: Console, text: str) -> None:
    print_line(console, f"note      {text}")


_KINDS = (
    "Divide the layers of one backbone into N stages, each in its own process; or tensor:N: every layer over N "
    "processes; or spread:N: N backbones that share the samples of jobs with gradient_sum any_order; or "
    "stages:1+stages:2: unlike ones; or shards:N: N processes that share the frozen weights of one backbone and have "
    "jobs of their own, "
    "shards:2,stages:2: those of every stage"
)
Layout = Annotated[str | None, typer.Option(metavar="stages:N", help=f"{_KINDS}; or auto: what is predicted fastest.")]
SCHEDULES = tuple(Schedule)
PipelineSchedule = Annotated[
    str | None,
    typer.Option("--schedule", metavar="NAME", help=f"With --layout: auto (default), {', '.join(SCHEDULES)}."),
]
WHERE = "--layout"


@dataclass(frozen=True)
class LayoutOptions:
    layout: str | None = None
    schedule: str | None = None
    devices: str | None = None
    """Numbers of the GPUs, separated by commas; None: the first ones."""
    planned: PlannedReplicas | None = None
    may_be_auto: bool = True
    """True if the verb can choose a layout."""

    @property
    def flags(self) -> list[str]:
        given = {"--layout": self.layout, "--schedule": self.schedule, "--devices": self.devices}
        return [part for name, value in given.items() if value is not None for part in (name, value)]

    @property
    def stages(self) -> StageLayout | None:
        """Stages of the replicas; None for a single undivided replica."""
        if self._sizes == (1,) and self._tensor == 1:
            return None
        from weft.parallel.stages.load_stages import StageLayout

        schedule = self._read_schedule()
        return StageLayout(self._sizes, schedule, self._shards, self._tensor, self.devices, self.planned)

    @property
    def chosen(self) -> ReplicaLayouts:
        if self.layout is None:
            return ReplicaLayouts()
        if self.is_auto:
            raise ConfigError("auto is for weft train, sweep and plan; name a layout, such as stages:2.", where=WHERE)
        return parse_layout(self.layout, where=WHERE, or_auto=self.may_be_auto)

    def hosts(self, model: ResolvedModel | None, jobs: Iterable[JobSpec]) -> ReplicaHosts | None:
        """Hosts of the replicas, each with jobs of its own; None if one engine trains on all replicas. One engine
        trains on a single replica, on replicas that share a job with gradient_sum any_order, and on `planned` replicas,
        each of which may have only some of the jobs."""
        return None if model is None or len(self._ranks(jobs)) == 1 else self.in_ranks(model, jobs)

    def in_ranks(self, model: ResolvedModel, jobs: Iterable[JobSpec]) -> ReplicaHosts:
        """Hosts of the replicas, also of a single one; replicas that share jobs are in one rank."""
        from weft.parallel.replicas.hosts import layout_hosts
        from weft.parallel.stages.transport import find_gpus

        gpus = find_gpus(model, self.chosen.num_devices, self.devices)
        numbers = self.devices.split(",") if self.devices is not None else [str(k) for k, _ in enumerate(gpus)]
        divided: list[StageLayout | None] = []
        seen: list[str | None] = []
        parts, first = self._ranks(jobs), 0
        for part in parts:
            devices = ",".join(numbers[first : first + part.num_devices]) or None
            stages = LayoutOptions(str(part), devices=devices, planned=self.planned if len(parts) == 1 else None).stages
            divided.append(stages)
            seen.append(gpus[first] if gpus and stages is None else None)
            first += part.num_devices
        return layout_hosts(divided, seen)

    def _ranks(self, jobs: Iterable[JobSpec]) -> tuple[ReplicaLayouts, ...]:
        is_shared = self.planned is not None or any(job.gradient_sum == "any_order" for job in jobs)
        return (self.chosen,) if is_shared else self.chosen.apart

    def notes(self, spec: RunSpec, model: ResolvedModel) -> tuple[str, ...]:
        if self.stages is None:
            return ()
        from weft.parallel.stages.load_stages import layout_notes, pair_notes

        stages = self.stages
        return (*layout_notes(spec, model, stages), *pair_notes(spec, model, stages))

    def choose(
        self,
        spec: RunSpec,
        model: ResolvedModel,
        base_dir: Path,
        machine: Machine,
        check_more: Callable[[LayoutOptions], None] | None = None,
    ) -> tuple[LayoutOptions, ChosenLayout]:
        """The options with a layout instead of auto, and the reasons; `check_more` raises for one to be left out."""
        from weft.parallel.auto_layout import choose_for

        def check(layout: ReplicaLayouts) -> None:
            options = replace(self, layout=str(layout))
            options.check(spec, (), model)
            if check_more is not None:
                check_more(options)

        found = choose_for(spec, model, base_dir, machine, check, in_stages=self.schedule is not None)
        return LayoutOptions() if found.layout.is_one_device else replace(self, layout=str(found.layout)), found

    def check(self, spec: RunSpec, replica_flags: Sequence[str], model: ResolvedModel | None = None) -> None:
        """ConfigError or ModelError for an impossible layout, before any weight is read. `replica_flags`: flags of
        ReplicaOptions that were given, too; `model`: None if it is not resolved yet."""
        self.check_alone(replica_flags)
        sizes, schedule = self._sizes, self._read_schedule()
        if self.schedule is not None and self.layout is None:
            raise ConfigError("is for stages; give --layout stages:N too.", where="--schedule")
        if schedule is not None and len(sizes) > 1:
            raise ConfigError(f"is for one replica in stages; leave it out with {self.layout}.", where="--schedule")
        if self.stages is None and schedule is not None:
            raise ConfigError(f"is for several stages, and {self.layout} is one; leave it out.", where="--schedule")
        if self.stages is None and self.devices is not None:
            raise ConfigError(f"are for several devices, and {self.layout} is one; leave them out.", where="--devices")
        if self.stages is not None:
            from weft.model.resolve import resolve
            from weft.parallel.stages.load_stages import check_layout

            check_layout(spec, model or resolve(spec.backbone), self.stages)

    def check_alone(self, replica_flags: Sequence[str]) -> None:
        """ConfigError for an unknown schedule and for options that contradict the layout."""
        self._read_schedule()
        if self.is_auto and self.devices is not None:
            raise ConfigError("are for a layout with a name; leave them out with auto.", where="--devices")
        if self.layout is not None and replica_flags:
            raise ConfigError(f"determines the replicas; leave {replica_flags[0]} out, or --layout.", where=WHERE)

    @property
    def is_auto(self) -> bool:
        return self.layout == AUTO

    @property
    def _sizes(self) -> tuple[int, ...]:
        layout = self.chosen
        if len({replica.tensor for replica in layout.replicas}) > 1:
            message = f"got {self.layout!r}; all replicas have the same tensor:N."
            raise ConfigError(message, where=WHERE)
        if self._tensor > 1 and max(layout.shards) > 1:
            message = f"got {self.layout!r}; tensor:N and shards:N exclude each other, and each goes with stages:N."
            raise ConfigError(message, where=WHERE)
        return layout.replica_sizes

    @property
    def _tensor(self) -> int:
        return self.chosen.replicas[0].tensor

    @property
    def _shards(self) -> tuple[int, ...]:
        """Number of devices that share each copy of the frozen weights; empty if none is shared."""
        shards = self.chosen.shards
        return shards if max(shards) > 1 else ()

    def _read_schedule(self) -> Schedule | None:
        """The named schedule; None for auto, which takes the fastest one in the simulator."""
        if self.schedule in (None, AUTO):
            return None
        if self.schedule not in SCHEDULES:
            raise not_accepted(self.schedule, (AUTO, *SCHEDULES), "--schedule")
        return Schedule(self.schedule)
