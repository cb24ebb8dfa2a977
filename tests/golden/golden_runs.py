"""How the golden runs are run: by what users have (engine, command line, files), so that no inside of Weft matters.

Everything happens in the working directory with relative paths, so no result names a temporary folder.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from tiny_families import plain_model
from tiny_tokenizer import CHATML, make_tokenizer

import weft
from weft.cli.main import main
from weft.spec import BackboneSpec

MODEL, RUN = "model", "run"
VOCABULARY = 260
"""Every byte and the four special tokens."""
WORDS = ("warp", "Weft", "loom", "Yarn", "shed", "Reed", "heddle", "Shuttle", "selvage", "Twill", "bobbin", "Tweed")
JOB: dict[str, Any] = {
    "train_data": ("completion.jsonl",),
    "max_length": 48,
    "global_batch_size": 4,
    "learning_rate": 5e-3,
    "max_steps": 4,
    "save_steps": 2,
}
Folders = dict[str, Path]
"""The directory of each job, by its name."""
OnEvent = Callable[[Any, Any], None]


def write_data() -> None:
    """A file of every format; which words stand where comes from a seed."""
    draw = random.Random(7)

    def some() -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(1, 3)))

    texts = [some() for _ in range(14)]
    rows: dict[str, list[dict[str, Any]]] = {
        "completion": [{"prompt": f"{text}\n", "completion": text.upper()} for text in texts],
        "other": [{"prompt": f"{text}\n", "completion": text[::-1]} for text in texts[:9]],
        "eval": [{"prompt": f"{word}\n", "completion": word.upper()} for word in WORDS[:5]],
        "chat": [
            {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": text.title()}]}
            for text in texts[:8]
        ],
        "sharegpt": [
            {"conversations": [{"from": "human", "value": text}, {"from": "gpt", "value": text.lower()}]}
            for text in texts[:8]
        ],
        "alpaca": [{"instruction": "Double it.", "input": text[:8], "output": text[:8] * 2} for text in texts[:8]],
        "text": [{"text": f"{text} and {some()}"} for text in texts[:8]],
        "tokens": [
            {"input_ids": (drawn := [draw.randrange(97, 123) for _ in range(draw.randint(4, 16))]), "labels": drawn}
            for _ in range(8)
        ],
        "spoiled": [{"prompt": text + ("\n" if i % 3 else "~\n"), "completion": text} for i, text in enumerate(texts)],
        "rotten": [{"prompt": f"{text}~\n", "completion": text} for text in texts],
    }  # fmt: skip
    for name, content in rows.items():
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    table = "".join(f"{text},{text.swapcase()}\n" for text in texts[:8])
    Path("table.csv").write_text("question,answer\n" + table)


def write_model(family: str = "llama", *, template: str | None = CHATML, spoil: str = "", **changes: Any) -> None:
    """A tiny random model directory; a character in `spoil` has an embedding that is not a number."""
    model = plain_model(family, vocab_size=VOCABULARY, **changes)
    tokenizer = make_tokenizer(template=template)
    for character in spoil:
        with torch.no_grad():
            model.get_input_embeddings().weight[tokenizer.convert_tokens_to_ids(character)] = float("nan")
    model.save_pretrained(MODEL)
    tokenizer.save_pretrained(MODEL)


def job(name: str = "job", *, adapter: Mapping[str, Any] | None = None, **settings: Any) -> weft.Job:
    """A short job; `data` names files without their ending."""
    files = settings.pop("data", None)
    if files is not None:
        settings["train_data"] = tuple(f if "." in f else f"{f}.jsonl" for f in files.split())
    return weft.Job(name, adapter=weft.Adapter(**{"r": 4, **(adapter or {})}), **{**JOB, **settings})


def new_engine(*, base_model: str = MODEL, capacity: int | str = 96, max_jobs: int | None = None, **how: Any) -> Any:
    """An engine on the model directory of this run."""
    return weft.Engine(BackboneSpec(base_model, device="cpu", **how), capacity=capacity, max_jobs=max_jobs)


def train(*jobs: weft.Job, out: str = RUN, on_event: OnEvent = lambda engine, event: None, **how: Any) -> Folders:
    """Trains jobs together by an engine that keeps all in a run directory."""
    engine = new_engine(**how)
    engine.keep_in(out)
    for one in jobs:
        engine.submit(one)
    for event in engine.events():
        on_event(engine, event)
    return folders(out, [one.name for one in jobs])


def folders(out: str, names: Sequence[str]) -> Folders:
    """Where jobs left what they made."""
    return {name: Path(out, name) for name in names}


def at_step(name: str, step: int, act: Callable[[Any], None]) -> OnEvent:
    """Does something with the engine once, when a job has taken a step."""
    done: list[int] = []

    def on_event(engine: Any, event: Any) -> None:
        if not done and event.kind == "step" and (event.job, event.step) == (name, step):
            done.append(step)
            act(engine)

    return on_event


def train_in_two_lives(*jobs: weft.Job, stop_after: tuple[str, int], **how: Any) -> Folders:
    """Stops a run after a step of one job; a new engine goes on from what is on disk."""
    train(*jobs, out="first", on_event=at_step(*stop_after, lambda engine: engine.stop()), **how)
    # A copy: the first engine holds the lock of its directory as long as this process lives.
    shutil.copytree("first", RUN, ignore=shutil.ignore_patterns(".lock"))
    return train(*jobs, **how)


def write_jobs_file(jobs: Sequence[Mapping[str, Any]], **run: Any) -> None:
    """A jobs file of the model directory of this run, or of another."""
    settings = {"base_model": MODEL, "device": "cpu", "capacity": 96, **run}
    Path("jobs.yaml").write_text(yaml.safe_dump({**settings, "jobs": [dict(one) for one in jobs]}, sort_keys=False))


def weft_command(*arguments: object) -> None:
    """Runs `weft ARGUMENTS` in this process; it must end well."""
    output, before, code = io.StringIO(), sys.argv, None
    sys.argv = ["weft", *map(str, arguments)]
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            main()
    except SystemExit as ended:
        code = ended.code
    finally:
        sys.argv = before
    assert not code, output.getvalue()


@contextlib.contextmanager
def in_golden_directory(folder: Path) -> Iterator[None]:
    """In an empty directory with data, and on one thread: bits depend on how many there are."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with contextlib.chdir(folder):
            write_data()
            yield
    finally:
        torch.set_num_threads(threads)
