"""A small run, on a cluster or in this process, and what is in its files."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from weft.engine.events import Event
from weft.engine.train import execute_run, load_engine, prepare_run
from weft.job_state import JobState
from weft.parallel.replicas.hosts import ReplicaHosts, rank_order
from weft.parallel.replicas.replicated_engine import ReplicatedEngine
from weft.spec import AdapterSpec, JobSpec, RunSpec
from weft.store.run_dir import RunDirectory

WORDS = ["warp", "Weft", "loom", "Yarn", "shed", "Reed", "heddle", "Shuttle", "selvage", "Twill"]
CLOCK = datetime.datetime(2026, 1, 2)


def write_data(folder: Path) -> None:
    """Rows that all jobs learn."""
    rows = [{"prompt": f"{word}\n", "completion": word.upper()} for word in WORDS]
    (folder / "upper.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def run_spec(max_steps: int = 12) -> RunSpec:
    """Three jobs that differ in seed and dropout, and save often."""
    jobs = tuple(
        JobSpec(
            name,
            ("upper.jsonl",),
            adapter=AdapterSpec(r=4, target_modules=("q_proj", "down_proj"), lora_dropout=dropout),
            max_steps=max_steps,
            save_steps=2,
            save_total_limit=1,
            max_length=48,
            global_batch_size=4,
            learning_rate=2e-3,
            seed=seed,
        )
        for seed, (name, dropout) in enumerate({"plain": 0.0, "dropout": 0.2, "other": 0.0}.items())
    )
    return RunSpec("tiny", jobs, capacity=96, device="cpu")


def train(
    spec: RunSpec,
    data: Path,
    out: Path,
    hosts: ReplicaHosts | None = None,
    on_event: Callable[[Any, Event], None] = lambda engine, event: None,
    *,
    resume: bool = False,
) -> tuple[dict[str, JobState], list[Event]]:
    """Trains on those hosts, or in this process; how each job ended, and what happened."""

    def over_replicas(spec: RunSpec, jobs: Any, wall: Any) -> Any:
        assert hosts is not None
        return ReplicatedEngine.load(spec, hosts.start(rank_order(spec, jobs)), clock=CLOCK, wall=wall)

    events: list[Event] = []
    opener = load_engine if hosts is None else over_replicas
    run = prepare_run(spec, base_dir=data, clock=CLOCK, open_engine=opener)

    def on_rank_event(event: Event) -> None:
        events.append(event)
        on_event(run.engine, event)

    try:
        with RunDirectory.open(out, resume=resume) as directory:
            states = execute_run(run, directory, on_event=on_rank_event)
    finally:
        run.engine.close()
    return states, events


def bytes_of(out: Path, spec: RunSpec) -> dict[str, bytes]:
    """The adapters of all jobs, and the tensors of their last checkpoints."""
    found = [path for job in spec.jobs for path in sorted((out / job.name).rglob("*.safetensors"))]
    assert len(found) == 2 * len(spec.jobs), found
    return {str(path.relative_to(out)): path.read_bytes() for path in found}
