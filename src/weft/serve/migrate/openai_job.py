"""Turns one of OpenAI's jobs into one of ours, or says in a sentence why that cannot be."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.data.formats import convert_rows
from weft.data.rows.json_rows import parse_json, read_jsonl
from weft.data.rows.row import Row, read_text
from weft.data.rows.sources import DataFile
from weft.errors import ConfigError, DataError, WeftError
from weft.objectives.registry import choose_objective
from weft.settings.fields import describe, read
from weft.spec.choices.openai_hyperparameters import resolve, training_settings
from weft.spec.job import JobSpec

JOB_OBJECT = "fine_tuning.job"


@dataclass(frozen=True)
class ExportedJob:
    """One job of an export."""

    values: Mapping[str, Any]
    """As the API shows it."""
    folder: Path
    """Where the files are that it names."""

    @property
    def id(self) -> str:
        """Its id there."""
        return str(self.values["id"])

    def file(self, setting: str) -> Path | None:
        """The contents of the file that a setting names; None where it names none. DataError if they are missing."""
        name = self.values.get(setting)
        if name is None:
            return None
        if not isinstance(name, str) or Path(name).name != name:
            raise DataError(f"{setting} is {describe(name)}, not the id of a file.", where=self.id)
        found = next((p for p in (self.folder / f"{name}.jsonl", self.folder / name) if p.is_file()), None)
        if found is None:
            expected = self.folder / f"{name}.jsonl"
            raise DataError(f"{setting} is {name}, and there is no {expected}.", where=self.id)
        return found


def read_export(path: Path) -> list[ExportedJob]:
    """The jobs of a file, or of all .json files of a folder, in their order; each once."""
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    if not files:
        raise DataError(
            "has no .json file with jobs; save what GET /v1/fine_tuning/jobs answers there.", where=str(path)
        )
    jobs: dict[str, ExportedJob] = {}
    for file in files:
        for values in _jobs_of(file):
            jobs.setdefault(str(values["id"]), ExportedJob(values, file.parent))
    if not jobs:
        raise DataError("holds no fine-tuning jobs.", where=str(path))
    return list(jobs.values())


def _jobs_of(file: Path) -> list[Mapping[str, Any]]:
    try:
        text = read_text(file, str(file))
    except OSError as error:
        raise DataError(f"cannot be read ({error.strerror}).", where=str(file)) from None
    found = parse_json(text, str(file))
    if isinstance(found, Mapping) and isinstance(found.get("data"), list):
        found = found["data"]
    items = found if isinstance(found, list) else [found]
    for place, item in enumerate(items):
        if not isinstance(item, Mapping) or item.get("object") != JOB_OBJECT or not isinstance(item.get("id"), str):
            what = describe(item.get("object")) if isinstance(item, Mapping) else describe(item)
            raise DataError(
                f"item {place + 1} is {what}; expected objects {JOB_OBJECT!r}, one or a list of them.", where=str(file)
            )
    return items


HYPERPARAMETERS = ("n_epochs", "batch_size", "learning_rate_multiplier")
ENDED_BADLY = ("failed", "cancelled")


@dataclass(frozen=True)
class MovedJob:
    """A job that can be trained here."""

    id: str
    """OpenAI's."""
    model: str
    """What it was trained on there."""
    base_model: str
    """What it is to be trained on here."""
    name: str
    suffix: str | None
    train_file: Path
    eval_file: Path | None
    settings: Mapping[str, Any]
    """Of a jobs file, with every `auto` resolved."""
    method: Mapping[str, Any]
    """As the API takes it."""
    seed: int | None
    metadata: Mapping[str, str]
    notes: tuple[str, ...] = ()
    """What does not come along."""


def move_job(job: ExportedJob, models: Mapping[str, str], default: str | None) -> MovedJob:
    """The job as ours; a WeftError, at its id, if it cannot be carried over.

    `models`: our name for each of OpenAI's; `default`: for those that are not among them.
    """
    try:
        return _move_job(job, models, default)
    except WeftError as error:
        raise error if error.where == job.id else type(error)(str(error), where=job.id) from None


