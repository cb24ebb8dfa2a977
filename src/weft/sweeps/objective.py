"""The objective of a sweep: the metric of a trial by losses, answers, a function or a command."""

from __future__ import annotations

import importlib.util
import math
import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from weft.data.chat_template import Tokenizer
from weft.data.load import Prompt
from weft.data.samples import Sample
from weft.data.tokenise import with_new_tokens
from weft.engine.inference.generate import Answer
from weft.errors import ConfigError, DataError, JobError
from weft.objectives.objective import MeanScores
from weft.spec.sampling import Decoding
from weft.spec.sweep import COMMAND, ObjectiveSpec
from weft.sweeps.configure import SweepEngine, SweepJob

SPARE_TOKENS = 8
"""Tokens that an answer may exceed the longest reference by, so that a longer one is not cut to a match."""
Function = Callable[[list[dict[str, str]]], float]


class TrialObjective:
    def __init__(self, spec: ObjectiveSpec, base_dir: Path) -> None:
        """Paths of functions, and the working directory of commands, are relative to `base_dir`."""
        self._spec = spec
        self._base_dir = base_dir
        self._function = _load_function(spec, base_dir)
        self._prompts: dict[int, tuple[Sequence[Sample], list[Prompt]]] = {}
        """Samples and their prompts by identity of the samples, which are kept so that it stays unique."""

    @property
    def metric(self) -> str:
        return self._spec.name

    @property
    def is_max(self) -> bool:
        return self._spec.is_max

    def check(self, samples: Sequence[Sample], tokenizer: Tokenizer) -> None:
        if self._spec.needs_answers:
            self._prompts_of(samples, tokenizer)

    def value(self, engine: SweepEngine, job: SweepJob, looked: MeanScores | None, folder: Path) -> float:
        """The present metric of a job; a JobError if there is none. `looked`: evaluation of the same weights, if there
        is one. `folder`: where a shell command finds the adapter."""
        if self.metric == COMMAND:
            engine.export_adapter(job.spec.name, folder)
            return self._run_command(folder)
        if self._spec.needs_answers:
            return self._score(self._answers(engine, job))
        means = engine.evaluate(job.spec.name) if looked is None else looked
        if self.metric == "eval_loss":
            return means.loss
        if self.metric == "token_accuracy":
            # Without a finite loss the logits are invalid, and so is their accuracy.
            return means.accuracy if math.isfinite(means.loss) else math.nan
        return math.exp(means.loss) if means.loss < 700 else math.inf

    def _answers(self, engine: SweepEngine, job: SweepJob) -> list[Answer]:
        assert job.data.eval is not None, "a metric of answers needs evaluation data with prompts"
        tokenizer = with_new_tokens(engine.executor.tokenizer, job.spec.adapter.new_tokens)
        prompts = self._prompts_of(job.data.eval.samples, tokenizer)
        return engine.answer(job.spec.name, prompts, self._decoding(prompts, tokenizer))

    def _score(self, given: Sequence[Answer]) -> float:
        if self._function is not None:
            rows = [{"prompt": a.prompt.text, "answer": a.text, "reference": a.prompt.reference or ""} for a in given]
            return self._call(self._function, rows)
        if self.metric == "exact_match":
            return sum(answer.is_exact for answer in given) / len(given)
        found = [(self._part(answer.text), self._part(answer.prompt.reference or "")) for answer in given]
        return sum(mine is not None and mine == right for mine, right in found) / len(found)

    def _part(self, text: str) -> str | None:
        if self._spec.pattern is not None:
            found = re.search(self._spec.pattern, text)
            return None if found is None else (found[1] if found.re.groups else found[0])
        named = {text.find(choice): choice for choice in reversed(self._spec.choices) if choice in text}
        return named[min(named)] if named else None

    def _call(self, function: Function, rows: list[dict[str, str]]) -> float:
        try:
            return float(function(rows))
        except (Exception, SystemExit) as error:  # a user's function may raise anything, and may want to exit
            raise JobError(f"{self.metric} raised {type(error).__name__}: {error}") from None

    def _run_command(self, adapter: Path) -> float:
        assert self._spec.command is not None
        text = self._spec.command.replace("{adapter}", str(adapter.resolve()))
        done = subprocess.run(text, shell=True, cwd=self._base_dir, capture_output=True, text=True, check=False)
        if done.returncode:
            output = (done.stderr.strip() or done.stdout.strip()).splitlines()
            raise JobError(f"the command exited with {done.returncode}{': ' + output[-1] if output else ''}.")
        lines = done.stdout.split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "nothing")
        try:
            return float(last)
        except ValueError:
            raise JobError(f"the last line of the command's output is no number: {last[:80]!r}.") from None

    def _prompts_of(self, samples: Sequence[Sample], tokenizer: Tokenizer) -> list[Prompt]:
        """The prompts of evaluation samples, made once for all trials that share them."""
        key = id(samples)
        if key not in self._prompts:
            made = [_prompt(sample, i, tokenizer) for i, sample in enumerate(samples)]
            self._prompts[key] = (samples, made)
        return self._prompts[key][1]

    def _decoding(self, prompts: Sequence[Prompt], tokenizer: Tokenizer) -> Decoding:
        if self._spec.max_new_tokens is not None:
            return Decoding(self._spec.max_new_tokens)
        lengths = [len(tokenizer.encode(p.reference or "", add_special_tokens=False, verbose=False)) for p in prompts]
        return Decoding(max(lengths) + SPARE_TOKENS)


def _prompt(sample: Sample, index: int, tokenizer: Any) -> Prompt:
    """The text before the last supervised run, with that run as the reference."""
    ends = np.flatnonzero(sample.supervised)
    start = int(ends[-1])
    while sample.supervised[start - 1]:
        start -= 1
    where = f"evaluation sample {index}"
    if start <= 1:
        raise DataError("has no prompt to answer, only text; use eval_loss or perplexity.", where=where)
    decode = tokenizer.decode
    reference = str(decode(sample.tokens[start : int(ends[-1]) + 1].tolist(), skip_special_tokens=True))
    return Prompt(sample.tokens[:start], str(decode(sample.tokens[:start].tolist())), reference, where)


def _load_function(spec: ObjectiveSpec, base_dir: Path) -> Function | None:
    if spec.function is None:
        return None
    file, name = spec.function
    path = base_dir / file
    if not path.is_file():
        raise ConfigError(f"there is no file {path}.", where="objective.metric")
    module_spec = importlib.util.spec_from_file_location(f"weft_objective_{path.stem}", path)
    assert module_spec is not None and module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # a user's file may raise anything, and may want to exit
        raise ConfigError(
            f"{path} cannot be imported ({type(error).__name__}: {error}).", where="objective.metric"
        ) from None
    function: Function | None = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"{path} has no function {name}.", where="objective.metric")
    return function
