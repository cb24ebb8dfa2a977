"""A model that is deleted takes its checkpoints with it: nothing stays in the file store that no request can name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from service_home import ADAPTER, Home

from weft.errors import StorageError
from weft.serve.db import files
from weft.serve.db.files import delete_unnamed_blobs
from weft.serve.db.jobs import get_job
from weft.serve.db.tables import CHECKPOINTS, JOBS

MODELS = "/v1/models"


def trained(home: Home, tenant: str = "acme", steps: tuple[int, ...] = (2, 3)) -> tuple[str, list[str], list[str]]:
    """A finished job with checkpoints of their own archives: its model, theirs, and their blobs."""
    job = home.job(tenant)
    model = home.finish(job, tenant)
    names, blobs = [], []
    for step in steps:
        names.append(f"{model}:ckpt-step-{step}")
        blobs.append(home.blobs.put(b"PK-%d" % step, ".zip"))
        with home.database.begin() as tx:
            files.add_checkpoint(tx, tenant, job, step, model=names[-1], metrics={}, blob=blobs[-1])
    return model, names, blobs


def stored(home: Home) -> set[str]:
    return {name for name, _ in home.blobs.names()}


def test_model_when_deleted_then_its_checkpoints_and_all_their_bytes_are_gone(home):
    model, names, blobs = trained(home)
    other, _, others = trained(home, "globex")
    before = stored(home)
    with home.database.read() as tx:
        used = files.stored_bytes(tx, "acme")
    assert home.call("DELETE", f"{MODELS}/{model}").json() == {"id": model, "object": "model", "deleted": True}
    # finish() made one archive that is both the model and its first checkpoint.
    assert len(before - stored(home)) == 1 + len(blobs) and not set(blobs) & stored(home)
    assert set(others) <= stored(home) and home.call("GET", f"{MODELS}/{other}", "globex").status_code == 200
    for name in (model, f"{model}:ckpt-step-1", *names):
        assert home.call("GET", f"{MODELS}/{name}").status_code == 404
        assert home.call("DELETE", f"{MODELS}/{name}").status_code == 404
    with home.database.read() as tx:
        assert files.stored_bytes(tx, "acme") == used - 10


def test_checkpoint_when_deleted_then_only_it_goes_and_shared_bytes_stay(home):
    model, (second, third), blobs = trained(home)
    assert home.call("DELETE", f"{MODELS}/{second}", "globex").status_code == 404
    assert home.call("DELETE", f"{MODELS}/{second}").json()["deleted"]
    assert blobs[0] not in stored(home) and blobs[1] in stored(home)
    assert home.call("DELETE", f"{MODELS}/{model}:ckpt-step-1").json()["deleted"]
    assert home.call("GET", f"{MODELS}/{model}/adapter").content == ADAPTER
    assert home.call("GET", f"{MODELS}/{third}").status_code == 200
    assert home.count(CHECKPOINTS) == 1


def test_model_when_a_job_starts_from_one_of_its_checkpoints_then_nothing_is_deleted(home):
    model, (second, third), blobs = trained(home)
    next_job = home.sdk().fine_tuning.jobs.create(model=third, training_file=home.upload()).id
    for name in (model, third):
        refused = home.call("DELETE", f"{MODELS}/{name}")
        assert refused.status_code == 400 and next_job in refused.json()["error"]["message"]
    assert set(blobs) <= stored(home) and home.call("GET", f"{MODELS}/{model}").status_code == 200
    assert home.call("DELETE", f"{MODELS}/{second}").status_code == 200
    home.call("POST", f"/v1/fine_tuning/jobs/{next_job}/cancel")
    assert home.call("DELETE", f"{MODELS}/{model}").status_code == 200
    assert not set(blobs) & stored(home)


def test_model_when_the_file_store_is_away_then_is_deleted_and_its_bytes_go_with_the_daily_clean_up(
    home: Home, monkeypatch: pytest.MonkeyPatch
):
    model, _, blobs = trained(home)

    def away(name: str) -> None:
        raise StorageError("the file store does not answer.")

    with monkeypatch.context() as patch:
        patch.setattr(home.blobs, "delete", away)
        assert home.call("DELETE", f"{MODELS}/{model}").json()["deleted"]
    assert set(blobs) <= stored(home)
    assert delete_unnamed_blobs(home.database, home.blobs, older_than_s=-1) == 1 + len(blobs)
    assert not set(blobs) & stored(home)


def test_storage_when_a_file_has_expired_then_its_bytes_are_given_back(home):
    with home.database.begin() as tx:
        row = {"purpose": "fine-tune", "sha256": "0", "filename": "a", "blob": "b"}
        for bytes, expires_in_s in ((7, None), (5, 3600), (100, -1)):
            tx.execute(
                files.FILES.insert().values(
                    {**row, "id": f"file-{bytes}", "tenant": "acme", "bytes": bytes, "status": "processed",
                     "created_at": 1, "expires_at": expires_in_s and int(files.now(tx)) + expires_in_s}
                )
            )  # fmt: skip
        assert files.stored_bytes(tx, "acme") == 12


def test_backbone_when_deleted_or_its_adapter_requested_then_reports_that_it_is_one(home: Home):
    for method, path in (("DELETE", "/v1/models/tiny"), ("GET", "/v1/models/tiny/adapter")):
        answer = home.call(method, path)
        assert answer.status_code == 400
        assert "'tiny' is a backbone" in answer.json()["error"]["message"]
    assert home.call("GET", "/v1/models/tiny").status_code == 200
    assert home.call("GET", "/v1/models/gpt-4o").json()["error"]["code"] == "model_not_found"


def test_url_when_the_version_is_left_out_then_the_answer_names_it(home: Home):
    assert "below /v1" in home.call("GET", "/fine_tuning/jobs").json()["error"]["message"]
    message = home.call("POST", "/v1/responses", json={}).json()["error"]["message"]
    assert "below" not in message and "chat/completions" in message


def change(home: Home, blob: str) -> None:
    path = Path(home.blobs.path_of(blob))
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.write_bytes(data)


def remove(home: Home, blob: str) -> None:
    home.blobs.delete(blob)


@pytest.mark.parametrize("harm", [change, remove])
def test_downloads_when_the_stored_bytes_are_changed_or_gone_then_500_without_a_path(home: Home, harm: Any):
    job = home.job()
    model = home.finish(job)
    with home.database.read() as tx:
        results = get_job(tx, "acme", job)["result_files"][0]
        blobs = [files.get_model(tx, "acme", model)["blob"], files.get_file(tx, "acme", results)["blob"]]
    for blob in blobs:
        harm(home, blob)
    for path in (f"{MODELS}/{model}/adapter", f"/v1/files/{results}/content"):
        answer = home.call("GET", path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "stored_data_damaged")
        assert answer.headers["x-should-retry"] == "false"
        assert home.blobs.url not in answer.text and not any(blob in answer.text for blob in blobs)


@pytest.mark.parametrize("harm", [change, remove])
def test_job_when_its_stored_file_is_changed_or_gone_then_500_and_nothing_is_made(home: Home, harm: Any):
    file = home.upload()
    with home.database.read() as tx:
        harm(home, files.get_file(tx, "acme", file)["blob"])
    answer = home.call("POST", "/v1/fine_tuning/jobs", json={"model": "tiny", "training_file": file})
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "stored_data_damaged")
    assert home.count(JOBS) == 0
