"""What a sweep is: a backbone, the settings every trial shares, a search space, and how trials are compared."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, fields
from typing import Any

from weft.errors import ConfigError, did_you_mean
from weft.settings import above, at_least, between, describe, setting, validate
from weft.spec.job import JobSpec
from weft.spec.run import RunSpec

SAMPLERS = ("auto", "grid", "random", "tpe", "gp", "qmc", "nsgaii")
RULES = ("asha", "halving", "median", "none")
UNITS = ("progress", "steps", "tokens")
METRICS = {"eval_loss": "min", "perplexity": "min", "token_accuracy": "max", "exact_match": "max", "accuracy": "max"}
"""Metrics of trials and the better direction."""
_ALSO = {"loss": "eval_loss", "mean_token_accuracy": "token_accuracy", "eval_mean_token_accuracy": "token_accuracy"}
"""Other names of these metrics."""
TIMES_R = r"^(\d+\.?\d*|\.\d+) *\*? *r$"
"""An alpha that is a multiple of the rank, such as 2r."""
FIRST_RUNG = 1 / 8
"""Share of a trial's steps at the first comparison, without `grace`."""
MIN_TRIALS = 8
"""Number of trials that always continue under asha and halving, without `min_trials`. Replayed on the whole curves
of 27 configurations of twelve demo tasks with a factor of 2 and the first rung at an eighth, 3 keep the best in 10
of 12 at 1/2.9 of the tokens, 8 in 11 at 1/2.4, 10 in 11 at 1/2.1; of random 18 of the 27 configurations, in 81 %, 94
% and 100 % (tiny, 2026-11). By the last value instead of the best so far, 8 keep it in 10."""
MIN_COMPARED = 3
"""The same for median: among this many trials at one point, those below the median stop."""
COMMAND = "command"
"""Metric of an objective that is a shell command."""
_FUNCTION = re.compile(r"(?:python +)?(?P<file>\S.*\.py):(?P<name>[A-Za-z_]\w*)")


@dataclass(frozen=True)
class ObjectiveSpec:
    metric: str | None = setting(None)
    """eval_loss, perplexity, token_accuracy, exact_match, accuracy, or a Python function as file.py:function. Default:
    eval_loss."""
    mode: str | None = setting(None, aliases=("direction", "goal"), choices=("min", "max", "minimize", "maximize"))
    """Whether the smallest or the largest value is best. Default: by the metric."""
    command: str | None = setting(None)
    """A shell command instead of a metric; {adapter} stands for the adapter's directory. Its last line is the value."""
    pattern: str | None = setting(None)
    """For accuracy: a regular expression for what to compare in an answer and its reference; its first group if it has
    one."""
    choices: tuple[str, ...] = setting(())
    """For accuracy: the possible answers; the first one named in a text counts."""
    max_new_tokens: int | None = setting(None, rule=at_least(1, 10**6))
    """Longest answer. Default: 8 tokens more than the longest reference."""

    def __post_init__(self) -> None:
        validate(self)
        if self.metric is not None and self.command is not None:
            raise ConfigError("is given besides a metric; keep one.", where="command")
        metric = COMMAND if self.command is not None else _metric_name(self.metric or "eval_loss")
        object.__setattr__(self, "metric", metric)
        mode = METRICS.get(metric) if self.mode is None else self.mode[:3]
        if mode is None:
            raise ConfigError("is missing; write whether min or max of this metric is best.", where="mode")
        if METRICS.get(metric, mode) != mode:
            way = "larger" if mode == "min" else "smaller"
            raise ConfigError(f"a {way} {metric} is better; leave the mode out.", where="mode")
        object.__setattr__(self, "mode", mode)
        if (self.pattern is not None or self.choices) and metric != "accuracy":
            wrong = "pattern" if self.pattern is not None else "choices"
            raise ConfigError(f"is for the metric accuracy, not for {metric}.", where=wrong)
        if metric == "accuracy" and (self.pattern is None) == (not self.choices):
            hint = "token_accuracy and exact_match need neither."
            raise ConfigError("accuracy needs either a pattern or choices.", where="metric", hint=hint)
        if self.pattern is not None:
            try:
                re.compile(self.pattern)
            except re.error as error:
                raise ConfigError(f"is not a regular expression ({error}).", where="pattern") from None

    @property
    def name(self) -> str:
        assert self.metric is not None
        return self.metric

    @property
    def is_max(self) -> bool:
        return self.mode == "max"

    @property
    def function(self) -> tuple[str, str] | None:
        """File and name of the user's function, if the metric is one."""
        found = _FUNCTION.fullmatch(self.name)
        return (found["file"], found["name"]) if found else None

    @property
    def needs_answers(self) -> bool:
        """Whether the metric needs generated answers."""
        return self.name in ("exact_match", "accuracy") or self.function is not None

    @property
    def needs_eval_data(self) -> bool:
        return self.name != COMMAND


