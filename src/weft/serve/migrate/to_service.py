"""Sends jobs that were brought here to a running service, with OpenAI's own client."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from weft.errors import ConfigError, MissingExtraError, first_line
from weft.serve.migrate.openai_job import MovedJob

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

    A job has its old id in its metadata, by which it is found again: whoever is cut off and sends again starts none
    twice. A file that no job uses because of an error is deleted again.
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
