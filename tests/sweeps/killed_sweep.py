"""Runs a sweep in child processes that are killed until one comes through; a program of its own, used by a test.

    python killed_sweep.py DIRECTORY MODEL SEED

Writes DIRECTORY/undisturbed (never killed), DIRECTORY/killed, and prints how the children of the latter ended as JSON.
The parent imports everything once and forks, so that a child costs no import; it computes nothing itself.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import signal
import sys
import traceback
from pathlib import Path

import torch

from weft.store import faults
from weft.sweeps import api

MAX_CHILDREN = 60
LATE_IMPORTS = (
    "transformers.models.llama.modeling_llama",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.tokenization_utils_tokenizers",
    "plotly.graph_objects",
    "plotly.offline",
)


def sweep(model: Path, out: str) -> None:
    """One process's work: starts the sweep, or goes on with it."""
    job = {"train_data": "rows.jsonl", "eval_data": 4, "max_length": 48, "max_steps": 6, "global_batch_size": 2}
    settings = {
        "base_model": str(model),
        "device": "cpu",
        "capacity": 96,
        "output_dir": out,
        "compare_speed": False,
        "early_stop": "none",
        "max_jobs": 2,
        "job": {**job, "save_steps": 2, "eval_steps": 2, "adapter": {"r": 2, "dropout": 0.2}},
        "space": {"lr": [1e-3, 4e-3], "r": [2, 4]},
    }
    api.sweep(settings, resume=Path(out, "trials", "run.json").exists())


def child(model: Path, out: str, plan: faults.FaultPlan | None) -> str:
    """Forks a process for the work; returns how it ended: done, killed or failed."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            if plan is not None:
                faults.arm(plan)
            sweep(model, out)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return {0: "done", -signal.SIGKILL: "killed"}.get(status, "failed")


def main(folder: Path, model: Path, seed: int) -> None:
    """Runs the sweep twice, once in peace and once under fire."""
    torch.set_num_threads(1)
    os.chdir(folder)
    for module in LATE_IMPORTS:
        importlib.import_module(module)
    assert child(model, "undisturbed", None) == "done"
    rng, ends = random.Random(seed), []
    while len(ends) < MAX_CHILDREN and (not ends or ends[-1] == "killed"):
        ends.append(child(model, "killed", faults.parse(f"kill@{rng.randint(1, 260)}")))
    print(json.dumps(ends))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
