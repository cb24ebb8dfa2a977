"""Reads fine-tuning jobs as OpenAI's API shows them, and finds the files they name.

An export is the JSON of GET /v1/fine_tuning/jobs or of one job, in a file or in several of a folder, with the contents
of the files beside it: `file-abc.jsonl`, or `file-abc` as it comes from /v1/files/file-abc/content.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.data.rows.json_rows import parse_json
from weft.data.rows.row import read_text
from weft.errors import DataError
from weft.settings.fields import describe

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
