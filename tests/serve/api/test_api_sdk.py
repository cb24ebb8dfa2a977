"""The unmodified openai SDK drives every route."""

from __future__ import annotations

import json
import sys
import types
from importlib.machinery import ModuleSpec

import openai
import pytest
from openai.types import FileObject, Model
from openai.types.fine_tuning import FineTuningJob, FineTuningJobEvent
from openai.types.fine_tuning.jobs import FineTuningJobCheckpoint
from service_home import ADAPTER, Home, chat_lines

from weft.serve.db.usage import usage_of
from weft.serve.new_job import build_spec, job_settings, used_hyperparameters
from weft.spec.choices import resolve


def test_file_when_uploaded_then_listed_read_and_deleted(home: Home):
    client = home.sdk()
    data = chat_lines()
    file = client.files.create(file=("train.jsonl", data), purpose="fine-tune")
    assert (file.object, file.bytes, file.filename, file.status) == ("file", len(data), "train.jsonl", "processed")
    assert file.id.startswith("file-")
    assert [f.id for f in client.files.list()] == [file.id]
    assert client.files.retrieve(file.id) == file
    assert client.files.wait_for_processing(file.id).id == file.id
    assert client.files.content(file.id).read() == data
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)
    with pytest.raises(openai.NotFoundError):
        client.files.content(file.id)
    assert home.num_blobs() == 0


def test_file_when_kept_for_a_time_then_reports_when_it_expires(home: Home):
    client = home.sdk()
    until = {"anchor": "created_at", "seconds": 3600}
    file = client.files.create(file=("a.jsonl", chat_lines()), purpose="fine-tune", expires_after=until)
    assert file.expires_at == file.created_at + 3600


