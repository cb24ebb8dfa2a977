"""Options that several verbs have: locations of runs, replicas, and the words for a layout (`layout_options.py`).

In a path `~` is the user's home, and an empty one is refused, not taken for the current directory. A run may also be at
a URL that fsspec knows, such as s3://bucket/runs/first.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from weft.errors import ConfigError
from weft.plan.layout import AUTO, DispatchRule
from weft.plan.pipeline.build import Schedule
from weft.processes import number_or_auto
from weft.report.readable import print_line

if TYPE_CHECKING:
    from weft.parallel.replicas.hosts import ReplicaHosts
    from weft.spec import BackboneSpec
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
    typer.Option(
        metavar="HOST:PORT",
        help="Let --replicas ranks, or the processes of --layout, join from any machine, by `weft rank --connect`.",
    ),
]
Cluster = Annotated[
    str | None,
    typer.Option(metavar="ADDRESS", help="Train on a Ray cluster: local, auto, ray://HOST:PORT or HOST:PORT."),
]
GpuType = Annotated[
    str | None, typer.Option(metavar="TYPE", help="With --cluster: the type of GPU to use, such as H100.")
]


def flags_of(options: object, *names: str) -> list[str]:
    """Flags of the options that were given, each with its value after it."""
    given = {f"--{name.replace('_', '-')}": getattr(options, name) for name in names}
    return [part for flag, value in given.items() if value is not None for part in (flag, value)]


@dataclass(frozen=True)
class ReplicaOptions:
    replicas: str | None = None
    devices: str | None = None
    cluster: str | None = None
    gpu_type: str | None = None
    listen: str | None = None

    @property
    def flags(self) -> list[str]:
        return flags_of(self, "replicas", "devices", "cluster", "gpu_type", "listen")

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
Layout = Annotated[str | None, typer.Option(metavar="stages:N", help=f"{_KINDS}; or auto: the fastest by prediction.")]
SCHEDULES = tuple(Schedule)
PipelineSchedule = Annotated[
    str | None,
    typer.Option("--schedule", metavar="NAME", help=f"With --layout: auto (default), {', '.join(SCHEDULES)}."),
]
RULES = tuple(DispatchRule)
DispatchBy = Annotated[
    str | None,
    typer.Option(
        "--dispatch",
        metavar="RULE",
        help="How replicas share the samples of jobs with gradient_sum any_order: balanced (default), length or even.",
    ),
]
