"""The workers of a service as actors of a Ray cluster, which Ray starts again wherever there is room.

An actor keeps one `weft worker` running on its node. It needs nothing of the service but the database and the file
store, so one that comes back on another node takes jobs from the queue as any other does.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from weft.errors import ConfigError
from weft.parallel.ray.connect import ClusterConnection, connect, need_ray
from weft.parallel.ray.resources import ReplicaRequest, replica_request
from weft.serve.supervise import Child, Supervisor

LOG = logging.getLogger("weft.serve")
SLACK_S = 10.0
"""Seconds that an actor's answer may take beyond what its worker may."""


class WorkerActor:
    """Keeps one worker running on the node that it is on."""

    def __init__(self, name: str, arguments: Sequence[str], folder: Path, *, is_spread: bool) -> None:
        """`folder`: the working directory of the service. With `is_spread`, prompts come from other machines."""
        with suppress(OSError):
            os.chdir(folder)
        if is_spread:
            arguments = [*arguments, "--host", need_ray().util.get_node_ip_address()]
        self._supervisor = Supervisor([Child(name, arguments)])
        self._supervisor.start()

    def where(self) -> str:
        """The address of its node."""
        return str(need_ray().util.get_node_ip_address())

    def stop(self, grace_s: float) -> bool:
        """Waits for the worker's end; returns whether it ended well."""
        self._supervisor.ask_to_stop()
        return self._supervisor.stop(grace_s)


class ClusterWorkers:
    """All workers of a service on a cluster."""

    def __init__(self, connection: ClusterConnection, request: ReplicaRequest) -> None:
        self._connection = connection
        self._request = request
        self._actors: dict[str, Any] = {}

    @property
    def number(self) -> int:
        """Workers there are, of all backbones."""
        return self._request.number

    def start(self, workers: Mapping[str, Sequence[str]]) -> None:
        """Starts a worker with its arguments for each name; returns at once."""
        ray = need_ray()
        resources = dict(self._request.bundle)
        kind = ray.remote(WorkerActor).options(
            num_cpus=resources.pop("CPU", 0),
            num_gpus=resources.pop("GPU", 0),
            resources=resources,
            max_restarts=-1,
            max_concurrency=4,
        )
        is_spread = not self._connection.is_here
        for name, arguments in workers.items():
            self._actors[name] = kind.remote(name, list(arguments), Path.cwd(), is_spread=is_spread)
            threading.Thread(target=self._report_start, args=(name,), daemon=True).start()

    def stop(self, grace_s: float) -> bool:
        """Waits for all workers, ends those that outlast `grace_s`, and returns whether all ended well."""
        ray = need_ray()
        ended = [actor.stop.remote(grace_s) for actor in self._actors.values()]
        done, _ = ray.wait(ended, num_returns=len(ended), timeout=grace_s + SLACK_S)
        clean = len(done) == len(ended)
        for ref in done:
            try:
                clean &= ray.get(ref)
            except ray.exceptions.RayError:
                clean = False
        for actor in self._actors.values():
            ray.kill(actor)
        self._connection.close()
        return clean

    def _report_start(self, name: str) -> None:
        ray = need_ray()
        try:
            fields = {"child": name, "node": ray.get(self._actors[name].where.remote())}
            LOG.info("started", extra={"fields": fields})
        except ray.exceptions.RayError as error:
            last = str(error).strip().splitlines()[-1:]
            LOG.error("a worker cannot be started", extra={"fields": {"child": name, "error": "".join(last)}})


def find_workers(
    address: str, number: int | None, num_models: int, *, db_url: str, gpu_type: str | None
) -> ClusterWorkers:
    """Connects to a cluster and says where workers are on it; ConfigError for more than there is room for.

    `number` is of workers for each backbone; None: as many as there are GPUs, or nodes without them, shared evenly.
    """
    connection = connect(address, num_cpus=None if number is None else number * num_models)
    try:
        if db_url.startswith("sqlite") and not connection.is_here:
            found = "is SQLite, which is for one machine, and the cluster has others"
            raise ConfigError(f"{found}; use postgresql://….", where="--db")
        total = None if number is None else number * num_models
        request = replica_request(connection.nodes, total, device="auto", gpu_type=gpu_type)
        if request.number < num_models:
            found = f"there is room for {request.number}, and {num_models} backbones need a worker each"
            raise ConfigError(f"{found}.", where="--workers")
    except ConfigError as error:
        connection.close()
        raise (error.at("--workers") if error.where == "--replicas" else error) from None
    return ClusterWorkers(connection, ReplicaRequest(request.number // num_models * num_models, request.bundle))
