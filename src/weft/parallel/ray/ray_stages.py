"""Processes of one layout on a Ray cluster: tasks that run `weft rank`, which Ray starts again elsewhere when a node is
lost. They connect to this process, which has to be on one of the cluster's nodes.
"""

from __future__ import annotations

import functools
import os
import secrets
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import ray

from weft.errors import ConfigError
from weft.parallel.ray.connect import CLIENT, ClusterConnection, ReplicaRequest
from weft.parallel.ray.ray_ranks import CONNECTION_ERRORS, TAKEN_OVER
from weft.parallel.replicas.connections import KEY_VARIABLE
from weft.parallel.replicas.joined_stages import JoinedStages
from weft.processes import end_with_parent


class RayStages(JoinedStages):
    def __init__(self, address: str, connection: ClusterConnection, request: ReplicaRequest) -> None:
        """Starts a process for each replica of the request."""
        if address.startswith(CLIENT):
            raise ConfigError("a layout's processes have to reach this one; run it on a node.", where="--cluster")
        self._connection = connection
        host, key = ray.util.get_node_ip_address(), secrets.token_hex(16)
        super().__init__((host, 0), key)
        resources = dict(request.bundle)
        kind = ray.remote(run_rank).options(
            num_cpus=resources.pop("CPU", 0), num_gpus=resources.pop("GPU", 0), resources=resources, max_retries=-1
        )
        variables = {name: os.environ[name] for name in TAKEN_OVER if name in os.environ} | {KEY_VARIABLE: key}
        self._tasks = [kind.remote(f"{host}:{self.port}", variables, Path.cwd()) for _ in range(request.number)]

    def end(self) -> None:
        super().end()
        for task in [] if self._connection.is_lost else self._tasks:
            with suppress(*CONNECTION_ERRORS):
                ray.cancel(task, force=True)
        self._connection.close()


def run_rank(address: str, variables: Mapping[str, str], folder: Path) -> None:
    words = [sys.executable, "-m", "weft", "rank", "--connect", address]
    ends = functools.partial(end_with_parent, os.getpid())
    subprocess.run(words, env={**os.environ, **variables}, cwd=folder, preexec_fn=ends, check=False)
