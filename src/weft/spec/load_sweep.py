"""Reads a sweep file, and makes the job of a trial out of it.

A sweep file is YAML as in `spec.sweep`. Its `space` may be a file of its own, such as one that Axolotl's `--sweep`
takes, and a jobs file with one job will do for everything else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from weft.errors import ConfigError, WrongTypeError
from weft.settings import describe, field_names, join, listed, read
from weft.spec.adapter import AdapterSpec
from weft.spec.job import JobSpec
from weft.spec.load import apply_override, canonical, fitting, location_of, merge, parse
from weft.spec.space import TOGETHER, Space, is_number, owners_of, params_of, read_space, setting_path
from weft.spec.sweep import TIMES_R, EarlyStopSpec, ObjectiveSpec, SweepSpec

_DEFAULTS = "defaults"


def load_sweep(path: str | Path, overrides: Sequence[str] = (), *, space: str | None = None) -> SweepSpec:
    """The sweep described by a YAML file, with overrides such as `trials=16` or `job.max_steps=100` applied. `space`
    names a file with the search space, relative to the working directory. All other paths are relative to the file's
    directory."""
    path = Path(path)
    tree, lines = parse(path, "sweep")
    given = {apply_override(tree, override, SweepSpec): override for override in overrides}
    if space is not None and isinstance(tree, Mapping):
        tree = {**tree, "space": str(Path(space).absolute())}
    try:
        return sweep_from_mapping(tree, base_dir=path.parent)
    except ConfigError as error:
        if error.where and Path(error.where.partition(" line ")[0].partition(":")[0]).is_file():
            raise
        where = location_of(error.where, path, lines, given, SweepSpec)
        raise error.at(where) from None


def sweep_from_mapping(tree: Any, *, base_dir: Path) -> SweepSpec:
    if not isinstance(tree, Mapping):
        raise ConfigError(f"expected settings such as base_model and space, got {describe(tree)}.")
    try:
        return _read_sweep(tree, base_dir)
    except ConfigError as error:
        raise in_its_words(error, tree) from None


def in_its_words(error: ConfigError, tree: Any) -> ConfigError:
    """An error about common settings, with the section as the file calls it: job, base, defaults or jobs."""
    where = error.where or ""
    if where != _DEFAULTS and not where.startswith(f"{_DEFAULTS}."):
        return error
    names = field_names(SweepSpec)
    keys = [str(key) for key in tree] if isinstance(tree, Mapping) else []
    called = "jobs.0" if "jobs" in keys else next((key for key in keys if names.get(key) == _DEFAULTS), "job")
    return error.at(called + where.removeprefix(_DEFAULTS))


def _read_sweep(tree: Mapping[Any, Any], base_dir: Path) -> SweepSpec:
    check_top(tree)
    spec = read(SweepSpec, _with_one_job(tree))
    _check_defaults(spec.defaults)
    if isinstance(spec.space, str):
        values = {**_own(tree), "space": _space_file(base_dir / spec.space)}
        spec = read(SweepSpec, _with_one_job(values))
    assert isinstance(spec.space, dict)
    check_space(spec.space)
    found = read_space(spec.space)
    for point in found.probes():
        job = trial_job(spec, "trial", params_of(point))
        try:
            spec.run(job)
        except ConfigError as error:
            raise _traced(error, (error.where or "").removeprefix("jobs.0."), params_of(point)) from None
    _check_methods(found)
    _check_comparable(spec, found)
    return spec


def space_of(spec: SweepSpec) -> Space:
    assert isinstance(spec.space, dict), "reading a sweep reads the file of its space too"
    return read_space(spec.space)


def probe_jobs(spec: SweepSpec) -> list[JobSpec]:
    """Trials that contain every choice and every end of a range at least once."""
    return [trial_job(spec, "trial", params_of(point)) for point in space_of(spec).probes()]


def check_trials(spec: SweepSpec, check: Callable[[JobSpec], None]) -> None:
    """Checks those trials; a ConfigError names the parameter that caused it."""
    for point in space_of(spec).probes():
        try:
            check(trial_job(spec, "trial", params_of(point)))
        except ConfigError as error:
            raise _traced(error, error.where or "", params_of(point)) from None


def longest_of(spec: SweepSpec) -> int:
    return max(job.max_length for job in probe_jobs(spec))


def trial_job(spec: SweepSpec, name: str, params: Mapping[str, Any]) -> JobSpec:
    """The job of one configuration; a ConfigError names the wrong parameter."""
    own: dict[str, Any] = {}
    for key, value in params.items():
        head, _, rest = setting_path(key).partition(".")
        own = merge(own, {head: {rest: value}} if rest else {head: value})
    settings = merge(fitting(canonical(spec.defaults, JobSpec, _DEFAULTS), own), {**own, "name": name})
    try:
        return read(JobSpec, _with_alpha(settings))
    except ConfigError as error:
        raise _traced(error, error.where or "", params) from None


def _traced(error: ConfigError, where: str, params: Mapping[str, Any]) -> ConfigError:
    """An error of a trial's job, with the parameter or common setting that caused it."""
    guilty = [name for name in params if where and f"{where}.".startswith(f"{setting_path(name)}.")]
    setting = f"space.{guilty[0]}" if guilty else f"{_DEFAULTS}.{where}" if where else _DEFAULTS
    is_text = bool(guilty) and isinstance(params[guilty[0]], str)
    is_number = isinstance(error, WrongTypeError) and error.accepted in ((int,), (float,))
    hint = "A range is written {min: …, max: …}, with log: true for a logarithmic one."
    return error.at(setting, hint if is_text and is_number else None)


