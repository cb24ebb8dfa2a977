"""Real ranks on this machine: their speed, the recovery from a killed one, and the bits of two on one GPU.

scale2_cpu   16 jobs on the embedded backbone by ranks of one thread each: tokens per second over two ranks, over those
             over one rank. The time runs from the first job's start to the last step of all, so loading is left out and
             uneven ends count. One and two ranks take turns; the median of the turns' ratios is the figure.
recover_s    seconds from `kill -9` of one of two ranks until every job that was on it has taken a step again, from its
             last checkpoint on the rank that is left.

bits_two_ranks   adapters of a TinyLlama-shaped run by `weft train --devices 0,0`, two ranks on one GPU, whose
                 bytes are not those of the same run by one process. Both ranks must have computed something.
"""

from __future__ import annotations

import datetime
import json
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.clock import release
from benchmarks.processes import ONE_THREAD, prepare_processes, timed
from benchmarks.wall.inputs import WallJobs, write_jobs, write_model, write_problems
from weft.engine.events import Event, JobStarted, StepDone
from weft.engine.run_engine import RunEngine
from weft.engine.train import PreparedRun, execute_run, prepare_run
from weft.errors import WeftError
from weft.kernels.device import default_device
from weft.parallel.replicas.hosts import RankPool, rank_order
from weft.parallel.replicas.rank_group import RankGroup
from weft.parallel.replicas.replicated_engine import ReplicatedEngine
from weft.plan.cost.shape import find_shape
from weft.spec import JobSpec, RunSpec, run_from_mapping
from weft.store.run_dir import RunDirectory
from weft.store.wall_clock import WallClock

NUM_ROWS = 256
NUM_TURNS = 3
KILL_AT = 4
"""The step of the first job after which its rank is killed."""


