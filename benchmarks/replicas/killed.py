"""`kill -9` at random moments of whole runs, from the start of their first rank to their last file.

kills_differ     adapters of all these runs whose bytes are not those of one undisturbed process.
kills_repeated   steps that a job took twice although its own rank was never killed: neighbours go on.
kill_seen_s      the longest time from the death of a rank until its controller starts another one or goes on without.
num_kills        runs in which something was killed: a rank in every other one; else the controller, which is then
                 resumed, or with Ray installed an actor's process, or a node with all that is on it.
"""

from __future__ import annotations

import datetime
import importlib.util
import itertools
import os
import random
import signal
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.processes import JOBS_FILE, ONE_THREAD, TrainCommand, prepare_processes
from benchmarks.replicas.trained import SmallJobs, differing_adapters
from weft.engine.events import Event, JobWarning, StepDone
from weft.engine.run_engine import RunEngine
from weft.engine.train import execute_run, prepare_run
from weft.parallel.ray.api import find_hosts
from weft.parallel.ray.connect import AUTO, need_ray
from weft.parallel.replicas.connections import Ranks
from weft.parallel.replicas.hosts import RankPool, RankProcess, rank_order
from weft.parallel.replicas.messages import RankOrder
from weft.parallel.replicas.rank_group import RankGroup
from weft.parallel.replicas.records import RankRecord
from weft.parallel.replicas.replicated_engine import ReplicatedEngine
from weft.spec import BackboneSpec, JobSpec, RunSpec
from weft.store.run_dir import RunDirectory
from weft.store.wall_clock import WallClock

NODE_ROOM = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
"""Room for one replica: each has a node of its own."""


def has_ray() -> bool:
    """Whether Ray is installed."""
    return importlib.util.find_spec("ray") is not None


class NodeCluster:
    """Two nodes, each made of processes of its own."""

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster
        self._spare = cluster.add_node(**NODE_ROOM)

    @classmethod
    @contextmanager
    def opened(cls) -> Iterator[NodeCluster]:
        """A cluster that this process is connected to, and that goes afterwards."""
        ray = need_ray()
        from ray.cluster_utils import Cluster

        cluster = Cluster(initialize_head=True, head_node_args={**NODE_ROOM, "include_dashboard": False})
        try:
            nodes = cls(cluster)
            ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR", configure_logging=False)
            yield nodes
        finally:
            ray.shutdown()
            cluster.shutdown()

    def open_ranks(self, order: RankOrder) -> Ranks:
        """Two ranks as actors."""
        return find_hosts(AUTO, 2, BackboneSpec(base_model="tiny", device="cpu")).open_ranks(order)

    def lose_one(self) -> None:
        """Kills all processes of the node that this process is not on."""
        self._cluster.remove_node(self._spare, allow_graceful=False)


JOBS = SmallJobs(num_jobs=4, num_steps=12, save_steps=3)
NUM_KILLS = 20
RANK, CONTROLLER, ACTOR, NODE = "rank", "controller", "actor", "node"
LOOK_S = 0.02
"""Between two looks for a rank that can be killed."""


@dataclass
class KillFigures:
    """What all runs together showed."""

    num_kills: int = 0
    num_differing: int = 0
    num_repeated: int = 0
    seen_s: list[float] = field(default_factory=list)


class WatchedGroup(RankGroup):
    """Ranks of which one dies at a moment; it notes when that is seen."""

    killed_s: float | None = None
    seen_s: float | None = None

    def replace(self, rank: RankRecord, how: str, *, is_wanted: bool) -> None:
        """Takes note of the time."""
        if self.killed_s is not None and self.seen_s is None:
            self.seen_s = time.monotonic() - self.killed_s
        super().replace(rank, how, is_wanted=is_wanted)

    def kill_one(self, drawn: random.Random) -> bool:
        """Kills the process of one that has one; False if there is none."""
        living = [pid for rank in self if (pid := _process_id(rank)) is not None]
        if living:
            self.killed_s = time.monotonic()
            with suppress(ProcessLookupError):
                os.kill(drawn.choice(living), signal.SIGKILL)
        return bool(living)

    def lose_node(self, nodes: NodeCluster) -> bool:
        """Kills all processes of a node."""
        self.killed_s = time.monotonic()
        nodes.lose_one()
        return True


