"""Turns OpenAI's jobs into ours, or raises an error with the reason, and sends them to a running service."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from weft.data.formats import convert_rows
from weft.data.json_rows import parse_json, read_jsonl
from weft.data.row import Row, read_text
from weft.data.sources import DataFile
from weft.errors import ConfigError, DataError, MissingExtraError, StorageError, WeftError, first_line
from weft.objectives.registry import choose_objective
from weft.settings import describe, read
from weft.spec.choices import resolve, training_settings
from weft.spec.job import RESERVED_NAMES, JobSpec
from weft.store.atomic import staged_directory

JOB_OBJECT = "fine_tuning.job"


@dataclass(frozen=True)
class ExportedJob:
    values: Mapping[str, Any]
    folder: Path

    @property
    def id(self) -> str:
        return str(self.values["id"])

    def file(self, setting: str) -> Path | None:
        """The path of the file that a setting names, None if it is not set; DataError if the file is missing."""
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
    """Reads the jobs of a file, or of all .json files of a folder, in their order; each once."""
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
    for index, item in enumerate(items):
        if not isinstance(item, Mapping) or item.get("object") != JOB_OBJECT or not isinstance(item.get("id"), str):
            what = describe(item.get("object")) if isinstance(item, Mapping) else describe(item)
            raise DataError(
                f"item {index + 1} is {what}; expected objects {JOB_OBJECT!r}, one or a list of them.", where=str(file)
            )
    return items


HYPERPARAMETERS = ("n_epochs", "batch_size", "learning_rate_multiplier")
ENDED_BADLY = ("failed", "cancelled")


@dataclass(frozen=True)
class MovedJob:
    id: str
    model: str
    base_model: str
    name: str
    suffix: str | None
    train_file: Path
    eval_file: Path | None
    settings: Mapping[str, Any]
    method: Mapping[str, Any]
    seed: int | None
    metadata: Mapping[str, str]
    notes: tuple[str, ...] = ()


def move_job(job: ExportedJob, models: Mapping[str, str], default: str | None) -> MovedJob:
    """Converts a job; raises a WeftError that names it if it cannot be carried over. `models` maps OpenAI's models to
    ours; `default` stands for all others."""
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
        notes=("integrations are not copied; set report_to of the run.",) if values.get("integrations") else (),
    )
    # Every error of a jobs file is found before one is written.
    read(JobSpec, {"name": "job", "train_data": "file", **settings, **({} if seed is None else {"seed": seed})})
    return moved


def _method(job: ExportedJob) -> tuple[str, dict[str, Any]]:
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
            raise ConfigError(f"its hyper-parameter {name} is not supported.", where=job.id)
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
            f"no base model is given for {model}; use --base-model NAME, or --model {model}=NAME.",
            where=job.id,
        )
    return default


def _suffix(values: Mapping[str, Any]) -> str | None:
    """The user's name of the job, reduced to characters that names may have here."""
    parts = str(values.get("fine_tuned_model") or "").split(":")
    given = values.get("user_provided_suffix") or values.get("suffix") or (parts[3] if len(parts) > 3 else None)
    cleaned = re.sub(r"[^A-Za-z0-9._-]+", "-", str(given or "")).strip("-._")[:64]
    return cleaned or None


def _checked_rows(path: Path, kind: str) -> Iterator[Row]:
    """Reads the rows of a file as training would; a DataError names the line."""
    is_empty = True
    # Files from the API have no suffix, so the format is not chosen by it.
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


MARK = "openai_job"
"""The key of the metadata that has a job's old id."""


@contextmanager
def service_client(url: str, key: str) -> Iterator[Any]:
    """OpenAI's client, pointed at a service; whatever it raises inside is a ConfigError."""
    try:
        import openai
    except ImportError:
        raise MissingExtraError("--to needs OpenAI's client: pip install openai.", where="weft import openai") from None
    try:
        yield openai.OpenAI(base_url=url, api_key=key)
    except openai.OpenAIError as error:
        raise ConfigError(f"the service answers: {first_line(error)}.", where=url) from None


