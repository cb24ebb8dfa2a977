"""The demo: several skills learnt together, what that changed, and what it saved over one by one."""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import dataclass
from pathlib import Path

from weft.cli.demo.skills import SKILLS, write_skill
from weft.data.prompts import load_prompts
from weft.engine.engine import Engine
from weft.engine.events import StepDone
from weft.engine.execute.protocol import AnswersWork
from weft.engine.inference.answers import exact_match
from weft.engine.inference.generate import Decoding
from weft.engine.train import PreparedRun
from weft.errors import StorageError
from weft.spec import RunSpec, run_from_mapping
from weft.store.atomic import forget, storage_errors, write_file
from weft.store.run_dir import RunDirectory


@dataclass(frozen=True)
class DemoSize:
    """How much a demo trains, chosen so that two CPU cores need about a minute (tiny) or five (smollm2)."""

    skills: tuple[str, ...]
    steps: int
    batch: int
    held: int
    """Prompts per skill that no training sees."""
    learning_rate: float


MODELS = {
    "tiny": DemoSize(
        ("reverse", "shout", "drop_vowels", "sort", "next_letter", "pig_latin", "add", "acronym"), 160, 2, 32, 2e-3
    ),
    # A model of word pieces hardly sees single letters, so it gets skills that need less spelling.
    "smollm2": DemoSize(("shout", "drop_vowels", "acronym", "add"), 80, 2, 16, 1e-3),
}
SOLO_STEPS = 6
"""Steps each job trains alone to measure one-by-one speed, after two to warm up."""


@dataclass(frozen=True)
class Speed:
    """Tokens per second of training, together and one by one."""

    together: float
    one_by_one: float

    @property
    def factor(self) -> float:
        """How many times faster together is."""
        return self.together / self.one_by_one


def open_demo(out: Path) -> RunDirectory:
    """The demo's directory, emptied of an earlier demo; anything else there is left alone and refused."""
    if (out / "run.json").exists():
        with RunDirectory.open(out, resume=True) as earlier:
            if earlier.read_run().run_name != "demo":
                raise StorageError("holds a run that is not a demo; give another --out.", where=str(out))
        with storage_errors(out):
            shutil.rmtree(out)
    return RunDirectory.open(out, resume=False)


def write_jobs(out: Path, model: str) -> RunSpec:
    """Writes the skills' data and a jobs file that `weft train` accepts too; returns the run."""
    size = MODELS[model]
    lines = [
        "# The jobs of `weft demo`; train them again with: weft train jobs.yaml --out ../again",
        f"base_model: {model}",
        "run_name: demo",
        "capacity: 1024",
        "defaults:",
        f"  max_steps: {size.steps}",
        f"  global_batch_size: {size.batch}",
        f"  learning_rate: {size.learning_rate}",
        "  warmup_steps: 5",
        "  eval_steps: 40",
        "  max_length: 128",
        "  adapter: {r: 8, lora_alpha: 16, target_modules: all-linear}",
        "jobs:",
    ]
    with contextlib.ExitStack() as undo:
        if not (out / "data").exists():
            undo.callback(shutil.rmtree, out / "data", ignore_errors=True)
        for name in size.skills:
            write_skill(out / "data" / name, name, train=size.steps * size.batch, held=size.held)
            files = f"train_data: data/{name}/train.jsonl, eval_data: data/{name}/eval.jsonl"
            lines.append(f"  - {{name: {name}, {files}}}  # {SKILLS[name].description}")
        if not (out / "jobs.yaml").exists():
            undo.callback(forget, (out / "jobs.yaml").unlink)
        write_file(out / "jobs.yaml", "\n".join(lines) + "\n")
        undo.pop_all()
    import yaml

    return run_from_mapping(yaml.safe_load("\n".join(lines)))


def engine_of(run: PreparedRun) -> Engine:
    """The engine of a demo, which trains in this process."""
    assert isinstance(run.engine, Engine)
    return run.engine


def ask(run: PreparedRun, out: Path, *, trained: bool) -> dict[str, float]:
    """Exact match of every skill on prompts held out from training: of the bare backbone, or of the adapters."""
    executor = engine_of(run).executor
    prompts = {
        name: load_prompts(f"data/{name}/eval.jsonl", executor.tokenizer, base_dir=out) for name in run.engine.jobs
    }
    given = executor.wait(executor.start(AnswersWork(prompts, Decoding(max_new_tokens=24), is_bare=not trained)))
    return {name: exact_match(found) for name, found in given.items()}


def measure_speed(run: PreparedRun) -> Speed:
    """Compares the finished run with each of its jobs alone on the same backbone, a few steps each."""
    engine = engine_of(run)
    together = _rate(engine, since_step=3)
    tokens, seconds = 0, 0.0
    for job in engine.jobs.values():
        alone = Engine(engine.executor.beside(), capacity=run.spec.capacity)
        alone.submit(job.spec, job.data)
        for event in alone.events():
            if isinstance(event, StepDone) and event.step == SOLO_STEPS + 2:
                alone.cancel(job.spec.name)
        spans = _training_spans(alone, since_step=3)
        tokens += sum(n for n, _ in spans)
        seconds += sum(s for _, s in spans)
    return Speed(together, tokens / seconds)


def _rate(engine: Engine, since_step: int) -> float:
    spans = _training_spans(engine, since_step)
    return sum(tokens for tokens, _ in spans) / sum(seconds for _, seconds in spans)


def _training_spans(engine: Engine, since_step: int) -> list[tuple[int, float]]:
    """(tokens, seconds) of everything training takes, from the first microbatch after some optimizer steps on."""
    spans = [s for s in engine.timeline.spans if s.name in ("forward_backward", "step", "plan")]
    steps = [place for place, span in enumerate(spans) if span.name == "step"]
    num_jobs = len(engine.jobs)
    first = steps[min(len(steps) - 1, (since_step - 1) * num_jobs - 1)] + 1
    return [(span.args.get("tokens", 0), span.duration_s) for span in spans[first:]]
