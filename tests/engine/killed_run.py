"""Trains jobs in child processes that are killed until one comes through; a program of its own, used by a test.

    python killed_run.py DIRECTORY SEED [eight]

Writes DIRECTORY/undisturbed (never killed), DIRECTORY/killed, and prints how the children of the latter ended as JSON.
With `eight`, the jobs are those of eight_jobs.py, and each is also trained alone, in DIRECTORY/alone-NAME.
The parent imports everything once and forks, so that a child costs no import; it computes nothing itself.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import eight_jobs
import torch

from weft.engine.resume import plan_resume
from weft.engine.train import execute_run, prepare_run
from weft.spec import AdapterSpec, JobSpec, RunSpec
from weft.store import faults
from weft.store.run_dir import RunDirectory

MAX_CHILDREN = 100
LATE_IMPORTS = (
    "transformers.models.llama.modeling_llama",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.tokenization_utils_tokenizers",
)
"""What transformers imports only when a model is loaded. Loading one here would leave threads that a fork loses."""


def run_spec(data: Path, model: str) -> RunSpec:
    """Three short jobs: dropout and warm-up, early stopping, and one whose checkpoints are rare."""
    tasks = {"upper": str.upper, "lower": str.lower, "double": lambda word: word * 2}
    words = ["warp", "Weft", "loom", "Yarn", "shed", "Reed", "heddle", "Shuttle", "selvage", "Twill"]
    for name, answer in tasks.items():
        rows = [{"prompt": f"{word}\n", "completion": answer(word)} for word in words]
        (data / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"max_length": 48, "global_batch_size": 4, "learning_rate": 2e-3}
    adapter = AdapterSpec(r=4, target_modules=("q_proj", "down_proj"), lora_dropout=0.2)
    return RunSpec(
        model,
        (
            JobSpec("upper", ("upper.jsonl",), adapter=adapter, max_steps=8, warmup_steps=3, save_steps=2, **settings),
            JobSpec(
                "lower", ("lower.jsonl",), adapter=adapter, max_steps=8, save_steps=1, save_total_limit=1, eval_data=2,
                eval_steps=1, early_stopping_patience=2, **{**settings, "learning_rate": 1.0},
            ),
            JobSpec("double", ("double.jsonl",), adapter=AdapterSpec(r=2), max_steps=6, save_steps=4, **settings),
        ),
        capacity=96,
        device="cpu",
    )  # fmt: skip


def train(spec: RunSpec, data: Path, out: Path) -> None:
    """One process's work: starts the run, or goes on with it."""
    resume = (out / "run.json").exists()
    with RunDirectory.open(out, resume=resume) as directory:
        done = plan_resume(spec, directory).done if resume else frozenset()
        if len(done) < len(spec.jobs):
            execute_run(prepare_run(spec, base_dir=data, skip=done), directory, on_event=lambda _: None)


def child(work: Callable[[], None]) -> int:
    """Forks a process for the work; returns its id."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return pid


def ended(pid: int) -> str:
    """How a child ended: done, killed or failed."""
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return {0: "done", -signal.SIGKILL: "killed"}.get(status, "failed")


def kill_until_done(spec: RunSpec, data: Path, out: Path, rng: random.Random) -> list[str]:
    """Children that die at a random durable operation or at a random time, one after another, until one finishes."""
    ends: list[str] = []
    # More jobs do more before one of them has come any further.
    scale = len(spec.jobs) / 3
    while len(ends) < MAX_CHILDREN and (not ends or ends[-1] == "killed"):
        if len(ends) % 3 < 2:
            plan = faults.parse(f"kill@{rng.randint(1, int(220 * scale))}")

            def work(plan: faults.FaultPlan = plan) -> None:
                faults.arm(plan)
                train(spec, data, out)

            ends.append(ended(child(work)))
        else:
            pid = child(lambda: train(spec, data, out))
            time.sleep(rng.uniform(0.05, 0.6 * scale))
            os.kill(pid, signal.SIGKILL)
            ends.append(ended(pid))
    return ends


def main(folder: Path, seed: int, model: str) -> None:
    """Trains the run twice, once in peace and once under fire; `eight`: that of eight jobs. Nothing is computed here:
    torch's threads would be missing in the children."""
    torch.set_num_threads(1)
    is_eight = model == "eight"
    spec = eight_jobs.run_spec(folder) if is_eight else run_spec(folder, model)
    for module in LATE_IMPORTS:
        importlib.import_module(module)
    runs = {folder / "undisturbed": spec}
    if is_eight:
        runs |= {folder / f"alone-{job.name}": eight_jobs.run_spec(folder, job.name) for job in spec.jobs}
    for out, own in runs.items():
        assert ended(child(lambda own=own, out=out: train(own, folder, out))) == "done"
    print(json.dumps(kill_until_done(spec, folder, folder / "killed", random.Random(seed))))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
