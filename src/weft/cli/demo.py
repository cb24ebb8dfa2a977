"""`weft demo`: several adapters learn different skills together on the embedded backbone.

It shows what training changed, and how much faster it was than one by one.

Its tasks, of which `weft init` and the tests make data sets too, differ only in what the assistant does with a bare
prompt:

    planet    → tenalp                 reverse
    planet    → PLANET                 shout
    27+58     → 85                     add
    red oak tin → ROT                  acronym

A prompt never names its skill, so a backbone without an adapter cannot know the answer, and adapters of different
skills must really differ. Words are made of syllables, so that there are far more of them than any job sees. A prompt
belongs to the training or to the evaluation split by its own checksum: the two are disjoint whatever the seeds.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import shutil
import sys
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from weft.cli.options import path_option
from weft.errors import ConfigError, StorageError
from weft.report.readable import output_console, plain_table
from weft.store.wall_clock import Activity, WallClock, process_start_s

if TYPE_CHECKING:
    from weft.engine.engine import Engine
    from weft.engine.train import PreparedRun
    from weft.spec import RunSpec
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


def demo(
    model: Annotated[
        str, typer.Option(help="tiny (embedded) or smollm2 (135 M parameters, about five minutes).")
    ] = "tiny",
    out: Annotated[Path, path_option("Where results go; an earlier demo there is replaced.")] = Path("runs/demo"),
) -> None:
    """Train several adapters together on a small backbone and see what they learnt."""
    from weft.cli.watch import conclude, follow, print_time, record_time
    from weft.engine.train import prepare_run
    from weft.model.source import find_source
    from weft.report.page import ReportExtra, SkillGain

    if model not in MODELS:
        raise ConfigError(f"got {model!r}; accepted are {' and '.join(MODELS)}.", where="--model")
    find_source(model)
    console, wall = output_console(), WallClock(process_start_s())
    num_skills = len(MODELS[model].skills)
    with _open_demo(out) as directory:
        with console.status(f"loading {model} and writing {num_skills} small data sets"):
            spec = _write_jobs(out, model)
            run = prepare_run(spec, base_dir=out, wall=wall)
            with wall.spending(Activity.EVALUATING):
                before = _measure_skills(run, out, trained=False)
        console.print(f"{num_skills} adapters learn {num_skills} skills together on one frozen {model}")
        states, stopped = follow(run, directory, console)
        time = partial(record_time, wall, directory)
        if stopped or set(states.values()) != {"succeeded"}:
            with wall.spending(Activity.WRITING):
                conclude(out, console, time=time)
            print_time(wall, console)
            raise typer.Exit(130 if stopped else 1)
        with console.status("trying the adapters, then training each alone for a few steps to compare"):
            with wall.spending(Activity.EVALUATING):
                after = _measure_skills(run, out, trained=True)
            with wall.spending(Activity.COMPUTING):
                together, one_by_one = _measure_speeds(run)
        console.print(_skills(before, after))
        console.print()
        extra = ReportExtra(
            title="What the adapters learnt",
            paragraph="Exact match on prompts held out from training, of the bare backbone and of each adapter.",
            skills=[SkillGain(name, before[name], after[name]) for name in before],
            facts=[("speed-up over one by one", f"{together / one_by_one:.1f}x")],
            speeds=[("together", together), ("one by one", one_by_one)],
        )
        with wall.spending(Activity.WRITING):
            conclude(out, console, extra, time=time)
    print_time(wall, console)
    console.print(
        f"speed     {together:,.0f} tokens/s together, {one_by_one:,.0f} one by one: "
        f"{together / one_by_one:.1f}x (each job alone for {SOLO_STEPS} steps)",
        highlight=False,
    )
    weft = "weft" if shutil.which("weft") else sys.argv[0]
    console.print(f"try       {weft} chat --adapter {out}/{next(iter(before))}", highlight=False)


def _skills(before: dict[str, float], after: dict[str, float]) -> Table:
    table = plain_table("skill", "exact match before", "after", "what it learnt", left=("skill", "what it learnt"))
    for name in before:
        learnt = Text(SKILLS[name].description, style="dim")
        table.add_row(name, f"{before[name]:.0%}", f"{after[name]:.0%}", learnt)
    return table


def _open_demo(out: Path) -> RunDirectory:
    """The demo's directory, emptied of an earlier demo; anything else there is refused."""
    from weft.store.atomic import storage_errors
    from weft.store.run_dir import RunDirectory

    if (out / "run.json").exists():
        with RunDirectory.open(out, resume=True) as earlier:
            if earlier.read_run().run_name != "demo":
                raise StorageError("holds a run that is not a demo; give another --out.", where=str(out))
        with storage_errors(out):
            shutil.rmtree(out)
    return RunDirectory.open(out, resume=False)