def test_job_when_created_then_has_openais_fields_and_ours(home: Home, monkeypatch: pytest.MonkeyPatch):
    wandb = types.ModuleType("wandb")
    wandb.__spec__ = ModuleSpec("wandb", None)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    client = home.sdk()
    file = home.upload()
    job = client.fine_tuning.jobs.create(
        model="tiny",
        training_file=file,
        validation_file=file,
        suffix="mine",
        seed=7,
        metadata={"team": "a"},
        method={"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 2, "batch_size": "auto"}}},
        integrations=[{"type": "wandb", "wandb": {"project": "p", "tags": ["x"]}}],
        extra_body={"lora": {"r": 4, "alpha": 8, "target_modules": ["q_proj"]}, "max_steps": 3, "max_length": 64},
    )
    assert job.id.startswith("ftjob-")
    assert (job.object, job.status, job.model, job.seed) == ("fine_tuning.job", "queued", "tiny", 7)
    assert (job.organization_id, job.training_file, job.validation_file) == ("acme", file, file)
    # It ends by its steps, not by its epochs.
    assert job.hyperparameters.to_dict() == {"batch_size": 1, "learning_rate_multiplier": 1.0}
    assert job.metadata == {"team": "a"}
    assert job.integrations[0].wandb.project == "p"
    settings = job.model_extra["settings"]
    assert settings["adapter"] == {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}
    assert (settings["max_steps"], settings["max_length"], settings["num_train_epochs"]) == (3, 64, 2)
    assert client.fine_tuning.jobs.retrieve(job.id) == job
    assert [found.id for found in client.fine_tuning.jobs.list()] == [job.id]


def test_job_when_steered_then_changes_state_and_reports_it(home: Home):
    jobs = home.sdk().fine_tuning.jobs
    id = home.job()
    assert jobs.pause(id).status == "paused"
    assert jobs.pause(id).status == "paused"
    assert jobs.resume(id).status == "queued"
    assert jobs.resume(id).status == "queued"
    assert jobs.cancel(id).status == "cancelled"
    assert jobs.cancel(id).status == "cancelled"
    with pytest.raises(openai.BadRequestError, match="too late to resume"):
        jobs.resume(id)
    messages = [event.message for event in jobs.list_events(id)]
    assert messages[0] == "Fine-tuning job cancelled"
    assert messages[-1] == f"Created fine-tuning job: {id}"
    assert len(messages) == 6


def test_result_when_job_succeeded_then_used_downloaded_and_deleted(home: Home):
    client = home.sdk()
    id = home.job(suffix="x")
    name = home.finish(id)
    job = client.fine_tuning.jobs.retrieve(id)
    assert (job.status, job.fine_tuned_model, job.trained_tokens) == ("succeeded", name, 120)
    assert job.finished_at is not None
    assert client.files.content(job.result_files[0]).text.startswith("step,train_loss")
    checkpoint = next(iter(client.fine_tuning.jobs.checkpoints.list(id)))
    assert (checkpoint.fine_tuning_job_id, checkpoint.step_number) == (id, 1)
    assert checkpoint.fine_tuned_model_checkpoint == f"{name}:ckpt-step-1"
    assert list(client.fine_tuning.checkpoints.permissions.list(checkpoint.id)) == []
    assert [m.id for m in client.models.list()] == ["tiny", name]
    model = client.models.retrieve(name)
    assert (model.owned_by, model.model_extra) == ("acme", {"root": "tiny", "job": id, "bytes": len(b"PK-adapter")})
    assert client.models.retrieve(checkpoint.fine_tuned_model_checkpoint).id
    for model in (name, checkpoint.fine_tuned_model_checkpoint):
        archive = home.call("GET", f"/v1/models/{model}/adapter")
        assert (archive.status_code, archive.content) == (200, ADAPTER)
        assert archive.headers["content-disposition"].startswith("attachment")
    assert client.models.delete(name).deleted
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve(name)


def test_permissions_when_requested_then_refused_in_openais_shape(home: Home):
    client = home.sdk()
    id = home.job()
    home.finish(id)
    checkpoint = next(iter(client.fine_tuning.jobs.checkpoints.list(id))).id
    with pytest.raises(openai.PermissionDeniedError):
        client.fine_tuning.checkpoints.permissions.create(checkpoint, project_ids=["p"])
    with pytest.raises(openai.NotFoundError):
        client.fine_tuning.checkpoints.permissions.delete("cp_1", fine_tuned_model_checkpoint=checkpoint)


def test_usage_when_jobs_ran_then_adds_up(home: Home):
    for _ in range(2):
        home.finish(home.job())
    home.job("globex")
    used = home.call("GET", "/v1/usage").json()
    assert used["trained_tokens"] == 240
    assert used["limits"]["active_jobs"] == {"used": 0, "limit": None}
    assert used["limits"]["trained_tokens"] == {"used": 240, "reserved": 0, "limit": None}
    assert home.call("GET", "/v1/usage", "globex").json()["limits"]["trained_tokens"]["reserved"] > 0
    assert home.call("GET", "/v1/usage", "globex").json()["trained_tokens"] == 0
    assert home.call("GET", "/v1/usage?end_time=1").json()["trained_tokens"] == 0
    with home.database.read() as tx:
        assert usage_of(tx, "acme")["totals"]["trained"] == 240


@pytest.mark.parametrize(
    ("num", "epochs", "batch"), [(10, 3, 1), (80, 3, 8), (999, 3, 8), (1000, 2, 8), (10_000, 1, 16)]
)
def test_hyperparameters_when_auto_then_follow_the_stated_rules(num: int, epochs: int, batch: int):
    found = resolve({"n_epochs": "auto"}, num)
    assert found == {"n_epochs": epochs, "batch_size": batch, "learning_rate_multiplier": 1.0}
    assert resolve({"n_epochs": 7, "batch_size": 2, "learning_rate_multiplier": 0.5}, num)["n_epochs"] == 7


@pytest.mark.parametrize(("adapter", "rate"), [(None, 1e-4), ({"r": 4}, 1e-4), ({"method": "ia3"}, 5e-3)])
def test_hyperparameters_when_a_multiplier_is_given_then_it_is_of_the_methods_own_rate(adapter, rate):
    extra = {} if adapter is None else {"adapter": adapter}
    given = {"n_epochs": 1, "batch_size": 1, "learning_rate_multiplier": 0.5}
    job = build_spec(job_settings(given, extra), name="a", train_data="rows")
    assert job.learning_rate == pytest.approx(rate)
    used = used_hyperparameters(given, {**extra, "learning_rate": job.learning_rate}, job)
    assert used["learning_rate_multiplier"] == pytest.approx(0.5)


def test_hyperparameters_when_settings_override_them_then_the_reply_has_those_that_are_used(home: Home):
    settings = {"learning_rate": 1e-3, "global_batch_size": 4}
    expected = {"n_epochs": 5, "batch_size": 4, "learning_rate_multiplier": 5.0}
    for epochs, shown in ((5, expected), (1.5, {k: v for k, v in expected.items() if k != "n_epochs"})):
        id = home.job(extra_body={"settings": {**settings, "num_train_epochs": epochs}})
        assert home.sdk().fine_tuning.jobs.retrieve(id).hyperparameters.to_dict() == shown


def test_openapi_when_read_then_describes_every_route_of_the_table(home: Home):
    schema = home.http.get("/openapi.json").json()
    for path in ("/v1/files", "/v1/fine_tuning/jobs", "/v1/models", "/v1/chat/completions", "/v1/completions"):
        assert path in schema["paths"]
    assert "CreateJob" in schema["components"]["schemas"]
    assert "422" not in json.dumps(schema)


def test_pages_when_the_network_is_closed_then_none_needs_it(home: Home):
    """The framework's own page would be blank without its scripts; the schema is there for any viewer."""
    assert home.http.get("/docs").status_code == home.http.get("/redoc").status_code == 404
    assert "://" not in home.http.get("/").text


def test_health_when_requested_then_needs_no_key_but_metrics_do(home: Home):
    assert home.http.get("/healthz").json()["status"] == "ok"
    assert home.http.get("/readyz").json() == {"status": "ready", "workers": 0}
    assert home.http.get("/metrics").status_code == 401
    home.finish(home.job())
    text = home.call("GET", "/metrics").text
    assert 'weft_jobs{state="succeeded"} 1.0' in text
    assert 'weft_tokens_total{kind="trained"} 120.0' in text
    assert 'route="/v1/fine_tuning/jobs"' in text
    home.app.state.service.is_draining = True
    assert home.http.get("/readyz").status_code == 503


def test_objects_when_read_by_the_types_of_the_sdk_then_fit_them_field_by_field(home: Home):
    """The SDK itself takes whatever comes; a user's code that reads a field that is not there does not."""
    kinds = {"supervised": {}, "dpo": {"beta": 0.2}}
    pair = json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}).encode() + b"\n"
    for kind, own in kinds.items():
        file = home.upload(data=pair if kind == "dpo" else None)
        method = {"type": kind, kind: {"hyperparameters": {"n_epochs": 1, **own}}}
        id = home.job(file=file, method=method, metadata={"k": "v"})
        job = FineTuningJob.model_validate(home.call("GET", f"/v1/fine_tuning/jobs/{id}").json())
        assert job.hyperparameters.n_epochs == 1
        home.finish(id)
        FineTuningJob.model_validate(home.call("GET", f"/v1/fine_tuning/jobs/{id}").json())
        for path, model in (("events", FineTuningJobEvent), ("checkpoints", FineTuningJobCheckpoint)):
            found = home.call("GET", f"/v1/fine_tuning/jobs/{id}/{path}").json()["data"]
            assert [model.model_validate(item) for item in found]
    assert [FileObject.model_validate(item) for item in home.call("GET", "/v1/files").json()["data"]]
    assert [Model.model_validate(item) for item in home.call("GET", "/v1/models").json()["data"]]


@pytest.mark.parametrize("value", ["x", "", "nil"])
def test_jobs_when_filtered_by_what_is_no_metadata_then_400(home: Home, value: str):
    answer = home.call("GET", f"/v1/fine_tuning/jobs?metadata={value}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "metadata")
