"""Two ranks on one GPU, each with less than half of its memory, beside one process.

bits_two_ranks   adapters of a TinyLlama-shaped run by `weft train --devices 0,0` whose bytes are not those of the same
                 run by one process. Both ranks must have computed something.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.clock import release
from benchmarks.wall.command import timed
from benchmarks.wall.inputs import WallJobs, write_jobs, write_model, write_problems
from weft.errors import WeftError
from weft.kernels.device import default_device
from weft.plan.cost.published_shapes import find_shape

SHAPE = "tinyllama-1.1b"
JOBS = WallJobs(6, 12, {"eval_data": 16, "eval_steps": 6})
NUM_ROWS = 512
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
        write_problems(folder / "problems.jsonl", NUM_ROWS)
        write_jobs(folder / "jobs.yaml", folder / "model", JOBS, folder / "problems.jsonl")
        differing = compare_runs(folder / "jobs.yaml", folder, SETTINGS, ("--devices", "0,0"))
    return {"bits_two_ranks": float(len(differing))}


def compare_runs(jobs_file: Path, folder: Path, settings: Sequence[str], two: Sequence[str]) -> list[str]:
    """Trains a jobs file in one process and by what the words `two` ask for; jobs whose adapters differ."""
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
