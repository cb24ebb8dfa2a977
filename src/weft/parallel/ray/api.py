"""Trains a run on a Ray cluster from within a program, which may be connected to it already."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from weft.engine.events import Event
from weft.engine.resume import check_same_inputs, plan_resume, with_recorded_capacity
from weft.engine.train import clock_of, execute_run, prepare_run
from weft.errors import ConfigError, counted
from weft.job_state import JobState
from weft.parallel.ray.connect import AUTO, LOCAL, ReplicaRequest, connect, replica_request
from weft.parallel.replicas.connections import Ranks
from weft.parallel.replicas.hosts import ReplicaHosts, rank_order
from weft.parallel.replicas.messages import RankOrder
from weft.parallel.replicas.replicated_engine import ReplicatedEngine
from weft.spec import BackboneSpec, JobSpec, RunSpec, load_run
from weft.store.run_dir import RunDirectory
from weft.store.wall_clock import WallClock

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

    from weft.parallel.ray.ray_stages import RayStages


def train(
    run: RunSpec | Path | str,
    *,
    out: Path | str | None = None,
    replicas: int | None = None,
    cluster: str = AUTO,
    gpu_type: str | None = None,
    placement_group: PlacementGroup | None = None,
    resume: bool = False,
    on_event: Callable[[Event], None] = lambda event: None,
) -> dict[str, JobState]:
    """Trains a run, or a jobs file, over replicas on a cluster; returns the final states of the jobs that were left.

    A process that is connected to Ray, such as a driver or a task, uses that cluster and stays connected; any other
    connects to `cluster` for this call. `replicas`: default one on every GPU. With a `placement_group` each takes one
    of its bundles. Paths are relative to the jobs file, or to the working directory.
    """
    spec = run if isinstance(run, RunSpec) else load_run(run)
    base_dir = Path() if isinstance(run, RunSpec) else Path(run).parent
    if "://" in str(out or spec.output_dir):
        found = f"got {str(out or spec.output_dir)!r}; accepted is a directory that all nodes see"
        raise ConfigError(f"{found}. The command weft train --cluster takes URLs.", where="out")
    folder, done, began = Path(out or spec.output_dir), frozenset[str](), datetime.datetime.now()
    RunDirectory.check(folder, resume=resume)
    with ExitStack() as stack:
        directory = stack.enter_context(RunDirectory.open(folder, resume=True)) if resume else None
        if directory is not None:
            done = plan_resume(spec, directory).done
            spec, began = with_recorded_capacity(spec, directory), clock_of(directory.read_run()) or began
        if len(done) == len(spec.jobs):
            return {}
        hosts = find_hosts(cluster, replicas, spec.backbone, gpu_type=gpu_type, group=placement_group)

        def open_engine(
            spec: RunSpec, jobs: Sequence[JobSpec], wall: WallClock | None
        ) -> tuple[RunSpec, ReplicatedEngine, tuple[str, ...]]:
            loaded = ReplicatedEngine.load(spec, hosts.start(rank_order(spec, jobs)), clock=began, wall=wall)
            stack.callback(loaded[1].close)
            return loaded

        prepared = prepare_run(spec, base_dir=base_dir, skip=done, clock=began, open_engine=open_engine)
        if directory is None:
            # Only now: a run that cannot be trained leaves no files.
            directory = stack.enter_context(RunDirectory.open(folder, resume=False))
        else:
            check_same_inputs(prepared, directory)
        return execute_run(prepared, directory, on_event=on_event)


def find_hosts(
    address: str,
    number: int | None,
    backbone: BackboneSpec,
    *,
    gpu_type: str | None = None,
    group: PlacementGroup | None = None,
) -> ReplicaHosts:
    """Connects to a cluster and plans the replicas of a run on it; ConfigError for more than fit. `number`: None for a
    replica on every GPU, or on every node without GPUs. `group`: the caller's placement group, with a bundle for each
    replica."""
    connection = connect(address, num_cpus=number if address == LOCAL else None)
    try:
        if group is not None:
            request = _request_within(group, number)
        else:
            request = replica_request(connection.nodes, number, device=backbone.device, gpu_type=gpu_type)
    except ConfigError:
        connection.close()
        raise

    def open_ranks(order: RankOrder) -> Ranks:
        from weft.parallel.ray.ray_ranks import RayRanks

        return RayRanks(order, request, connection, group)

    # Ray shows every rank its own GPU.
    return ReplicaHosts(
        request.number, open_ranks, f"actors on a Ray cluster of {counted(len(connection.nodes), 'node')}"
    )


def open_stages(address: str, number: int, backbone: BackboneSpec, gpu_type: str | None) -> RayStages:
    """Connects to a cluster and starts the processes of a layout there; ConfigError for more than fit."""
    connection = connect(address, num_cpus=number if address == LOCAL else None)
    try:
        from weft.parallel.ray.ray_stages import RayStages

        request = replica_request(connection.nodes, number, device=backbone.device, gpu_type=gpu_type)
        return RayStages(address, connection, request)
    except BaseException:
        connection.close()
        raise


def _request_within(group: PlacementGroup, number: int | None) -> ReplicaRequest:
    """A replica in each of the first bundles of a placement group."""
    bundles = group.bundle_specs
    number = len(bundles) if number is None else number
    if number > len(bundles):
        raise ConfigError(f"got {number}; the placement group has {len(bundles)} bundles.", where="replicas")
    if any(bundle != bundles[0] for bundle in bundles[:number]):
        raise ConfigError(f"its bundles differ: {bundles}; replicas take alike ones.", where="placement_group")
    return ReplicaRequest(number, bundles[0])
