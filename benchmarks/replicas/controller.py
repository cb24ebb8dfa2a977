"""What a controller costs: its processor time for each step that a rank tells it.

controller_us       microseconds per step and rank with 64 scripted ranks of four jobs each: everything from the
                    connection to the event that a run hears, up to the first job's end. No table is drawn.
controller_end_ms   milliseconds for each job that ends: what is left is placed anew.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

from benchmarks.replicas.scripted import CAPACITY, ScriptedPool
from weft.data.load import load_job_data
from weft.engine.events import JobEnded, StepDone
from weft.errors import WeftError
from weft.model.source import load_tokenizer
from weft.parallel.replicas.messages import RankOrder
from weft.parallel.replicas.rank_group import RankGroup
from weft.parallel.replicas.replicated_engine import ReplicatedEngine
from weft.spec import AdapterSpec, BackboneSpec, JobSpec

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
    """Hears all that happens, and divides the processor time by it."""
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
        raise WeftError("no scripted rank told steps and ends.", where="controller_us")
    first_s, ending_s = moments
    return {
        "controller_us": 1e6 * (ending_s - first_s) / num_steps,
        "controller_end_ms": 1e3 * (time.process_time() - ending_s) / num_ended,
    }
