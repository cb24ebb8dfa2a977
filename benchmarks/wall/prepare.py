"""Preparing a file of rows, beside `datasets.map` with the same template, tokenizer and number of processes.

`python -m benchmarks.wall.prepare weft|datasets FILE` prepares one file in a fresh process and prints what it took as
JSON. The peer is what an experienced user writes: batches, each rendered by one call and tokenised by another, the
prompts for their lengths and the whole texts for their tokens, as trainers of prompts and completions do.
"""

from __future__ import annotations

import dataclasses
import json
import operator
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.processes import TAIL, child_variables
from weft.errors import WeftError
from weft.model.source import load_tokenizer

NUM_PROCESSES = 2
MAX_LENGTH = 1024
WATCH_S = 0.05


@dataclass(frozen=True)
class PrepareTime:
    """What preparing one file took."""

    seconds: float
    cpu_s: float
    """Processor time of all its processes."""
    peak_bytes: int
    """The most memory above that at the start, its processes' included; mapped files are not counted."""
    num_samples: int
    num_tokens: int

    @property
    def line(self) -> str:
        """All of it for people."""
        memory = f"{self.peak_bytes / 1e9:.2f} GB above the start"
        return f"{self.seconds:.1f} s, {self.cpu_s:.1f} s of processors, {memory}, {self.num_samples:,} samples"


def time_prepare(program: str, file: Path, variables: Mapping[str, str]) -> PrepareTime:
    """Prepares a file by `weft` or `datasets` in a process of its own; WeftError with its last words if it failed."""
    done = subprocess.run(
        [sys.executable, "-m", __name__, program, str(file)],
        env={**child_variables(), **variables},
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise WeftError(f"ended with code {done.returncode}: {done.stderr[-TAIL:]}", where=program)
    return PrepareTime(**json.loads(done.stdout.splitlines()[-1]))


def prepare_by_weft(file: Path, tokenizer: Any) -> Callable[[], tuple[int, int]]:
    """Loads the samples of a file as a job does; what is returned counts samples and tokens."""
    from weft.data.load import load_dataset

    data = load_dataset([str(file)], tokenizer, max_length=MAX_LENGTH, base_dir=file.parent)
    return lambda: (len(data.samples), data.summary.num_tokens)


def prepare_by_datasets(file: Path, tokenizer: Any) -> Callable[[], tuple[int, int]]:
    """The same by a map over the rows."""
    import datasets
    import pyarrow.compute

    datasets.disable_progress_bars()
    rows = datasets.load_dataset("json", data_files=str(file), split="train")
    made = rows.map(
        _tokenised,
        batched=True,
        fn_kwargs={"tokenizer": tokenizer},
        remove_columns=rows.column_names,
        num_proc=NUM_PROCESSES,
    )
    lengths = pyarrow.compute.list_value_length
    return lambda: (len(made), pyarrow.compute.sum(lengths(made.data["input_ids"])).as_py())


def _tokenised(rows: dict[str, list[str]], tokenizer: Any) -> dict[str, list[list[int]]]:
    chats = [[{"role": "user", "content": prompt}] for prompt in rows["prompt"]]
    answers = [[{"role": "assistant", "content": answer}] for answer in rows["completion"]]
    prompts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
    texts = tokenizer.apply_chat_template(list(map(operator.add, chats, answers)), tokenize=False)
    starts = [len(ids) for ids in tokenizer(prompts, add_special_tokens=False)["input_ids"]]
    tokens = tokenizer(texts, add_special_tokens=False, truncation=True, max_length=MAX_LENGTH)["input_ids"]
    labels = [[-100] * min(start, len(ids)) + ids[start:] for start, ids in zip(starts, tokens, strict=True)]
    return {"input_ids": tokens, "labels": labels}


class MemoryWatch:
    """The most memory of this process and those it started, above what it was at first."""

    def __init__(self) -> None:
        self._first = self._most = _memory_bytes()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> int:
        """Ends watching and returns the amount."""
        self._is_over.set()
        self._thread.join()
        return self._most - self._first

    def _watch(self) -> None:
        while not self._is_over.wait(WATCH_S):
            self._most = max(self._most, _memory_bytes())


def _memory_bytes() -> int:
    """Memory of this process and those below it that belongs to no file."""
    return sum(map(_own_bytes, _processes(os.getpid())))


def _processes(pid: int) -> Iterator[int]:
    yield pid
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            below = tasks.read_text().split()
        except OSError:
            continue
        for child in below:
            yield from _processes(int(child))


def _own_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


PROGRAMS = {"weft": prepare_by_weft, "datasets": prepare_by_datasets}


def main(program: str, file: Path) -> PrepareTime:
    """Prepares a file and measures it; both programs have the same cores."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:NUM_PROCESSES])
    tokenizer = load_tokenizer("tiny")
    watch, begun, used = MemoryWatch(), time.perf_counter(), _processor_s()
    count = PROGRAMS[program](file, tokenizer)
    seconds, used = time.perf_counter() - begun, _processor_s() - used
    return PrepareTime(seconds, used, watch.stop(), *count())


def _processor_s() -> float:
    """Processor time of this process and of those it started that have ended."""
    return sum(os.times()[:4])


if __name__ == "__main__":
    print(json.dumps(dataclasses.asdict(main(sys.argv[1], Path(sys.argv[2])))))
