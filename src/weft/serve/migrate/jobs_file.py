"""Writes jobs that were brought here: a jobs file for each backbone, and the data beside them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from weft.errors import StorageError
from weft.serve.migrate.openai_job import MovedJob
from weft.spec.job import RESERVED_NAMES
from weft.store.atomic import staged_directory

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


def with_own_names(jobs: Sequence[MovedJob]) -> list[MovedJob]:
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
