"""How many replicas a cluster has room for, and what each takes of it; without Ray, by what Ray says of its nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.errors import ConfigError, closest

TYPE_PREFIX = "accelerator_type:"
"""How Ray calls a node's kind of GPU among its resources."""
TYPE_SHARE = 0.001
"""What a replica takes of that, so that it is placed on such a node."""


@dataclass(frozen=True)
class ClusterNode:
    """A machine of a cluster."""

    address: str
    num_cpus: float
    num_gpus: float
    gpu_type: str | None

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> ClusterNode:
        """By what `ray.nodes` tells of it."""
        resources = found.get("Resources", {})
        types = [name.removeprefix(TYPE_PREFIX) for name in resources if name.startswith(TYPE_PREFIX)]
        return cls(
            address=str(found.get("NodeManagerAddress", "")),
            num_cpus=resources.get("CPU", 0.0),
            num_gpus=resources.get("GPU", 0.0),
            gpu_type=types[0] if types else None,
        )


@dataclass(frozen=True)
class ReplicaRequest:
    """Replicas that are asked for, and what each takes."""

    number: int
    bundle: Mapping[str, float]


def alive_nodes(found: Sequence[Mapping[str, Any]]) -> list[ClusterNode]:
    """Those of `ray.nodes` that are there."""
    return [ClusterNode.of(node) for node in found if node.get("Alive")]


def replica_request(
    nodes: Sequence[ClusterNode], number: int | None, *, device: str, gpu_type: str | None
) -> ReplicaRequest:
    """What a run takes of a cluster: a GPU for each replica, or a CPU where there are none or `device` is cpu.

    `number` is None for as many as there are GPUs; without GPUs that is one on each node. ConfigError for more than
    there are, and for GPUs of several types none of which is chosen.
    """
    count = sum(int(node.num_gpus) for node in nodes)
    if device == "cpu" or (not count and device == "auto"):
        if gpu_type is not None:
            raise ConfigError(f"got {gpu_type!r}, and this run is on CPUs.", where="--gpu-type")
        cpus = int(sum(node.num_cpus for node in nodes))
        fitting = [node for node in nodes if node.num_cpus >= 1]
        return ReplicaRequest(_number(number, len(fitting), cpus, "CPU"), {"CPU": 1.0})
    if not count:
        raise ConfigError(f"got {device!r}, and the cluster has no GPU.", where="device")
    chosen = _gpu_type(nodes, gpu_type)
    fitting = [node for node in nodes if node.num_gpus and (chosen is None or node.gpu_type == chosen)]
    count = sum(int(node.num_gpus) for node in fitting)
    share = {} if chosen is None else {TYPE_PREFIX + chosen: TYPE_SHARE}
    kind = "GPU" if chosen is None else f"{chosen} GPU"
    return ReplicaRequest(_number(number, count, count, kind), {"GPU": 1.0, "CPU": 1.0, **share})


def _number(asked: int | None, auto: int, most: int, kind: str) -> int:
    number = auto if asked is None else asked
    if number > most or not most:
        found = f"the cluster has {most} {kind}{'' if most == 1 else 's'}"
        raise ConfigError(f"got {'auto' if asked is None else asked}; {found}.", where="--replicas")
    return number


def _gpu_type(nodes: Sequence[ClusterNode], asked: str | None) -> str | None:
    """The type of all replicas: replicas of unlike GPUs would give other bits. None where Ray knows none."""
    counts: dict[str | None, int] = {}
    for node in nodes:
        if node.num_gpus:
            counts[node.gpu_type] = counts.get(node.gpu_type, 0) + int(node.num_gpus)
    names = sorted(name for name in counts if name is not None)
    listed = ", ".join(f"{counts[name]} {name}" for name in names) or "none that Ray knows a type of"
    if asked is not None and asked not in names:
        near = closest(asked, names)
        hint = f"Did you mean {near}?" if near else None
        raise ConfigError(f"got {asked!r}; the cluster has {listed}.", where="--gpu-type", hint=hint)
    if asked is None and len(counts) > 1:
        unknown = f" and {counts[None]} of an unknown type" if None in counts else ""
        found = f"has GPUs of several types, {listed}{unknown}; replicas of one run are on alike GPUs"
        raise ConfigError(f"{found}. Choose one by --gpu-type.", where="--cluster")
    return asked or (names[0] if names else None)


def in_words(amounts: Mapping[str, float]) -> str:
    """Resources, for a sentence."""
    parts = [
        name.removeprefix(TYPE_PREFIX) if name.startswith(TYPE_PREFIX) else f"{amount:g} {name}"
        for name, amount in amounts.items()
    ]
    return ", ".join(parts)