@dataclass(frozen=True)
class EarlyStopSpec:
    """When a trial is stopped because others are better."""

    rule: str = setting("asha", choices=RULES)
    """asha: at rungs, the best 1/factor continue, as values arrive; halving: the same, but all wait for each other;
    median: a trial below the median at the same point stops; none."""
    factor: float = setting(2.0, aliases=("reduction_factor", "eta"), rule=above(1))
    """At each rung one in this many continues, and the next rung is this many times as far."""
    unit: str = setting("progress", choices=UNITS)
    """Unit of rungs: progress (share of a trial's steps that is done), steps or tokens."""
    grace: float | None = setting(None, aliases=("grace_period", "min_resource"), rule=above(0))
    """The first rung; no trial stops before it. Default: an eighth of a trial's steps."""
    min_trials: int | None = setting(None, aliases=("n_startup_trials",), rule=at_least(2))
    """This many of the trials that reached a rung always continue. Default: 8; for median, which compares with no
    fewer, 3."""

    def __post_init__(self) -> None:
        validate(self)
        if self.unit == "progress" and self.grace is not None and self.grace >= 1:
            raise ConfigError(
                f"must be below 1 where unit is progress, got {self.grace:g}.",
                where="grace",
                hint="With `unit: steps` or `unit: tokens` it counts those.",
            )
        if self.unit != "progress" and self.grace is None and self.rule != "none":
            raise ConfigError(f"is missing: how many {self.unit} a trial gets in any case.", where="grace")

    @property
    def first_rung(self) -> float:
        return FIRST_RUNG if self.grace is None else self.grace

    @property
    def num_kept(self) -> int:
        if self.min_trials is not None:
            return self.min_trials
        return MIN_COMPARED if self.rule == "median" else MIN_TRIALS

    def can_stop_any(self, num_trials: int | None) -> bool:
        """Whether any of this many trials could be stopped; None: as many as the budget allows."""
        fewest = self.num_kept if self.rule == "median" else self.num_kept + 1
        return self.rule != "none" and (num_trials is None or num_trials >= fewest)


@dataclass(frozen=True)
class SweepSpec(RunSpec):
    """A whole sweep file: the settings of a run, whose jobs come from a search space."""

    jobs: tuple[JobSpec, ...] = setting(())
    """Not written: trials are the jobs."""
    output_dir: str = setting("runs/sweep", aliases=("out_dir",), is_path=True)
    """Where results go. Relative to the working directory, or a URL (s3://…)."""
    defaults: dict[str, Any] = setting(factory=dict, aliases=("job", "base"))
    """Job settings of every trial; settings of the space override them."""
    space: dict[str, Any] | str = setting(factory=dict, aliases=("parameters", "search_space"), is_path=True)
    """The parameters to search, or a file with them, such as a sweep file of Axolotl."""
    sampler: str = setting("auto", aliases=("method", "search_alg"), choices=SAMPLERS)
    """Which points are tried: grid (all), random, one of Optuna's (tpe, gp, qmc, nsgaii), or auto: grid where the
    points can be counted and fit the budget, else random."""
    trials: int | None = setting(None, aliases=("n_trials", "num_samples", "max_trials"), rule=at_least(1))
    """Most configurations to try."""
    max_tokens: int | None = setting(None, rule=at_least(1))
    """Most tokens to train on, over all trials; a step that would exceed it is not begun."""
    max_seconds: float | None = setting(None, aliases=("timeout",), rule=above(0))
    """Longest time in seconds, loading included; the sweep ends at the next step."""
    all_points: bool = setting(False)
    """Train a grid of any size without a budget."""
    seed: int = setting(42, rule=between(0, 2**32))
    """Seed of the sampler; the jobs have their own."""
    objective: ObjectiveSpec = setting(factory=ObjectiveSpec)
    """How trials are compared; the name of a metric is enough."""
    early_stop: EarlyStopSpec = setting(factory=EarlyStopSpec, aliases=("early_stopping",))
    """When a trial is stopped because others do better; the name of a rule is enough."""
    start_from: str | None = setting(None, is_path=True)
    """Folder of an earlier sweep: its results go to the sampler, and no configuration is trained again."""
    storage: str | None = setting(None)
    """An Optuna storage such as sqlite:///study.db that receives every trial too."""
    compare_speed: bool = setting(True)
    """Measure at the end how long training one by one would take."""

    def __post_init__(self) -> None:
        for name, main in (("objective", "metric"), ("early_stop", "rule")):
            value = getattr(self, name)
            if isinstance(value, str):
                object.__setattr__(self, name, {main: value})
            elif isinstance(value, list):
                raise ConfigError(f"expected the name of one {main}, got a list.", where=name)
        if isinstance(self.early_stop, bool):
            object.__setattr__(self, "early_stop", {} if self.early_stop else {"rule": "none"})
        validate(self)
        self._check_settings()
        if self.storage is not None and "://" not in self.storage:
            raise ConfigError(
                f"expected an address such as sqlite:///study.db, got {describe(self.storage)}.", where="storage"
            )
        if self.jobs:
            raise ConfigError("a sweep makes its jobs from the space; write what they share in job.", where="jobs")

    @property
    def has_budget(self) -> bool:
        return not (self.trials is None and self.max_tokens is None and self.max_seconds is None)

    def run(self, *jobs: JobSpec) -> RunSpec:
        """The run of these jobs with the settings of this sweep."""
        own = {field.name: getattr(self, field.name) for field in fields(RunSpec)}
        return RunSpec(**{**own, "jobs": jobs, "defaults": {}})


def resolved_sweep(spec: SweepSpec) -> dict[str, Any]:
    """A sweep's settings as YAML and JSON return them: a sweep file without defaults."""
    values: dict[str, Any] = json.loads(json.dumps(asdict(spec)))
    del values["jobs"]
    if spec.objective.command is not None:
        del values["objective"]["metric"]
    return values


def _metric_name(text: str) -> str:
    found = _FUNCTION.fullmatch(text)
    if found:
        return f"{found['file']}:{found['name']}"
    name = text.replace("-", "_")
    name = _ALSO.get(name, name)
    if name not in METRICS:
        raise ConfigError(
            f"got {text!r}; accepted are {', '.join(METRICS)}, file.py:function, or a command.",
            where="metric",
            hint=did_you_mean(name, METRICS),
        )
    return name