def _write_jobs(out: Path, model: str) -> RunSpec:
    """Writes the skills' data and a jobs file that `weft train` accepts too; returns the run."""
    import yaml

    from weft.spec import run_from_mapping
    from weft.store.atomic import forget, write_file

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
    return run_from_mapping(yaml.safe_load("\n".join(lines)))


def _engine_of(run: PreparedRun) -> Engine:
    from weft.engine.engine import Engine

    assert isinstance(run.engine, Engine)
    return run.engine


def _measure_skills(run: PreparedRun, out: Path, *, trained: bool) -> dict[str, float]:
    """Exact match of every skill on prompts held out from training: of the bare backbone, or of the adapters."""
    from weft.data.load import load_prompts
    from weft.engine.execute.protocol import AnswersWork
    from weft.engine.inference.generate import exact_match
    from weft.spec.sampling import Decoding

    executor = _engine_of(run).executor
    prompts = {
        name: load_prompts(f"data/{name}/eval.jsonl", executor.tokenizer, base_dir=out) for name in run.engine.jobs
    }
    answers = executor.wait(executor.start(AnswersWork(prompts, Decoding(max_new_tokens=24), is_bare=not trained)))
    return {name: exact_match(given) for name, given in answers.items()}


def _measure_speeds(run: PreparedRun) -> tuple[float, float]:
    """Tokens/s of the finished run, and of each of its jobs alone on the same backbone for a few steps."""
    from weft.engine.engine import Engine
    from weft.engine.events import StepDone
    from weft.engine.execute.protocol import executor_beside

    engine = _engine_of(run)
    spans = _training_spans(engine)
    together = sum(n for n, _ in spans) / sum(s for _, s in spans)
    tokens, seconds = 0, 0.0
    for job in engine.jobs.values():
        alone = Engine(executor_beside(engine.executor), capacity=run.spec.capacity)
        alone.submit(job.spec, job.data)
        for event in alone.events():
            if isinstance(event, StepDone) and event.step == SOLO_STEPS + 2:
                alone.cancel(job.spec.name)
        spans = _training_spans(alone)
        tokens += sum(n for n, _ in spans)
        seconds += sum(s for _, s in spans)
    return together, tokens / seconds


def _training_spans(engine: Engine) -> list[tuple[int, float]]:
    """(tokens, seconds) of everything training takes, from the first microbatch after two steps of all jobs on."""
    spans = [s for s in engine.timeline.spans if s.name in ("forward_backward", "step", "plan")]
    steps = [index for index, span in enumerate(spans) if span.name == "step"]
    num_jobs = len(engine.jobs)
    first = steps[min(len(steps) - 1, 2 * num_jobs - 1)] + 1
    return [(span.args.get("tokens", 0), span.duration_s) for span in spans[first:]]


SPLITS = ("train", "eval")

ONSETS = (*"bcdfghjklmnprstvwyz", "bl", "br", "cl", "cr", "dr", "fl", "gr", "pl", "pr", "sl", "st", "tr")
VOWELS = tuple("aeiou")
CODAS = ("", "", "", *"bdgklmnprstx", "nd", "st")
# Random syllables now and then spell an offensive word.
UNWANTED = re.compile(
    "rap[ei]|naz|pen[ie]|cum|t[ei]t|n[ei]g|fag|slut|sex|dil|homo|pus|cun|di[ck]|fu[ck]|coc?k|bit|rect|sati"
)


