"""Trains a run on a Ray cluster from within a program, which may be connected to it already."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from weft.engine.events import Event
from weft.engine.resume import check_same_data, plan_resume, with_recorded_capacity
from weft.engine.train import clock_of, execute_run, prepare_run
from weft.errors import ConfigError
from weft.job_state import JobState
from weft.parallel.ray.connect import AUTO
from weft.parallel.ray.load import find_hosts
from weft.parallel.replicas.load import load_replicated
from weft.parallel.replicas.places import rank_order
from weft.parallel.replicas.replicated_engine import ReplicatedEngine
from weft.spec import JobSpec, RunSpec, load_run
from weft.store.run_dir import RunDirectory
from weft.wall_clock import WallClock

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup


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
    """Trains a run, or a jobs file, over replicas on a cluster; returns how each of the jobs that were left ended.

    A process that is connected to Ray, such as a driver or a task, uses that cluster and stays connected; any other
    connects to `cluster` for the time of this. `replicas` is by default a replica on every GPU. They are put into
    `placement_group`, a bundle each, if there is one. Paths are relative to the jobs file, or to the working directory.
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
        places = find_hosts(cluster, replicas, spec.backbone, gpu_type=gpu_type, group=placement_group)

        def open_engine(
            spec: RunSpec, jobs: Sequence[JobSpec], wall: WallClock | None
        ) -> tuple[RunSpec, ReplicatedEngine, tuple[str, ...]]:
            loaded = load_replicated(spec, places.start(rank_order(spec, jobs)), clock=began, wall=wall)
            stack.callback(loaded[1].close)
            return loaded

        prepared = prepare_run(spec, base_dir=base_dir, skip=done, clock=began, open_engine=open_engine)
        if directory is None:
            # Only now: what cannot be trained leaves nothing behind.
            directory = stack.enter_context(RunDirectory.open(folder, resume=False))
        else:
            check_same_data(prepared, directory)
        return execute_run(prepared, directory, on_event=on_event)
