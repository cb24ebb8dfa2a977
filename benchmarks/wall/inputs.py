"""What a whole run starts from (a model's files, a data file, a jobs file), and what one took by the wall clock.

Weights are random; what a run did in between is read from its timeline.
"""

from __future__ import annotations

import json
import random
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.processes import timed
from weft.data.prepared.cache import CACHE_VARIABLE
from weft.kernels.device import is_gpu
from weft.model.load import build
from weft.model.source import TINY
from weft.plan.cost.shape import Shape
from weft.store.atomic import write_file

NUM_ROWS = 7473
"""Rows of GSM8K's training file, which the problems here resemble in length."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
THINGS = ("apples", "pencils", "tickets", "marbles", "stickers", "cookies", "stamps", "ribbons", "shells", "coins")
PEOPLE = ("Ada", "Boris", "Chen", "Dara", "Emil", "Fatima", "Goran", "Hana", "Ivo", "Jun", "Kira", "Luis")
FIRST_RATE = 5e-5


@dataclass(frozen=True)
class WallJobs:
    """The jobs of one run; they differ in their learning rates and ranks, as those of a search do."""

    num_jobs: int
    num_steps: int
    settings: Mapping[str, Any] | None = None
    """Settings of every job besides."""

    def specs(self, data: Path) -> list[dict[str, Any]]:
        """The jobs as a jobs file has them."""
        return [
            {
                "name": f"job{number}",
                "data": str(data),
                "max_steps": self.num_steps,
                "learning_rate": FIRST_RATE * (1 + number),
                "adapter": {"r": (8, 16, 32)[number % 3]},
                **(self.settings or {}),
            }
            for number in range(self.num_jobs)
        ]


def write_model(folder: Path, shape: Shape, device: torch.device) -> None:
    """Writes a model of that shape as Hugging Face keeps one, with the embedded model's tokenizer: one token a byte."""
    dtype = torch.bfloat16 if is_gpu(device) else torch.float32
    model = build(shape, dtype, device, "eager")
    model.save_pretrained(folder, max_shard_size="4GB")
    for name in TOKENIZER_FILES:
        shutil.copyfile(TINY / name, folder / name)


def write_problems(path: Path, num_rows: int = NUM_ROWS) -> None:
    """Writes word problems with numbers, each with its working, about as long as those of GSM8K."""
    with path.open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in problems(num_rows))


def problems(num_rows: int) -> Iterator[dict[str, str]]:
    """Made-up problems, the same on every machine; no two are alike in their numbers."""
    chance = random.Random(0)
    for number in range(num_rows):
        who, other = chance.sample(PEOPLE, 2)
        what = chance.choice(THINGS)
        first, each, days = number + 2, chance.randint(2, 90), chance.randint(2, 30)
        questions = [
            f"{who} has {first} {what} and gets {each} more on each of {days} days.",
            f"Then {who} gives {days} of them to {other}, who had none before.",
            f"How many {what} does {who} have in the end?",
        ]
        total, rest = first + each * days, first + each * days - days
        worked = [
            f"On {days} days {who} gets {each} * {days} = {each * days} {what}.",
            f"With those from the beginning that makes {first} + {each * days} = {total} {what}.",
            f"After the gift to {other} there are {total} - {days} = {rest} left.",
        ]
        extra = chance.randint(0, 3)
        questions[1:1] = [f"On day {day + 1} it rains, and {other} stays at home." for day in range(extra)]
        worked[1:1] = [f"The rain on day {day + 1} does not change the number of {what}." for day in range(extra)]
        yield {"prompt": " ".join(questions), "completion": "\n".join(worked) + f"\n#### {rest}"}


def write_jobs(path: Path, model: Path | str, jobs: WallJobs, data: Path) -> None:
    """Writes the jobs file; all else is left to the defaults."""
    write_file(path, json.dumps({"base_model": str(model), "jobs": jobs.specs(data)}, indent=1))


@dataclass(frozen=True)
class WallTime:
    """What one command took."""

    wall_s: float
    spans: Mapping[str, float]
    """Seconds of each kind of work in the run's timeline; empty for other programs than Weft."""
    before_first_s: float = 0.0
    """From the command to the first microbatch."""
    training_s: float = 0.0
    """From the start of the first microbatch to the end of the last."""

    @property
    def line(self) -> str:
        """All of it for people."""
        spans = ", ".join(f"{name} {seconds:.1f}" for name, seconds in sorted(self.spans.items()))
        return f"{self.wall_s:.1f} s; first microbatch after {self.before_first_s:.1f} s; {spans}"


def caches(folder: Path) -> dict[str, str]:
    """Variables that let a process keep what it may keep in a folder of its own: a new machine, if that is empty."""
    # Python's cache of bytecode too: where library folders are read-only, it would compile them at every start.
    return {
        "XDG_CACHE_HOME": str(folder),
        CACHE_VARIABLE: str(folder / "data"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "PYTHONPYCACHEPREFIX": str(folder / "python"),
        "PYTHONDONTWRITEBYTECODE": "",
    }


def time_train(jobs_file: Path, out: Path, variables: Mapping[str, str]) -> WallTime:
    """`weft train` of a jobs file into a new run directory."""
    log = out.with_name(out.name + ".log")
    started = time.time()
    wall_s = timed(["weft", "train", str(jobs_file), "--out", str(out)], variables, log)
    events = json.loads((out / "timeline.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    totals: Counter[str] = Counter()
    for span in spans:
        totals[span["name"]] += span["dur"] / 1e6
    passes = [span for span in spans if span["name"] == "forward_backward"]
    first = min(span["ts"] for span in passes) / 1e6
    last = max(span["ts"] + span["dur"] for span in passes) / 1e6
    end = (out / "timeline.json").stat().st_mtime - started
    longest = max(span["ts"] + span["dur"] for span in spans) / 1e6
    return WallTime(wall_s, dict(totals), before_first_s=end - longest + first, training_s=last - first)