@dataclass(frozen=True)
class SmallJobs:
    """Jobs on short sums, which differ in learning rate and rank."""

    num_jobs: int
    num_steps: int
    save_steps: int
    num_free: int = 0
    """Of them, how many have free sums."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of all jobs, besides."""

    def write(self, folder: Path) -> RunSpec:
        """Writes their data into a folder and returns the run."""
        rows = [{"prompt": f"Add {i} and {7 * i}.", "completion": f"{i} + {7 * i} = {8 * i}"} for i in range(NUM_ROWS)]
        (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return run_from_mapping(self._mapping)

    def write_file(self, jobs_file: Path) -> None:
        """Writes the run as a jobs file, beside its data."""
        jobs_file.write_text(json.dumps(self._mapping))

    @property
    def _mapping(self) -> dict[str, Any]:
        jobs = [
            {"name": f"job{i:02}", "learning_rate": 1e-4 * (1 + i), "adapter": {"r": (8, 16)[i % 2]}}
            | ({"gradient_sum": "any_order"} if i < self.num_free else {})
            for i in range(self.num_jobs)
        ]
        defaults = {
            "train_data": "sums.jsonl",
            "global_batch_size": 8,
            "max_steps": self.num_steps,
            "save_steps": self.save_steps,
            **self.settings,
        }
        return {"base_model": "tiny", "device": "cpu", "defaults": defaults, "jobs": jobs}


SCALING = SmallJobs(num_jobs=16, num_steps=10, save_steps=1000)
RECOVERING = SmallJobs(num_jobs=4, num_steps=200, save_steps=2)


def measure_scaling(jobs: SmallJobs = SCALING, num_turns: int = NUM_TURNS) -> dict[str, float]:
    """Keys as in `python -m benchmarks replicas --json`."""
    speeds: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(num_turns):
        for num_ranks, found in speeds.items():
            pace = Pace()
            _train(jobs, num_ranks, pace)
            found.append(pace.tokens_per_s)
    ratios = [two / one for one, two in zip(speeds[1], speeds[2], strict=True)]
    return {
        "scale2_cpu": statistics.median(ratios),
        "scale2_cpu_one_tok_s": statistics.median(speeds[1]),
        "scale2_cpu_two_tok_s": statistics.median(speeds[2]),
    }


def measure_recovery(jobs: SmallJobs = RECOVERING) -> dict[str, float]:
    """Keys as in `python -m benchmarks replicas --json`."""
    killing = Killing()
    _train(jobs, 2, killing)
    return {"recover_s": killing.recovered_s}


@dataclass
class Pace:
    """How fast all jobs train together, by when their events come."""

    num_tokens: int = 0
    started_s: float | None = None
    stepped_s: float = 0.0
    is_over: bool = False

    @property
    def tokens_per_s(self) -> float:
        """From the first start to the last step."""
        if self.started_s is None or self.stepped_s <= self.started_s:
            raise WeftError("no job took a step.", where="scale2_cpu")
        return self.num_tokens / (self.stepped_s - self.started_s)

    def observe(self, event: Event, engine: ReplicatedEngine) -> None:
        """Takes note of starts and steps."""
        now_s = time.perf_counter()
        if isinstance(event, JobStarted) and self.started_s is None:
            self.started_s = now_s
        elif isinstance(event, StepDone):
            self.num_tokens += event.tokens
            self.stepped_s = now_s


@dataclass
class Killing:
    """Kills the rank of the first job that comes to a certain step, and waits until its jobs step again."""

    lost: set[str] = field(default_factory=set)
    """Jobs of the killed rank that have not taken a step since."""
    restarted: set[str] = field(default_factory=set)
    killed_s: float | None = None
    stepped_s: float = 0.0

    @property
    def is_over(self) -> bool:
        """Whether all jobs of the killed rank go on."""
        return self.killed_s is not None and not self.lost

    @property
    def recovered_s(self) -> float:
        """Seconds from the kill to the step of the last of its jobs."""
        if self.killed_s is None or self.lost:
            raise WeftError("the jobs of a killed rank took no step again.", where="recover_s")
        return self.stepped_s - self.killed_s

    def observe(self, event: Event, engine: ReplicatedEngine) -> None:
        """Kills when it is time; steps count from where a job has started again, since older ones may be under way."""
        if isinstance(event, StepDone) and self.killed_s is None and event.step >= KILL_AT:
            rank = engine.jobs[event.job].rank
            assert rank is not None, "a job that steps is on a rank"
            self.lost = {job.name for job in engine.jobs.values() if job.rank == rank}
            self.killed_s = time.perf_counter()
            os.kill(engine.process_ids[rank], signal.SIGKILL)
        elif isinstance(event, JobStarted) and self.killed_s is not None:
            self.restarted.add(event.job)
        elif isinstance(event, StepDone) and event.job in self.lost & self.restarted:
            self.lost.remove(event.job)
            self.stepped_s = time.perf_counter()


def _train(jobs: SmallJobs, num_ranks: int, watch: Pace | Killing) -> None:
    """Trains jobs over ranks as `weft train` does, in a folder that goes afterwards."""

    def load(
        spec: RunSpec, specs: Sequence[JobSpec], wall: WallClock | None
    ) -> tuple[RunSpec, RunEngine, tuple[str, ...]]:
        prepare_processes()
        ranks = RankGroup(RankPool(rank_order(spec, specs), [ONE_THREAD] * num_ranks), num_ranks)
        return ReplicatedEngine.load(spec, ranks, clock=datetime.datetime.now(), wall=wall)

    with tempfile.TemporaryDirectory(prefix="weft-replicas-") as name:
        folder = Path(name)
        run = prepare_run(jobs.write(folder), base_dir=folder, open_engine=load)
        try:
            with RunDirectory.open(folder / "run", resume=False) as directory:
                _follow(run, directory, watch)
        finally:
            run.engine.close()


def _follow(run: PreparedRun, directory: RunDirectory, watch: Pace | Killing) -> None:
    engine = run.engine
    assert isinstance(engine, ReplicatedEngine), "it was loaded as one"
    execute_run(run, directory, on_event=lambda event: watch.observe(event, engine), should_stop=lambda: watch.is_over)


SHAPE = "tinyllama-1.1b"
TWO_RANKS = WallJobs(6, 12, {"eval_data": 16, "eval_steps": 6})
NUM_PROBLEMS = 512
SETTINGS = ("capacity=8192", "memory_limit=0.45")
"""Of both runs; the capacity is a number because it decides bits and must not follow from the memory that is free."""
ADAPTER = "adapter/adapter_model.safetensors"


def measure_two_ranks() -> dict[str, float]:
    """Keys as in `python -m benchmarks replicas --json`."""
    device = default_device()
    with tempfile.TemporaryDirectory(prefix="weft-two-ranks-") as name:
        folder = Path(name)
        write_model(folder / "model", find_shape(SHAPE), device)
        release(device)
        write_problems(folder / "problems.jsonl", NUM_PROBLEMS)
        write_jobs(folder / "jobs.yaml", folder / "model", TWO_RANKS, folder / "problems.jsonl")
        differing = compare_runs(folder / "jobs.yaml", folder, SETTINGS, ("--devices", "0,0"))
    return {"bits_two_ranks": float(len(differing))}


def compare_runs(jobs_file: Path, folder: Path, settings: Sequence[str], two: Sequence[str]) -> list[str]:
    """Trains a jobs file in one process and with the options in `two`; jobs whose adapters differ."""
    outs = folder / "one", folder / "two"
    for out, words in zip(outs, ((), two), strict=True):
        timed(["weft", "train", str(jobs_file), *settings, *words, "--out", str(out)], {}, out.with_suffix(".log"))
    events = json.loads((outs[1] / "timeline.json").read_text())["traceEvents"]
    if len({event["pid"] for event in events if event["name"] == "forward_backward"}) < 2:
        raise WeftError("only one of two ranks computed anything.", where="bits_two_ranks")
    return differing_adapters(*outs)


def differing_adapters(one: Path, two: Path) -> list[str]:
    """Jobs of two run directories whose adapters are not the same bytes; one that is missing differs."""
    found = sorted({path.parts[-3] for out in (one, two) for path in out.glob(f"*/{ADAPTER}")})
    if not found:
        raise WeftError("no adapter was written.", where=str(one))
    files = [(job, one / job / ADAPTER, two / job / ADAPTER) for job in found]
    return [job for job, a, b in files if not (a.exists() and b.exists() and a.read_bytes() == b.read_bytes())]
