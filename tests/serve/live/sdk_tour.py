"""Goes round all routes with whichever `openai` package it finds; a program of its own, run by a test with each.

    python sdk_tour.py BASE_URL KEY TRAINING_FILE

Prints the version of the package and what came back, as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import openai


def refused(call: Any, *arguments: Any, **options: Any) -> list[Any]:
    """A refusal of the service, as the SDK understands it."""
    try:
        call(*arguments, **options)
    except openai.APIStatusError as error:
        return [type(error).__name__, error.status_code, error.code, error.param]
    return ["accepted"]


def files(client: openai.OpenAI, path: Path) -> dict[str, Any]:
    file = client.files.create(file=path, purpose="fine-tune")
    other = client.files.create(file=("other.jsonl", path.read_bytes()), purpose="fine-tune")
    listed = [found.id for found in client.files.list(purpose="fine-tune", limit=1)]
    return {
        "id": file.id,
        "file": [file.object, file.filename, file.bytes, file.purpose, client.files.retrieve(file.id) == file],
        "waited": client.files.wait_for_processing(file.id).status,
        "listed": listed[:2] == [other.id, file.id],
        "content": client.files.content(file.id).read() == path.read_bytes(),
        "deleted": client.files.delete(other.id).deleted,
        "gone": refused(client.files.retrieve, other.id),
        "bad": refused(client.files.create, file=("a.jsonl", b"{"), purpose="fine-tune"),
    }


def jobs(client: openai.OpenAI, file: str) -> dict[str, Any]:
    jobs = client.fine_tuning.jobs
    hyperparameters = {"n_epochs": 3, "batch_size": "auto", "learning_rate_multiplier": 10}
    request: dict[str, Any] = {
        "model": "tiny",
        "training_file": file,
        "suffix": "tour",
        "seed": 5,
        "method": {"type": "supervised", "supervised": {"hyperparameters": hyperparameters}},
        "metadata": {"by": openai.__version__},
        "extra_body": {"lora": {"r": 4}, "max_length": 64, "max_steps": 3},
    }
    long = jobs.create(**{**request, "extra_body": {"max_steps": 100_000, "max_length": 64}})
    steered = [jobs.pause(long.id).object, until(client, long.id, "paused"), jobs.resume(long.id).status]
    steered.append(jobs.cancel(long.id).object)
    job = jobs.create(**request, extra_headers={"Idempotency-Key": openai.__version__})
    again = jobs.create(**request, extra_headers={"Idempotency-Key": openai.__version__})
    status = until(client, job.id, "succeeded", "failed")
    job = jobs.retrieve(job.id)
    return {
        "id": job.id,
        "model": job.fine_tuned_model,
        "steered": [*steered, until(client, long.id, "cancelled")],
        "job": [job.object, status, job.seed, job.model, job.metadata, job.error, again.id == job.id],
        "hyperparameters": job.hyperparameters.to_dict() if job.hyperparameters else None,
        "tokens": (job.trained_tokens or 0) > 0,
        "extra": (job.model_extra or {})["settings"]["adapter"],
        "events": [event.type for event in jobs.list_events(job.id, limit=2)],
        "checkpoints": [found.step_number for found in jobs.checkpoints.list(job.id)],
        "listed": [found.id for found in jobs.list(limit=1)][:2] == [job.id, long.id],
        "results": client.files.content(job.result_files[0]).text.splitlines()[0],
        "bad": refused(jobs.create, **{**request, "model": "gpt-4o"}),
        "reinforcement": refused(jobs.create, **{**request, "method": {"type": "reinforcement"}}),
        "gone": refused(jobs.retrieve, "ftjob-nothing"),
    }


def until(client: openai.OpenAI, id: str, *states: str) -> str:
    deadline = time.monotonic() + 600
    while (status := str(client.fine_tuning.jobs.retrieve(id).status)) not in states:
        assert time.monotonic() < deadline, status
        time.sleep(0.3)
    return status


def models(client: openai.OpenAI, model: str) -> dict[str, Any]:
    request: dict[str, Any] = {"model": model, "max_tokens": 4, "temperature": 0}
    chat: dict[str, Any] = {**request, "messages": [{"role": "user", "content": "warp"}]}
    whole = client.chat.completions.create(**chat).choices[0].message.content
    pieces = client.chat.completions.create(**chat, stream=True)
    plain = client.completions.create(**request, prompt="warp")
    return {
        "listed": model in [found.id for found in client.models.list()],
        "owner": client.models.retrieve(model).owned_by,
        "chat": "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices) == whole,
        "completion": [plain.object, plain.choices[0].finish_reason],
        "deleted": client.models.delete(model).deleted,
        "gone": refused(client.chat.completions.create, **chat),
    }


def main(base_url: str, key: str, path: Path) -> None:
    with openai.OpenAI(base_url=base_url, api_key=key) as client:
        report: dict[str, Any] = {"version": openai.__version__, "files": files(client, path)}
        report["jobs"] = jobs(client, report["files"].pop("id"))
        report["models"] = models(client, report["jobs"].pop("model"))
        report["jobs"].pop("id")
    with openai.OpenAI(base_url=base_url, api_key="weft_wrong_key", max_retries=0) as stranger:
        report["stranger"] = refused(stranger.models.list)
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