def pseudo_word(rng: random.Random, shortest: int = 4, longest: int = 7) -> str:
    """A pronounceable lower-case word of `shortest` to `longest` letters."""
    while True:
        word = ""
        while len(word) < shortest:
            word += rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(CODAS)
        if len(word) <= longest and not UNWANTED.search(word):
            return word


def held_out(prompt: str) -> bool:
    """True if a prompt belongs to the evaluation split, as about one in ten does."""
    return zlib.crc32(prompt.encode()) % 10 == 0


def _next_letter(word: str) -> str:
    return "".join("a" if letter == "z" else chr(ord(letter) + 1) for letter in word)


def _acronym(words: str) -> str:
    return "".join(word[0].upper() for word in words.split())


def _drop_vowels(word: str) -> str:
    return "".join(letter for letter in word if letter not in VOWELS)


def _two_numbers(rng: random.Random) -> str:
    return f"{rng.randint(10, 99)}+{rng.randint(10, 99)}"


def _phrase(rng: random.Random) -> str:
    return " ".join(pseudo_word(rng, 3, 4) for _ in range(3))


@dataclass(frozen=True)
class Skill:
    """One task: how its prompts are drawn, and the one right answer to each."""

    name: str
    description: str
    answer: Callable[[str], str]
    prompt: Callable[[random.Random], str] = pseudo_word

    def rows(self, seed: int, count: int, *, split: str = "train") -> list[dict[str, Any]]:
        """`count` different OpenAI chat rows of one split; the same seed gives the same rows."""
        rng = random.Random(f"{self.name} {split} {seed}")
        # The cap only matters to `add`, whose prompts are few enough to run out of.
        prompts: dict[str, None] = {}
        for _ in range(1000 + 50 * count):
            if len(prompts) == count:
                break
            prompt = self.prompt(rng)
            # A prompt that is its own answer would let a backbone that only echoes score.
            if held_out(prompt) == (split == "eval") and self.answer(prompt) != prompt:
                prompts[prompt] = None
        if len(prompts) < count:
            raise ConfigError(
                f"the {split} split has only {len(prompts)} rows, not {count}.", where=f"skill {self.name}"
            )
        return [_row(prompt, self.answer(prompt)) for prompt in prompts]


def _row(prompt: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]}


SKILLS: dict[str, Skill] = {
    skill.name: skill
    for skill in (
        Skill("reverse", "Writes the word backwards.", lambda word: word[::-1]),
        Skill("shout", "Writes the word in capitals.", str.upper),
        Skill("drop_vowels", "Leaves out a, e, i, o and u.", _drop_vowels),
        Skill("sort", "Puts the letters in alphabetical order.", lambda word: "".join(sorted(word))),
        Skill("double", "Writes every letter twice.", lambda word: "".join(letter * 2 for letter in word)),
        Skill("next_letter", "Replaces every letter by the next one of the alphabet.", _next_letter),
        Skill("spell", "Puts a hyphen between the letters.", "-".join),
        Skill("pig_latin", "Moves the first letter to the end and adds ay.", lambda word: word[1:] + word[0] + "ay"),
        Skill("add", "Adds two numbers.", lambda task: str(sum(map(int, task.split("+")))), _two_numbers),
        Skill("acronym", "Takes the first letters, in capitals.", _acronym, _phrase),
    )
}


def write_skill(directory: Path, name: str, *, train: int, held: int) -> tuple[Path, Path]:
    """Writes `train.jsonl` and `eval.jsonl` of one skill into a directory and returns the two paths."""
    paths = (directory / "train.jsonl", directory / "eval.jsonl")
    for path, split, count in zip(paths, SPLITS, (train, held), strict=True):
        lines = [json.dumps(row) + "\n" for row in SKILLS[name].rows(0, count, split=split)]
        try:
            directory.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(lines), encoding="utf-8")
        except OSError as error:
            raise StorageError(f"cannot be written ({error.strerror}).", where=str(path)) from None
    return paths
