"""What a controller costs: its processor time for each step that a rank reports. The ranks are scripted.

One process plays all ranks without a backbone, over the connections that real ranks use.
`python -m benchmarks.replicas.controller ADDRESS NUM_RANKS` joins the controller that listens there as so many ranks.
Every rank reports a step and its microbatch each `SEND_S`, together. That is what a real rank reports where every
microbatch completes one step; where microbatches are faster, a report holds several.

controller_us       microseconds per step and rank with 64 scripted ranks of four jobs each: everything from the
                    connection to the event that a run receives, up to the first job's end. No table is drawn.
controller_end_ms   milliseconds for each job that ends: what is left is placed again.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path

from benchmarks.processes import child_variables
from weft.data.load import load_job_data
from weft.engine.events import Event, JobEnded, JobStarted, JobSucceeded, MicrobatchDone, StepDone
from weft.engine.execute.protocol import ReplicaFacts
from weft.errors import WeftError
from weft.model.source import load_tokenizer
from weft.parallel.replicas.connections import KEY_VARIABLE, connect
from weft.parallel.replicas.hosts import RankPool
from weft.parallel.replicas.messages import (
    ALIVE_S,
    SEND_S,
    CheckJob,
    Command,
    EndRank,
    EventBatch,
    JobChecked,
    RankAlive,
    RankEvent,
    RankIdle,
    RankJoined,
    RankOrder,
    RankReady,
    Report,
    SetUp,
    TrainJob,
)
from weft.parallel.replicas.rank_group import RankGroup
from weft.parallel.replicas.replicated_engine import ReplicatedEngine
from weft.plan.admit import Budget
from weft.spec import AdapterSpec, BackboneSpec, JobSpec
from weft.store.run_dir import library_versions

CAPACITY = 8192
FACTS = ReplicaFacts(
    base_model="scripted",
    config={},
    modules=(),
    device="cpu",
    device_kind="cpu",
    dtype="float32",
    storage="none",
    kernels="none",
    path="reference",
    works_on=False,
    vocabulary=256,
    max_positions=CAPACITY,
    backbone_bytes=0,
    weight_bytes=8,
    environment={"device": "scripted"},
)


class ScriptedPool(RankPool):
    """A pool whose ranks are all played by one process."""

    _player: subprocess.Popen[bytes] | None = None

    def launch(self, address: str, variables: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
        """Starts the player with the first rank; the others are the same process."""
        if self._player is None:
            command = [sys.executable, "-m", __name__, address, str(len(self._variables))]
            env = {**variables, "PYTHONPATH": child_variables()["PYTHONPATH"]}
            with log.open("ab") as out:
                self._player = subprocess.Popen(command, env=env, stdout=out, stderr=out, start_new_session=True)
        return self._player


@dataclass
class ScriptedRank:
    """One rank as its controller sees it."""

    connection: Connection
    jobs: deque[JobSpec] = field(default_factory=deque)
    """Those it trains, the next to step first."""
    steps: dict[str, int] = field(default_factory=dict)
    num_applied: int = 0
    is_over: bool = False

    @classmethod
    def join(cls, address: str, key: str) -> ScriptedRank:
        """Joins as a rank whose replica is loaded."""
        while True:
            connection = connect(address, key)
            connection.send(RankJoined(socket.gethostname(), os.getpid(), library_versions()))
            if isinstance(connection.recv(), SetUp):
                rank = cls(connection)
                rank.send(RankReady(FACTS, CAPACITY, Budget(), weights="none"))
                return rank
            # The controller does not expect it yet.

    def send(self, report: Report) -> None:
        """Sends a report."""
        self.connection.send(report)

    def apply(self, command: Command) -> None:
        """Accepts every job, and trains the jobs it is given."""
        self.num_applied += 1
        match command:
            case CheckJob(order):
                self.send(JobChecked(order.spec.name, num_parameters=1000))
            case TrainJob(order):
                self.jobs.append(order.spec)
                self.steps[order.spec.name] = 0
                self.send(EventBatch((RankEvent(JobStarted(order.spec.name, 0, _num_steps(order.spec))),)))
            case EndRank():
                self.is_over = True
        if not self.jobs:
            self.send(RankIdle(self.num_applied))

    def step(self) -> None:
        """Reports the next step of the job whose turn it is."""
        if not self.jobs:
            return
        job = self.jobs.popleft()
        self.steps[job.name] += 1
        events = _events_of(job, self.steps[job.name], tuple(other.name for other in (job, *self.jobs)))
        if self.steps[job.name] < _num_steps(job):
            self.jobs.append(job)
        else:
            events += (JobSucceeded(job.name, self.steps[job.name], None),)
        self.send(EventBatch(tuple(RankEvent(event) for event in events)))
        if not self.jobs:
            self.send(RankIdle(self.num_applied))


def _num_steps(job: JobSpec) -> int:
    assert job.max_steps is not None, "scripted jobs set their number of steps"
    return job.max_steps


def _events_of(job: JobSpec, step: int, jobs: tuple[str, ...]) -> tuple[Event, ...]:
    """Events of one step of a job."""
    done = StepDone(
        job=job.name,
        step=step,
        num_steps=_num_steps(job),
        epoch=step / _num_steps(job),
        loss=1.0 / step,
        mean_token_accuracy=0.5,
        grad_norm=1.0,
        learning_rate=job.learning_rate,
        tokens=CAPACITY,
        num_tokens=CAPACITY * step,
        seconds=SEND_S * step,
    )
    return (MicrobatchDone(jobs, CAPACITY, CAPACITY, SEND_S), done)


def play(address: str, num_ranks: int) -> None:
    """Is so many ranks until the controller has no more to do."""
    key = os.environ[KEY_VARIABLE]
    ranks = {rank.connection: rank for rank in (ScriptedRank.join(address, key) for _ in range(num_ranks))}
    step_s = alive_s = time.monotonic()
    while ranks:
        for connection in wait(list(ranks), timeout=max(0.0, step_s - time.monotonic())):
            assert isinstance(connection, Connection)
            ranks[connection].apply(connection.recv())
            if ranks[connection].is_over:
                del ranks[connection]
        now_s = time.monotonic()
        if now_s >= step_s:
            step_s = now_s + SEND_S
            for rank in ranks.values():
                rank.step()
        if now_s >= alive_s:
            alive_s = now_s + ALIVE_S
            for rank in ranks.values():
                rank.send(RankAlive())


NUM_RANKS, JOBS_PER_RANK, NUM_STEPS = 64, 4, 40
MODEL = "tiny"


def measure_controller(num_ranks: int = NUM_RANKS, num_steps: int = NUM_STEPS) -> dict[str, float]:
    """Keys as in `python -m benchmarks replicas --json`; `num_steps`: of every job."""
    order = RankOrder(BackboneSpec(base_model=MODEL), CAPACITY, CAPACITY, "auto", (AdapterSpec(),))
    ranks = RankGroup(ScriptedPool(order, [{}] * num_ranks), num_ranks)
    engine = ReplicatedEngine(ranks, load_tokenizer(MODEL))
    try:
        _submit(engine, num_ranks * JOBS_PER_RANK, num_steps)
        return _follow(engine)
    finally:
        engine.close()


def _submit(engine: ReplicatedEngine, num_jobs: int, num_steps: int) -> None:
    """Jobs on one small file, which the scripted ranks never read."""
    with tempfile.TemporaryDirectory(prefix="weft-controller-") as folder:
        file = Path(folder) / "rows.jsonl"
        file.write_text("".join(json.dumps({"text": f"row {i}"}) + "\n" for i in range(64)))
        specs = [JobSpec(name=f"job{i:04}", train_data=(str(file),), max_steps=num_steps) for i in range(num_jobs)]
        data = load_job_data(specs[0], engine.executor.tokenizer, Path(folder))
        for spec in specs:
            engine.submit(spec, data, base_dir=folder)


def _follow(engine: ReplicatedEngine) -> dict[str, float]:
    """Receives all that happens, and divides the processor time by it."""
    num_steps, num_ended = -1, 0
    moments: list[float] = []
    """Processor time at the first step, whose cause was placing, and at the first end of a job."""
    for event in engine.events():
        if isinstance(event, StepDone) and not num_ended:
            num_steps += 1
            moments = moments or [time.process_time()]
        elif isinstance(event, JobEnded):
            num_ended += 1
            moments = moments if num_ended > 1 else [*moments, time.process_time()]
    if num_steps < 1 or len(moments) < 2:
        raise WeftError("no scripted rank reported steps and ends.", where="controller_us")
    first_s, ending_s = moments
    return {
        "controller_us": 1e6 * (ending_s - first_s) / num_steps,
        "controller_end_ms": 1e3 * (time.process_time() - ending_s) / num_ended,
    }


if __name__ == "__main__":
    play(sys.argv[1], int(sys.argv[2]))
