"""A small run over any number of ranks, and what is in its files."""

from __future__ import annotations

import dataclasses
import datetime
import json
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from small_model import small_model
from thread_ranks import ThreadRanks

from weft.engine.engine import Engine
from weft.engine.events import Event
from weft.engine.resume import plan_resume
from weft.engine.train import PreparedRun, execute_run, load_engine, prepare_run
from weft.job_state import JobState
from weft.model.source import load_tokenizer
from weft.parallel.replicas.hosts import rank_order
from weft.parallel.replicas.rank_group import SILENT_S, RankGroup
from weft.parallel.replicas.replicated_engine import ReplicatedEngine
from weft.spec import AdapterSpec, JobSpec, RunSpec
from weft.store.run_dir import RunDirectory

TIMES = ("time", "eval_runtime")
WORDS = ["warp", "Weft", "loom", "Yarn", "shed", "Reed", "heddle", "Shuttle", "selvage", "Twill"]
TASKS: dict[str, Callable[[str], str]] = {"upper": str.upper, "lower": str.lower, "double": lambda word: word * 2}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def write_data(folder: Path) -> None:
    """A file of rows for every task."""
    for name, answer in TASKS.items():
        rows = [{"prompt": f"{word}\n", "completion": answer(word)} for word in WORDS]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def run_spec(**settings: Any) -> RunSpec:
    """Five jobs: dropout, early stopping, priorities, frequent and rare checkpoints, one that diverges."""
    usual = {"max_length": 48, "global_batch_size": 4, "learning_rate": 2e-3}
    dropout = AdapterSpec(r=4, target_modules=("q_proj", "down_proj"), lora_dropout=0.2)
    small = AdapterSpec(r=2, target_modules=("v_proj",))
    jobs = (
        JobSpec("dropout", ("upper.jsonl",), adapter=dropout, max_steps=8, warmup_steps=3, save_steps=3, **usual),
        JobSpec(
            "stops", ("lower.jsonl",), adapter=dropout, max_steps=9, save_steps=1, save_total_limit=1, eval_data=2,
            eval_steps=1, early_stopping_patience=2, **{**usual, "learning_rate": 1.0},
        ),
        JobSpec("rare", ("double.jsonl",), adapter=small, max_steps=7, save_steps=5, **usual),
        JobSpec("urgent", ("upper.jsonl",), adapter=small, max_steps=5, save_steps=2, priority=3, seed=1, **usual),
        JobSpec(
            "diverges", ("lower.jsonl",), adapter=small, max_steps=40, save_steps=50, max_grad_norm=0,
            **{**usual, "learning_rate": 1e12},
        ),
    )  # fmt: skip
    return RunSpec(str(small_model()), jobs, capacity=96, device="cpu", **settings)


@contextmanager
def opened(
    spec: RunSpec, base_dir: Path, num_ranks: int, **options: Any
) -> Iterator[tuple[PreparedRun, ThreadRanks | None]]:
    """A prepared run, on one engine in place for 0 ranks; `options` are those of `ThreadRanks`."""
    clock, done = datetime.datetime(2026, 1, 2), options.pop("done", frozenset())
    silent_s = options.pop("silent_s", SILENT_S)
    pool: ThreadRanks | None = None

    def over_threads(spec: RunSpec, jobs: Any, wall: Any) -> tuple[RunSpec, ReplicatedEngine, tuple[str, ...]]:
        nonlocal pool
        order = rank_order(spec, jobs)
        pool = ranks = ThreadRanks(order, **options)
        group = RankGroup(ranks, num_ranks, silent_s=silent_s)
        try:
            engine = ReplicatedEngine(group, load_tokenizer(spec.base_model), clock=clock, wall=wall)
        except BaseException:
            group.abandon()
            raise
        return dataclasses.replace(spec, capacity=engine.limits.capacity), engine, engine.notes

    opener = over_threads if num_ranks else load_engine
    run = prepare_run(spec, base_dir=base_dir, skip=done, clock=clock, open_engine=opener)
    try:
        yield run, pool
    finally:
        run.engine.close()


def train(
    spec: RunSpec,
    data: Path,
    out: Path,
    num_ranks: int,
    on_event: Callable[[Engine | ReplicatedEngine, Event], None] = lambda engine, event: None,
    **options: Any,
) -> tuple[dict[str, JobState], list[Event]]:
    """Runs, or goes on with the run there; how each job stands, and what happened."""
    events: list[Event] = []
    resume = RunDirectory.holds_run(out)
    with RunDirectory.open(out, resume=resume) as directory:
        done = plan_resume(spec, directory).done if resume else frozenset()
        with opened(spec, data, num_ranks, done=done, **options) as (run, _):

            def observe(event: Event) -> None:
                events.append(event)
                on_event(run.engine, event)  # type: ignore[arg-type]

            states = execute_run(run, directory, on_event=observe)
    return states, events


def files_of(out: Path, job: str) -> dict[str, Any]:
    """What a job has left: adapter, its last checkpoint, metrics without times, and how it ended.

    Before that, a job that moves has further checkpoints, and one that fails may have some or none.
    """
    status = json.loads((out / job / "status.json").read_text())
    found: dict[str, Any] = {k: status.get(k) for k in ("state", "reason", "step", "early_stopped", "trained_tokens")}
    last = f"step-{status['step']:08}"
    kept = [*(out / job / "adapter").glob("adapter_*"), *(out / job / "checkpoints" / last).glob("*.safetensors")]
    assert bool(kept) == (status["state"] == "succeeded") and len(kept) in (0, 3), kept
    found |= {str(path.relative_to(out)): path.read_bytes() for path in kept}
    lines = (out / job / "metrics.jsonl").read_text().splitlines()
    found["metrics"] = [{k: v for k, v in json.loads(line).items() if k not in TIMES} for line in lines]
    return found
