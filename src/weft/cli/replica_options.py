"""The options of verbs that train on several replicas: how many there are, and where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from weft.errors import ConfigError
from weft.gpu_choice import AUTO, number_or_auto

if TYPE_CHECKING:
    from weft.parallel.replicas.places import ReplicaHosts
    from weft.spec import BackboneSpec

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
    """What was said about replicas on the command line."""

    replicas: str | None = None
    devices: str | None = None
    cluster: str | None = None
    gpu_type: str | None = None
    listen: str | None = None

    @property
    def flags(self) -> list[str]:
        """The same, as it was said."""
        given = {
            "--replicas": self.replicas,
            "--devices": self.devices,
            "--cluster": self.cluster,
            "--gpu-type": self.gpu_type,
            "--listen": self.listen,
        }
        return [part for name, value in given.items() if value is not None for part in (name, value)]

    def places(self, backbone: BackboneSpec) -> ReplicaHosts | None:
        """Where the replicas are; None where this process is enough. ConfigError for what cannot be."""
        if self.listen is not None and (self.cluster is not None or self.devices is not None):
            flag, how = ("--cluster", "starts ranks itself") if self.cluster else ("--devices", "are the GPUs here")
            raise ConfigError(f"{how}; with --listen somebody else starts ranks.", where=flag)
        if self.cluster is not None:
            return self._cluster_places(self.cluster, backbone)
        if self.gpu_type is not None:
            raise ConfigError("is for a cluster; give --cluster, or use --devices.", where="--gpu-type")
        if self.replicas is None and self.devices is None and self.listen is None:
            return None
        from weft.parallel.replicas.places import joined_hosts, local_hosts

        if self.listen is not None:
            return joined_hosts(self.listen, self.replicas)
        return local_hosts(self.replicas, self.devices, backbone)

    def check(self, backbone: BackboneSpec) -> None:
        """ConfigError for what cannot be; a cluster is not asked."""
        if self.cluster is None:
            self.places(backbone)

    def _cluster_places(self, cluster: str, backbone: BackboneSpec) -> ReplicaHosts:
        if self.devices is not None:
            found = "are the GPUs of this machine; on a cluster, use --replicas and --gpu-type"
            raise ConfigError(f"{found}.", where="--devices")
        number = number_or_auto(self.replicas or AUTO, "--replicas", 1)
        from weft.parallel.ray.load import find_hosts

        return find_hosts(cluster, number, backbone, gpu_type=self.gpu_type)


def print_join_command(places: ReplicaHosts, console: Console) -> None:
    """Says how to start ranks that the controller does not start itself."""
    if places.invitation:
        console.print(f"ranks     {places.invitation}", markup=False, highlight=False, soft_wrap=True)