def _move_job(job: ExportedJob, models: Mapping[str, str], default: str | None) -> MovedJob:
    values = job.values
    if values.get("status") in ENDED_BADLY:
        raise ConfigError(
            f"its status is {values['status']}; jobs that failed or were cancelled are left out.", where=job.id
        )
    kind, given = _method(job)
    train_file, eval_file = job.file("training_file"), job.file("validation_file")
    if train_file is None:
        raise DataError("it names no training_file.", where=job.id)
    num_samples = sum(1 for _ in _checked_rows(train_file, kind))
    if eval_file is not None:
        for _ in _checked_rows(eval_file, kind):
            pass
    hyperparameters = {**dict.fromkeys(HYPERPARAMETERS, "auto"), **({"beta": "auto"} if kind == "dpo" else {}), **given}
    settings = training_settings(resolve(hyperparameters, num_samples))
    if kind == "dpo":
        settings["objective"] = "dpo"
    suffix, seed = _suffix(values), values.get("seed")
    moved = MovedJob(
        id=job.id,
        model=str(values.get("model")),
        base_model=_base_model(job, models, default),
        name=suffix or job.id,
        suffix=suffix,
        train_file=train_file,
        eval_file=eval_file,
        settings=settings,
        method={"type": kind, kind: {"hyperparameters": hyperparameters}},
        seed=seed,
        metadata=dict(values.get("metadata") or {}),
        notes=("integrations are set up anew, as report_to of the run.",) if values.get("integrations") else (),
    )
    # All that a jobs file could be told off for is found before one is written.
    read(JobSpec, {"name": "job", "train_data": "file", **settings, **({} if seed is None else {"seed": seed})})
    return moved


def _method(job: ExportedJob) -> tuple[str, dict[str, Any]]:
    """How it learns, and the hyper-parameters that are not left out."""
    method = job.values.get("method") or {"type": "supervised"}
    kind = method.get("type")
    if kind not in ("supervised", "dpo"):
        raise ConfigError(f"its method is {describe(kind)}; supervised and dpo are carried over.", where=job.id)
    of_method = (method.get(kind) or {}).get("hyperparameters") or {}
    older = job.values.get("hyperparameters") or {}
    known = (*HYPERPARAMETERS, "beta") if kind == "dpo" else HYPERPARAMETERS
    given = {name: value for name, value in {**older, **of_method}.items() if value is not None}
    for name, value in given.items():
        if name not in known:
            raise ConfigError(f"its hyper-parameter {name} has no place here.", where=job.id)
        if value != "auto" and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ConfigError(f"{name} is {describe(value)}, neither a number nor 'auto'.", where=job.id)
    return kind, given


def _base_model(job: ExportedJob, models: Mapping[str, str], default: str | None) -> str:
    model = str(job.values.get("model"))
    if model in models:
        return models[model]
    if model.startswith("ft:"):
        raise ConfigError(f"it goes on from {model}, whose weights OpenAI does not hand out.", where=job.id)
    if default is None:
        raise ConfigError(
            f"nobody has said what stands for {model} here; use --base-model NAME, or --model {model}=NAME.",
            where=job.id,
        )
    return default


def _suffix(values: Mapping[str, Any]) -> str | None:
    """The name a user gave it, in letters that names have here."""
    parts = str(values.get("fine_tuned_model") or "").split(":")
    given = values.get("user_provided_suffix") or values.get("suffix") or (parts[3] if len(parts) > 3 else None)
    cleaned = re.sub(r"[^A-Za-z0-9._-]+", "-", str(given or "")).strip("-._")[:64]
    return cleaned or None


def _checked_rows(path: Path, kind: str) -> Iterator[Row]:
    """The rows of a file, each read as training would read it; a DataError names the line."""
    is_empty = True
    # Not by its suffix: what the API hands out has none.
    with DataFile(path.name, path).read_errors():
        for row in read_jsonl(path, path.name):
            is_empty = False
            objective = choose_objective("dpo" if kind == "dpo" else "auto", [row.values])
            if kind == "supervised" and objective.name not in ("supervised", "weighted"):
                raise DataError("is preference data, but the method is supervised.", where=row.where)
            convert_rows([Row(part.values, row.where) for part in objective.parts(row.values, row.where)], "auto")
            yield row
    if is_empty:
        raise DataError("has no rows.", where=path.name)
