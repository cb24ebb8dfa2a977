"""Many jobs of four tenants live their whole lives through the openai SDK, at once, against a real `weft serve`."""

from __future__ import annotations

import io
import socket
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest
from covering import slow
from openai.types.fine_tuning import FineTuningJobEvent
from service_process import Service, Trained, Wish, train, wait

from weft.serve.blobs import Blobs

TENANTS = ("ash", "birch", "cedar", "dogwood")


def wishes_of(tenant: str, number: int) -> list[Wish]:
    t = TENANTS.index(tenant)
    return [
        Wish(f"{tenant}{i}", seed=10 * t + i, max_steps=3 + i % 3, r=(2, 4, 8)[i % 3], batch_size=2 + t)
        for i in range(number)
    ]


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    made = Service(tmp_path / "data")
    for tenant in TENANTS:
        made.add_tenant(tenant)
    made.start()
    yield made
    assert made.stop() == 0


@pytest.mark.parametrize("number", [2, slow(5)])
def test_jobs_when_many_of_four_tenants_run_at_once_then_each_lives_its_life_and_is_as_weft_train_makes_it(
    service: Service, tmp_path: Path, number: int
):
    wishes = {tenant: wishes_of(tenant, number) for tenant in TENANTS}
    with ThreadPoolExecutor(len(TENANTS)) as clients:
        lives = clients.map(lambda tenant: live(service, tenant, wishes[tenant]), TENANTS)
        # Meanwhile, here.
        expected = train([wish for tenant in TENANTS for wish in wishes[tenant]], tmp_path / "twins")
        found = {name: trained for life in lives for name, trained in life.items()}
    assert set(found) == set(expected)
    for name, trained in found.items():
        assert trained == expected[name], name
    left = list(Blobs(str(service.data_dir / "blobs")).names())
    assert left == [], "files, models and the checkpoints of their jobs were deleted"
    assert not [line for line in service.log_lines() if line["level"] == "error"]


def live(service: Service, tenant: str, wishes: list[Wish]) -> dict[str, Trained]:
    """All that one tenant does; returns what it was given for each of its jobs."""
    found = {}
    with service.sdk(tenant, max_retries=0) as client:
        jobs = {}
        for wish in wishes:
            file = client.files.create(file=(f"{wish.name}.jsonl", wish.data), purpose="fine-tune")
            jobs[wish.name] = client.fine_tuning.jobs.create(training_file=file.id, **wish.request)
        assert {job.id for job in client.fine_tuning.jobs.list()} == {job.id for job in jobs.values()}
        for number, wish in enumerate(wishes):
            id = jobs[wish.name].id
            follow = stream_events if number % 2 else poll_events
            assert follow(client, id) == expected_events(wish), wish
            job = client.fine_tuning.jobs.retrieve(id)
            assert (job.status, job.error, job.organization_id) == ("succeeded", None, tenant)
            assert job.fine_tuned_model is not None
            talk(client, job.fine_tuned_model)
            archive = client.get(f"/models/{job.fine_tuned_model}/adapter", cast_to=httpx.Response)
            with zipfile.ZipFile(io.BytesIO(archive.content)) as packed:
                files = {name: packed.read(name) for name in packed.namelist()}
            found[wish.name] = Trained(files, job.trained_tokens or 0)
            forget(client, job)
        assert [model.id for model in client.models.list()] == ["tiny"]
        assert list(client.files.list()) == []
    return found


def expected_events(wish: Wish) -> list[str]:
    steps = [f"Step {step}/{wish.max_steps}" for step in range(1, wish.max_steps + 1)]
    return [
        "Created fine-tuning job",
        "Validating training file",
        "Files validated, moving job to queued state",
        "Fine-tuning job started",
        *steps,
        "The job has successfully completed",
    ]


def stream_events(client: openai.OpenAI, id: str) -> list[str]:
    """The events as they come, until the job has ended."""
    stream = client.get(
        f"/fine_tuning/jobs/{id}/events",
        cast_to=FineTuningJobEvent,
        options={"params": {"stream": "true"}},
        stream=True,
        stream_cls=openai.Stream[FineTuningJobEvent],
    )
    return [event.message.split(":")[0] for event in stream]


def poll_events(client: openai.OpenAI, id: str) -> list[str]:
    """The events page by page, once the job has ended."""
    wait(lambda: client.fine_tuning.jobs.retrieve(id).finished_at)
    return [event.message.split(":")[0] for event in client.fine_tuning.jobs.list_events(id, limit=3)][::-1]


def talk(client: openai.OpenAI, model: str) -> None:
    """A chat, whole and in pieces, is the same."""
    request = {"model": model, "messages": [{"role": "user", "content": "warp"}], "max_tokens": 6, "temperature": 0}
    answer = client.chat.completions.create(**request)
    pieces = client.chat.completions.create(stream=True, **request)
    text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    assert answer.choices[0].message.content == text
    assert answer.usage is not None and 0 < answer.usage.completion_tokens <= 6


def forget(client: openai.OpenAI, job: openai.types.fine_tuning.FineTuningJob) -> None:
    assert job.fine_tuned_model is not None
    assert client.models.delete(job.fine_tuned_model).deleted
    for file in (job.training_file, *job.result_files):
        assert client.files.delete(file).deleted
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve(job.fine_tuned_model)


def test_upload_when_the_client_goes_away_in_the_middle_then_nothing_is_kept_and_others_are_served(tmp_path: Path):
    service = Service(tmp_path / "data", ("--workers", "0"))
    service.add_tenant("ash")
    service.start()
    blobs = Blobs(str(service.data_dir / "blobs"))
    head = (
        f"POST /v1/files HTTP/1.1\r\nhost: weft\r\nauthorization: Bearer {service.keys['ash']}\r\n"
        "content-type: multipart/form-data; boundary=b\r\ncontent-length: 9999999\r\n\r\n"
        '--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nfine-tune\r\n'
        '--b\r\ncontent-disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n{"prompt": "'
    )
    with socket.create_connection(("127.0.0.1", service.port)) as client:
        client.sendall(head.encode() + b"x" * 2**20)
        wait(lambda: list(blobs.names()))
    wait(lambda: not list(blobs.names()))
    with service.sdk("ash") as sdk:
        assert list(sdk.files.list()) == []
    assert service.stop() == 0
