"""The way to a Ray cluster: one on this machine, one that runs already, or one at an address."""

from __future__ import annotations

import logging
import os
import socket
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from weft.errors import ConfigError, MissingExtraError, first_line, install_command
from weft.parallel.ray.resources import ClusterNode, alive_nodes

LOCAL, AUTO = "local", "auto"
CLIENT = "ray://"
CLIENT_PORT = 10001
ANSWER_S = 10.0
"""Seconds that a cluster has to answer."""
OBJECT_BYTES = 100 * 2**20
"""Of a cluster of our own: only messages are kept in it."""
NOT_SERVED = "Starting Ray client server failed"
"""What Ray's client server says when the process that was to serve a client has died as soon as it was forked."""
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""How a client of HTTP/2, which Ray speaks, begins: its preface, and a frame of no settings."""
_SETTINGS = 4
"""The type of the frame that a server of HTTP/2 begins with."""


def need_ray() -> Any:
    """Ray, or a clear sentence that says how to install it. What Ray itself would print stays off this terminal."""
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
    """This process as part of a cluster."""

    nodes: list[ClusterNode]
    """Those that are there."""
    is_own: bool
    """It was connected for this, and not by a program that goes on using Ray."""

    @property
    def is_here(self) -> bool:
        """Whether it is all on this machine."""
        own = {"127.0.0.1", need_ray().util.get_node_ip_address()}
        return all(node.address in own for node in self.nodes)

    @property
    def is_lost(self) -> bool:
        """Whether the way to the cluster is gone for good. Whoever uses Ray then would have it search for a cluster."""
        return not need_ray().is_initialized()

    def close(self) -> None:
        """Leaves the cluster, which ends one that was started for this."""
        if self.is_own:
            need_ray().shutdown()


def connect(address: str, *, num_cpus: int | None = None) -> ClusterConnection:
    """Connects this process to a cluster, unless it is connected.

    `local` starts one on this machine, with room for `num_cpus` replicas if they are on CPUs; `auto` is the one that
    RAY_ADDRESS names, or that runs on this machine. ConfigError for one that does not answer.
    """
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
            # What the client warns of is raised too, and said in one sentence.
            warnings.simplefilter("ignore", UserWarning)
            ray.init(address=address, **settings)
    except Exception as error:
        raise _refusal(error, address, where) from None


def _refusal(error: Exception, address: str, where: str) -> ConfigError:
    """Why a cluster that answers cannot be used."""
    if address == AUTO and isinstance(error, ConnectionError):
        return ConfigError("none runs on this machine, and RAY_ADDRESS names none.", where=where)
    hint, reason = None, first_line(error).rstrip(":")
    if NOT_SERVED in str(error):
        reason = "its client server can start no process for this client"
        hint = "ray_client_server.err on its head says why; GRPC_ENABLE_FORK_SUPPORT=0 there may help."
    elif address.startswith(CLIENT):
        hint = "If it wants tokens, set RAY_AUTH_MODE=token."
    return ConfigError(f"no Ray cluster can be used there ({reason}).", where=where, hint=hint)


def _check_answer(address: str, where: str) -> None:
    """ConfigError unless something that speaks as Ray does answers soon; Ray itself would try for minutes."""
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