def _own(tree: Mapping[Any, Any]) -> dict[str, Any]:
    names = field_names(SweepSpec)
    return {str(key): value for key, value in tree.items() if names.get(str(key)) != "space"}


def _with_one_job(tree: Mapping[Any, Any]) -> dict[Any, Any]:
    """A jobs file with one job as the sweep over that job."""
    jobs = tree.get("jobs")
    if not isinstance(jobs, list):
        return dict(tree)
    if len(jobs) != 1 or not isinstance(jobs[0], Mapping):
        raise ConfigError(f"a sweep is over one job, got {len(jobs)}.", where="jobs")
    names = field_names(SweepSpec)
    shared = [key for key in tree if names.get(str(key)) == _DEFAULTS]
    given = tree[shared[0]] if shared else {}
    own = {key: value for key, value in jobs[0].items() if key != "name"}
    defaults = merge(canonical(given or {}, JobSpec, _DEFAULTS), canonical(own, JobSpec, "jobs.0"))
    return {**{key: value for key, value in tree.items() if key not in ("jobs", *shared)}, _DEFAULTS: defaults}


def _check_defaults(defaults: Mapping[str, Any]) -> None:
    """Reports errors in common settings there, not in the first trial."""
    if "name" in defaults:
        raise ConfigError("trials have names of their own; leave it out.", where=f"{_DEFAULTS}.name")
    check_job(defaults, _DEFAULTS)
    alone = {"name": "trial", "train_data": ["none"], "eval_data": 1}
    try:
        read(JobSpec, _with_alpha(merge(alone, canonical(defaults, JobSpec, _DEFAULTS)), _DEFAULTS), _DEFAULTS)
    except ConfigError as error:
        is_several = isinstance(error, WrongTypeError) and isinstance(error.value, list | tuple | Mapping)
        raise error.at(error.where, "What is to be searched goes in space." if is_several else None) from None


def _check_methods(space: Space) -> None:
    """ConfigError for a parameter that applies to no point, since no point has its method."""
    params = [params_of(point) for point in space.probes()]
    used = {name for own in params for name in own}
    methods = sorted({own[name] for own in params for name in own if setting_path(name) == "adapter.method"})
    for parameter in space.parameters:
        if parameter.name != TOGETHER and parameter.name not in used:
            owners, where = listed(owners_of(setting_path(parameter.name))), f"space.{parameter.name}"
            raise ConfigError(f"is a setting of {owners}; the method is {' and '.join(methods)}.", where=where)


def _check_comparable(spec: SweepSpec, space: Space) -> None:
    """ConfigError if trials would be evaluated on different samples and could not be compared."""
    searched = {setting_path(name): name for point in space.probes() for name in params_of(point)}
    eval_data = trial_job(spec, "trial", params_of(next(space.probes()))).eval_data
    if spec.objective.needs_eval_data and eval_data is None and "eval_data" not in searched:
        raise ConfigError(
            f"{spec.objective.name} needs eval_data: a fraction, a count or files.", where=f"{_DEFAULTS}.eval_data"
        )
    if "seed" in searched and isinstance(eval_data, float | int):
        raise ConfigError(
            "the seed also chooses the samples that are split off as eval_data, so trials would be evaluated on "
            "different ones; name files as eval_data.",
            where=f"space.{searched['seed']}",
        )


