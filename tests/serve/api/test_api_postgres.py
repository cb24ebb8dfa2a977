"""The API on PostgreSQL: one life of a job through it, and what only that database would refuse."""

from __future__ import annotations

import functools
import threading
from pathlib import Path

import openai
import pytest
from postgres_server import POSTGRES, running_postgres
from service_home import Home, chat_lines, make_home

from weft.serve.db.tables import IDEMPOTENCY, JOBS


@pytest.mark.parametrize("kind", POSTGRES)
def test_api_when_on_postgres_then_a_job_lives_as_on_sqlite(tmp_path: Path, kind: str):
    with running_postgres() as server:
        home = make_home(tmp_path / "data", db=server.url)
        with home.http:
            client = home.sdk()
            file = home.upload()
            job = home.job(file=file, metadata={"a b.c": "ü"}, extra_headers={"Idempotency-Key": "one"})
            assert home.job(file=file, metadata={"a b.c": "ü"}, extra_headers={"Idempotency-Key": "one"}) == job
            found = home.call("GET", "/v1/fine_tuning/jobs", params={"metadata[a b.c]": "ü"}).json()["data"]
            assert [row["id"] for row in found] == [job]
            assert client.fine_tuning.jobs.pause(job).status == "paused"
            assert client.fine_tuning.jobs.resume(job).status == "queued"
            name = home.finish(job)
            assert client.models.retrieve(name).id == name
            assert len(list(client.fine_tuning.jobs.list_events(job, limit=2))) == 7
            assert home.call("GET", f"/v1/fine_tuning/jobs/{job}/events?stream=true").text.endswith("[DONE]\n\n")
            assert home.call("GET", "/v1/usage").json()["trained_tokens"] == 120
            assert 'weft_jobs{state="succeeded"} 1.0' in home.call("GET", "/metrics").text
            for id in ("a%00b", "a\\b", "x" * 5000, "%ff%fe"):
                assert home.call("GET", f"/v1/files/{id}").status_code in (400, 404)
            _submit_at_once(home, file)
            _submit_up_to_a_quota(home)
            _store_up_to_a_quota(home)
            _upload_in_parts(home)
            start = client.fine_tuning.jobs.create(model=name, training_file=file)
            with pytest.raises(openai.BadRequestError, match=f"Job {start.id} starts from {name};"):
                client.models.delete(name)
            server.stop()
            answer = home.call("GET", f"/v1/files/{file}")
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "busy")
            assert home.http.get("/readyz").status_code == 503
            assert home.http.get("/healthz").status_code == 200
            server.start()
            assert client.files.retrieve(file).id == file
            with pytest.raises(openai.NotFoundError):
                home.sdk("globex").files.retrieve(file)
        home.database.close()


def _submit_up_to_a_quota(home: Home) -> None:
    file = home.upload("globex")
    home.limit("globex", max_active_jobs=3)
    answers: list[int] = []

    def submit(seed: int) -> None:
        body = {"model": "tiny", "training_file": file, "seed": seed}
        answers.append(home.call("POST", "/v1/fine_tuning/jobs", "globex", json=body).status_code)

    threads = [threading.Thread(target=submit, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answers) == [200] * 3 + [429] * 9


def _store_up_to_a_quota(home: Home) -> None:
    size = len(chat_lines())
    used = home.call("GET", "/v1/usage", "globex").json()["limits"]["stored_bytes"]["used"]
    home.limit("globex", max_stored_bytes=used + 3 * size)
    answers: list[int] = []

    def upload(number: int) -> None:
        form = {"data": {"purpose": "fine-tune"}, "files": {"file": (f"{number}.jsonl", chat_lines())}}
        announced = {"filename": "a.jsonl", "purpose": "fine-tune", "bytes": size, "mime_type": "text/jsonl"}
        path, body = ("/v1/uploads", {"json": announced}) if number % 4 == 0 else ("/v1/files", form)
        answers.append(home.call("POST", path, "globex", **body).status_code)

    threads = [threading.Thread(target=upload, args=(i,)) for i in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(answers) == {200, 429}
    assert home.call("GET", "/v1/usage", "globex").json()["limits"]["stored_bytes"]["used"] <= used + 3 * size


def _upload_in_parts(home: Home) -> None:
    data = chat_lines()
    uploads = home.sdk().uploads
    id = uploads.create(bytes=len(data), filename="a.jsonl", mime_type="text/jsonl", purpose="fine-tune").id
    parts = [uploads.parts.create(id, data=piece).id for piece in (data[:100], data[100:])]
    done = uploads.complete(id, part_ids=parts)
    assert done.file is not None and home.sdk().files.content(done.file.id).read() == data


def _submit_at_once(home: Home, file: str) -> None:
    before = home.count(JOBS)
    headers = {"Idempotency-Key": "two"}
    submit = functools.partial(home.job, file=file, extra_headers=headers)
    threads = [threading.Thread(target=submit) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert home.count(JOBS) == before + 1
    assert home.count(IDEMPOTENCY) == 2
