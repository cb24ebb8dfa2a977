"""The connection to a Ray cluster, how many replicas it has room for, and what each takes of it.

The cluster is one on this machine, one that runs already, or one at an address. This module is imported without Ray.
"""

from __future__ import annotations

import logging
import os
import socket
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from weft.errors import ConfigError, MissingExtraError, closest, first_line, install_command

LOCAL, AUTO = "local", "auto"
CLIENT = "ray://"
CLIENT_PORT = 10001
ANSWER_S = 10.0
OBJECT_BYTES = 100 * 2**20
"""Object store of our own cluster: it only holds messages."""
NOT_SERVED = "Starting Ray client server failed"
"""Message of Ray's client server when its process for a client died as soon as it was forked."""
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""First bytes of an HTTP/2 client, which Ray's is: the preface and an empty settings frame."""
_SETTINGS = 4
"""Type of the frame that an HTTP/2 server sends first."""


def need_ray() -> Any:
    """Ray, without its own output; MissingExtraError if it is not installed."""
    quiet = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_DEDUP_LOGS_SKIP_REGEX": ".*",
    }
    for name, value in quiet.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError as error:
        hint = f"Install it: {install_command('ray')}."
        raise MissingExtraError(f"a cluster needs {error.name}.", hint=hint) from None
    return ray


@dataclass(frozen=True)
class ClusterConnection:
    nodes: list[ClusterNode]
    is_own: bool
    """True if this call made the connection, and no program uses Ray after it."""

    @property
    def is_here(self) -> bool:
        own = {"127.0.0.1", need_ray().util.get_node_ip_address()}
        return all(node.address in own for node in self.nodes)

    @property
    def is_lost(self) -> bool:
        """True if the connection is gone for good; a call of Ray would then search for another cluster."""
        return not need_ray().is_initialized()

    def close(self) -> None:
        """Leaves the cluster, which ends one that was started here."""
        if self.is_own:
            need_ray().shutdown()


def connect(address: str, *, num_cpus: int | None = None) -> ClusterConnection:
    """Connects this process to a cluster, unless it is connected. `local` starts one on this machine, with room for
    `num_cpus` replicas on CPUs; `auto` is the one that RAY_ADDRESS names, or that runs on this machine. ConfigError for
    one that does not answer."""
    ray = need_ray()
    is_own = not ray.is_initialized()
    if is_own:
        logging.getLogger("ray").setLevel(logging.ERROR)
        where = f"--cluster {address}"
        if address == AUTO:
            address = os.environ.get("RAY_ADDRESS") or AUTO
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": False}
        if address == LOCAL:
            cores = os.cpu_count() or 1
            quiet |= {"address": LOCAL, "include_dashboard": False, "object_store_memory": OBJECT_BYTES}
            ray.init(num_cpus=max(cores, num_cpus or 0), **quiet)
        else:
            _join(ray, address, where, quiet)
    return ClusterConnection(alive_nodes(ray.nodes()), is_own)


def _join(ray: Any, address: str, where: str, settings: Mapping[str, Any]) -> None:
    if address != AUTO:
        _check_answer(address, where)
    try:
        with warnings.catch_warnings():
            # The client also raises what it warns of.
            warnings.simplefilter("ignore", UserWarning)
            ray.init(address=address, **settings)
    except Exception as error:
        raise _refusal(error, address, where) from None


def _refusal(error: Exception, address: str, where: str) -> ConfigError:
    if address == AUTO and isinstance(error, ConnectionError):
        return ConfigError("none runs on this machine, and RAY_ADDRESS names none.", where=where)
    hint, reason = None, first_line(error).rstrip(":")
    if NOT_SERVED in str(error):
        reason = "its client server can start no process for this client"
        hint = "ray_client_server.err on its head has the reason; GRPC_ENABLE_FORK_SUPPORT=0 there may help."
    elif address.startswith(CLIENT):
        hint = "If it wants tokens, set RAY_AUTH_MODE=token."
    return ConfigError(f"no Ray cluster can be used there ({reason}).", where=where, hint=hint)