def _with_alpha(settings: dict[str, Any], where: str = "") -> dict[str, Any]:
    """Settings in which an alpha such as `2r` has become a number."""
    adapter = settings.get("adapter")
    alpha = adapter.get("lora_alpha") if isinstance(adapter, Mapping) else None
    if not isinstance(alpha, str) or not isinstance(adapter, Mapping) or is_number(alpha):
        return settings
    found = re.match(TIMES_R, alpha.strip())
    if found is None:
        raise ConfigError(
            f"expected a number, or a multiple of the rank such as 2r, got {describe(alpha)}.",
            where=join(where, "adapter.lora_alpha"),
        )
    rank = read(JobSpec, {"name": "rank", "train_data": "none", "adapter": {"r": adapter.get("r", 16)}}).adapter.r
    return {**settings, "adapter": {**adapter, "lora_alpha": float(found[1]) * rank}}


def _space_file(path: Path) -> dict[str, Any]:
    tree, lines = parse(path, "space")
    try:
        read_space(tree)
    except ConfigError as error:
        setting = (error.where or "").removeprefix("space").lstrip(".")
        line = next((lines[key] for key in (setting, setting.partition(".")[0]) if key in lines), None)
        location = f"{path} line {line}: {setting}" if line else f"{path}: {setting}".rstrip(": ")
        raise error.at(location) from None
    return dict(tree)


_BUDGETS = ("budget", "max_time", "max_minutes", "max_hours", "time_budget", "time_limit", "max_evals", "num_trials")
"""Other tools' names for the end of a search."""


def check_top(tree: Mapping[Any, Any]) -> None:
    """ConfigError for a setting of a job, an adapter, the objective or early stopping outside its section."""
    names = field_names(SweepSpec)
    for key, value in tree.items():
        name = str(key)
        if names.get(name) == "space" and (value is None or isinstance(value, list)):
            raise ConfigError(
                f"expected parameters such as r: [8, 16], or a file with them, got {describe(value)}.", where=name
            )
        if names.get(name) == "defaults" and not isinstance(value, Mapping | None):
            raise ConfigError(f"expected settings such as train_data: rows.jsonl, got {describe(value)}.", where=name)
        if name in names:
            continue
        if name in _BUDGETS:
            raise ConfigError("unknown setting.", where=name, hint="A budget is trials, max_tokens or max_seconds.")
        home = _home(name)
        if home is not None:
            raise ConfigError(f"is a setting of {home[0]}.", where=name, hint=home[1])


def _home(name: str) -> tuple[str, str] | None:
    """The section of a setting and how to write it; None for unknown names."""
    searched = "or search it in space."
    if name in field_names(JobSpec) and name != "name":
        return "a job", f"Put it under job:, {searched}"
    if name in field_names(AdapterSpec):
        return "the adapter", f"Write job: {{adapter: {{{name}: …}}}}, {searched}"
    if name in field_names(ObjectiveSpec):
        return "the objective", f"Write objective: {{{name}: …}}."
    if name in field_names(EarlyStopSpec):
        return "the early stop", f"Write early_stop: {{{name}: …}}."
    return None


def check_job(defaults: Mapping[str, Any], where: str) -> None:
    """ConfigError for a setting of the adapter or of the whole sweep among those of a job."""
    for key in defaults:
        if key in field_names(JobSpec):
            continue
        if key in field_names(AdapterSpec):
            hint = f"Write adapter: {{{key}: …}}, or search it in space."
            raise ConfigError("is a setting of the adapter.", where=join(where, key), hint=hint)
        if key in field_names(SweepSpec):
            raise ConfigError(
                "is a setting of the sweep.", where=join(where, key), hint="Put it beside job:, not in it."
            )


def check_space(space: Mapping[str, Any]) -> None:
    """ConfigError for a setting of the whole sweep among the parameters to search."""
    known = {**field_names(JobSpec), **field_names(AdapterSpec)}
    for key in space:
        if key in field_names(SweepSpec) and key not in known:
            raise ConfigError(
                "is a setting of the sweep, the same for all trials.",
                where=join("space", key),
                hint="Put it beside space:, not in it.",
            )
