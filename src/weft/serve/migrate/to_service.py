"""Sends jobs that were brought here to a running service, with OpenAI's own client."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from weft.errors import ConfigError, MissingExtraError, StorageError, first_line
from weft.serve.migrate.openai_job import MovedJob
from weft.spec.job import RESERVED_NAMES
from weft.store.atomic import staged_directory

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
        raise ConfigError(f"the service says: {first_line(error)}.", where=url) from None


def send_jobs(jobs: Sequence[MovedJob], client: Any) -> Iterator[tuple[MovedJob, str]]:
    """Uploads each file once and starts the jobs; yields each with its id there.

    A job has its old id in its metadata, by which it is recognised: a client that was cut off and sends again starts
    none twice. A file that no job uses because of an error is deleted again.
    """
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
            made = client.fine_tuning.jobs.create(
                model=job.base_model,
                method=job.method,
                **files,
                **_further(job),
            )
            used.update(files.values())
            yield job, made.id
    finally:
        for unused in set(uploaded.values()) - used:
            with suppress(Exception):
                client.files.delete(unused)


def _further(job: MovedJob) -> dict[str, Any]:
    given = {"suffix": job.suffix, "seed": job.seed, "metadata": {**job.metadata, MARK: job.id}}
    return {name: value for name, value in given.items() if value is not None}


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
    """The jobs, each with a name of its own: its suffix if no other has it, else with the end of its id behind that."""
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