def measure_kills(jobs: SmallJobs = JOBS, num_kills: int = NUM_KILLS, seed: int = 0) -> dict[str, float]:
    """Keys as in `python -m benchmarks replicas --json`."""
    found, drawn = KillFigures(), random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="weft-killed-") as name:
        folder = Path(name)
        runs = _Runs(folder, jobs.write(folder), drawn)
        jobs.write_file(folder / JOBS_FILE)
        TrainCommand(folder).start("alone").wait()
        begun_s = time.monotonic()
        runs.disturb("undisturbed", lambda group: None)
        whole_s = time.monotonic() - begun_s
        for number, kind in enumerate(_kinds()):
            out, moment_s = f"killed-{number}", drawn.uniform(0, whole_s)
            kill = runs.kill_controller if kind == CONTROLLER else runs.kill_rank
            # A moment may come too late for a run that was faster than the first.
            found.num_kills += kill(out, moment_s, kind, found)
            found.num_differing += len(differing_adapters(folder / "alone", folder / out))
            if found.num_kills == num_kills:
                break
    return {
        "kills_differ": float(found.num_differing),
        "kills_repeated": float(found.num_repeated),
        "kill_seen_s": max(found.seen_s, default=0.0),
        "num_kills": float(found.num_kills),
    }


def _kinds() -> Iterator[str]:
    """What is killed: a rank every other time."""
    for other in itertools.cycle([CONTROLLER, ACTOR, NODE] if has_ray() else [CONTROLLER]):
        yield RANK
        yield other


@dataclass(frozen=True)
class _Runs:
    """The same jobs again and again, each time into a directory of their own."""

    folder: Path
    spec: RunSpec
    drawn: random.Random

    def kill_controller(self, out: str, moment_s: float, kind: str, found: KillFigures) -> bool:
        """A run whose controller dies, and that is then resumed; whether it did."""
        command = TrainCommand(self.folder)
        first = command.start(out, "--replicas", "2")
        with suppress(subprocess.TimeoutExpired):
            first.wait(moment_s)
            return False
        first.kill()
        first.wait()
        command.go_on(out, "--replicas", "2").wait()
        return True

    def kill_rank(self, out: str, moment_s: float, kind: str, found: KillFigures) -> bool:
        """A run over two ranks of which one dies, and what is seen of it; whether one did."""
        is_over = threading.Event()

        def kill(group: WatchedGroup) -> None:
            is_over.wait(moment_s)
            while not is_over.is_set():
                if group.lose_node(nodes) if nodes is not None and kind == NODE else group.kill_one(self.drawn):
                    return
                is_over.wait(LOOK_S)

        with NodeCluster.opened() if kind in (ACTOR, NODE) else nullcontext() as nodes:
            try:
                group, repeated = self.disturb(out, kill, nodes.open_ranks if nodes is not None else None)
            finally:
                is_over.set()
        found.num_repeated += repeated
        found.seen_s += [] if group.seen_s is None else [group.seen_s]
        return group.killed_s is not None

    def disturb(
        self,
        out: str,
        disturb: Callable[[WatchedGroup], None],
        open_ranks: Callable[[RankOrder], Ranks] | None = None,
    ) -> tuple[WatchedGroup, int]:
        """Trains over two ranks beside a thread that disturbs; how many steps jobs repeated without having lost any."""
        groups: list[WatchedGroup] = []
        last, repeated, lost = Counter[str](), Counter[str](), set[str]()

        def load(
            spec: RunSpec, specs: Sequence[JobSpec], wall: WallClock | None
        ) -> tuple[RunSpec, RunEngine, tuple[str, ...]]:
            order = rank_order(spec, specs)
            prepare_processes()
            ranks = RankPool(order, [ONE_THREAD] * 2) if open_ranks is None else open_ranks(order)
            groups.append(WatchedGroup(ranks, 2))
            threading.Thread(target=disturb, args=groups, daemon=True).start()
            return ReplicatedEngine.load(spec, groups[0], clock=datetime.datetime.now(), wall=wall)

        def observe(event: Event) -> None:
            if isinstance(event, JobWarning):
                lost.update(event.jobs)
            elif isinstance(event, StepDone):
                repeated[event.job] += event.step <= last[event.job]
                last[event.job] = max(last[event.job], event.step)

        run = prepare_run(self.spec, base_dir=self.folder, open_engine=load)
        try:
            with RunDirectory.open(self.folder / out, resume=False) as directory:
                execute_run(run, directory, on_event=observe)
        finally:
            run.engine.close()
        return groups[0], sum(count for job, count in repeated.items() if job not in lost)


def _process_id(rank: RankRecord) -> int | None:
    """The process of a rank, once there is one."""
    handle = rank.process
    return handle.process.pid if isinstance(handle, RankProcess) else getattr(handle, "pid", None)