def _check_answer(address: str, where: str) -> None:
    """ConfigError unless a Ray cluster answers soon; Ray itself would try for minutes."""
    host, colon, port = address.removeprefix(CLIENT).rpartition(":")
    if not colon and address.startswith(CLIENT):
        host, port = port, str(CLIENT_PORT)
    if not host or not port.isdecimal():
        accepted = "accepted are local, auto, ray://HOST:PORT and HOST:PORT"
        raise ConfigError(f"got {address!r}; {accepted}.", where="--cluster")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_S) as sock:
            sock.settimeout(ANSWER_S)
            answer = b""
            if os.environ.get("RAY_USE_TLS", "0") in ("", "0"):
                sock.sendall(_PREFACE)
                with suppress(TimeoutError):
                    answer = sock.recv(9)
                if len(answer) < 4 or answer[3] != _SETTINGS:
                    raise ConfigError("what answers there is no Ray cluster.", where=where)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"no Ray cluster answers there ({reason}).", where=where) from None


TYPE_PREFIX = "accelerator_type:"
"""Prefix of a node's kind of GPU among Ray's resources."""
TYPE_SHARE = 0.001


@dataclass(frozen=True)
class ClusterNode:
    address: str
    num_cpus: float
    num_gpus: float
    gpu_type: str | None

    @classmethod
    def of(cls, found: Mapping[str, Any]) -> ClusterNode:
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
    number: int
    bundle: Mapping[str, float]


def alive_nodes(found: Sequence[Mapping[str, Any]]) -> list[ClusterNode]:
    return [ClusterNode.of(node) for node in found if node.get("Alive")]


def replica_request(
    nodes: Sequence[ClusterNode], number: int | None, *, device: str, gpu_type: str | None
) -> ReplicaRequest:
    """Resources of a run: a GPU for each replica, or a CPU where there are none or `device` is cpu. `number`: None for
    one per GPU, or without GPUs one per node. ConfigError for more than there are, and for GPUs of several types of
    which none is chosen."""
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


def _number(wanted: int | None, auto: int, most: int, kind: str) -> int:
    number = auto if wanted is None else wanted
    if number > most or not most:
        found = f"the cluster has {most} {kind}{'' if most == 1 else 's'}"
        raise ConfigError(f"got {'auto' if wanted is None else wanted}; {found}.", where="--replicas")
    return number


def _gpu_type(nodes: Sequence[ClusterNode], wanted: str | None) -> str | None:
    """GPU type of all replicas: unlike GPUs would give other bits. None where Ray knows none."""
    counts: dict[str | None, int] = {}
    for node in nodes:
        if node.num_gpus:
            counts[node.gpu_type] = counts.get(node.gpu_type, 0) + int(node.num_gpus)
    names = sorted(name for name in counts if name is not None)
    listed = ", ".join(f"{counts[name]} {name}" for name in names) or "none that Ray knows a type of"
    if wanted is not None and wanted not in names:
        near = closest(wanted, names)
        hint = f"Did you mean {near}?" if near else None
        raise ConfigError(f"got {wanted!r}; the cluster has {listed}.", where="--gpu-type", hint=hint)
    if wanted is None and len(counts) > 1:
        unknown = f" and {counts[None]} of an unknown type" if None in counts else ""
        found = f"has GPUs of several types, {listed}{unknown}; replicas of one run are on alike GPUs"
        raise ConfigError(f"{found}. Choose one by --gpu-type.", where="--cluster")
    return wanted or (names[0] if names else None)


def in_words(amounts: Mapping[str, float]) -> str:
    parts = [
        name.removeprefix(TYPE_PREFIX) if name.startswith(TYPE_PREFIX) else f"{amount:g} {name}"
        for name, amount in amounts.items()
    ]
    return ", ".join(parts)