def send_jobs(jobs: Sequence[MovedJob], client: Any) -> Iterator[tuple[MovedJob, str]]:
    """Uploads each file once and starts the jobs; yields each with its id there. A job has its old id in its metadata,
    by which it is recognised: a client that was cut off and sends again starts none twice. A file that no job uses
    because of an error is deleted again."""
    uploaded: dict[Path, str] = {}
    used: set[str] = set()
    try:
        for job in jobs:
            known = client.fine_tuning.jobs.list(metadata={MARK: job.id}, limit=1).data
            if known:
                yield job, known[0].id
                continue
            files = {}
            for setting, path in (("training_file", job.train_file), ("validation_file", job.eval_file)):
                if path is None:
                    continue
                if path not in uploaded:
                    named = (f"{path.name.removesuffix('.jsonl')}.jsonl", path.read_bytes())
                    uploaded[path] = client.files.create(file=named, purpose="fine-tune").id
                files[setting] = uploaded[path]
            further = {"suffix": job.suffix, "seed": job.seed, "metadata": {**job.metadata, MARK: job.id}}
            further = {name: value for name, value in further.items() if value is not None}
            made = client.fine_tuning.jobs.create(model=job.base_model, method=job.method, **files, **further)
            used.update(files.values())
            yield job, made.id
    finally:
        for unused in set(uploaded.values()) - used:
            with suppress(Exception):
                client.files.delete(unused)


HEAD = """\
# {num} of OpenAI's fine-tuning jobs, for one frozen model. Check this file, then train:
#
#   weft train {file} --dry-run
#   weft train {file}
#
# `auto` of a hyper-parameter was resolved by the rules of `weft serve`. `weft config` explains every setting.

base_model: {base_model}
output_dir: runs/{run}

jobs:
"""


def with_unique_names(jobs: Sequence[MovedJob]) -> list[MovedJob]:
    """Makes names unique: a suffix that is taken gets the end of the job's id appended."""
    taken = {name.lower() for name in RESERVED_NAMES}
    named = []
    for job in jobs:
        name = job.name
        if name.lower() in taken:
            name = f"{job.name[:40]}-{job.id.removeprefix('ftjob-')[-20:]}"
        taken.add(name.lower())
        named.append(replace(job, name=name))
    return named


def write_jobs(jobs: Sequence[MovedJob], folder: Path) -> list[Path]:
    """Writes the whole folder or nothing; returns the jobs files."""
    if folder.exists():
        raise StorageError("already exists; choose another folder with --out.", where=str(folder))
    backbones = list(dict.fromkeys(job.base_model for job in jobs))
    names = {model: f"jobs-{number}.yaml" for number, model in enumerate(backbones, 1)}
    if len(backbones) == 1:
        names = {backbones[0]: "jobs.yaml"}
    with staged_directory(folder) as temp:
        (temp / "data").mkdir()
        for file in {file for job in jobs for file in (job.train_file, job.eval_file) if file is not None}:
            shutil.copyfile(file, temp / "data" / f"{file.name.removesuffix('.jsonl')}.jsonl")
        for model, name in names.items():
            own = [job for job in jobs if job.base_model == model]
            (temp / name).write_text(_text(own, folder / name), encoding="utf-8")
    return [folder / name for name in names.values()]


def _text(jobs: Sequence[MovedJob], file: Path) -> str:
    head = HEAD.format(num=len(jobs), file=file, base_model=json.dumps(jobs[0].base_model), run=file.parent.name)
    return head + "\n".join(_item(job) for job in jobs)


def _item(job: MovedJob) -> str:
    data = {"train_data": job.train_file} | ({} if job.eval_file is None else {"eval_data": job.eval_file})
    settings = {
        "name": job.name,
        **{setting: [f"data/{path.name.removesuffix('.jsonl')}.jsonl"] for setting, path in data.items()},
        **job.settings,
        **({} if job.seed is None else {"seed": job.seed}),
    }
    about = [f"{job.id}, there on {job.model}"]
    about += [f"metadata: {json.dumps(job.metadata, ensure_ascii=False)}"] if job.metadata else []
    # JSON is YAML too, whatever a name holds.
    lines = [f"{name}: {json.dumps(value, ensure_ascii=False)}" for name, value in settings.items()]
    comments = "".join(f"  # {' '.join(text.split())}\n" for text in about)
    return comments + "  - " + "\n    ".join(lines) + "\n"
