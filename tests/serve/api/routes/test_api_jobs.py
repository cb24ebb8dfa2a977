"""Jobs through the API: bad bodies, paging, idempotency, quotas, and what a client may not set."""

from __future__ import annotations

import json
import sqlite3
import sys
import threading
from dataclasses import replace
from typing import Any

import openai
import pytest
from service_home import Home, chat_lines

from weft.serve.db.jobs import add_event, get_job
from weft.serve.db.tables import EVENTS, IDEMPOTENCY, JOBS
from weft.serve.db.usage import guess_tokens
from weft.serve.new_job import spec_of
from weft.spec import JobSpec

SUFFIX = "1 to 64 letters, digits, dots, dashes and underscores."
BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "no model": ({"model": None}, "model", "got nothing; use text."),
    "other model": ({"model": "gpt-4"}, "model", "cannot be fine-tuned here; use tiny"),
    "a path as model": ({"model": "/etc"}, "model", "cannot be fine-tuned here"),
    "no file": ({"training_file": "file-none"}, "training_file", "does not exist"),
    "name of a file": ({"training_file": "train.jsonl"}, "training_file", "Send the id of an uploaded file"),
    "file of another kind": ({"training_file": 7}, "training_file", "got 7; use text."),
    "url as file": ({"training_file": "https://example.com/x.jsonl"}, "training_file", "does not exist"),
    "validation": ({"validation_file": "file-none"}, "validation_file", "does not exist"),
    "suffix too long": ({"suffix": "a" * 65}, "suffix", SUFFIX),
    "suffix with colon": ({"suffix": "a:b"}, "suffix", f"got 'a:b'; use {SUFFIX}"),
    "suffix empty": ({"suffix": ""}, "suffix", SUFFIX),
    "seed negative": ({"seed": -1}, "seed", "got -1; use at least 0."),
    "seed huge": ({"seed": 2**32}, "seed", "use less than 4,294,967,296."),
    "seed text": ({"seed": "7"}, "seed", "got '7'; use a whole number."),
    "unknown field": ({"mode": "x"}, "mode", "Unrecognized request argument"),
    "method": ({"method": {"type": "magic"}}, "method.type", "supervised"),
    "dpo": ({"method": {"type": "dpo"}}, "training_file", "has no preference: chosen and rejected are missing"),
    "beta of dpo": (
        {"method": {"type": "dpo", "dpo": {"hyperparameters": {"beta": 3}}}},
        "method.dpo.hyperparameters.beta",
        "got 3; use 'auto' or at most 2.",
    ),
    "two objectives": (
        {"method": {"type": "dpo"}, "settings": {"objective": "supervised"}},
        "settings.objective",
        "is given twice; keep one.",
    ),
    "rl": ({"method": {"type": "reinforcement", "reinforcement": {"x": 1}}}, "method.type", "is not available"),
    "epochs": (
        {"hyperparameters": {"n_epochs": 51}},
        "hyperparameters.n_epochs",
        "got 51; use 'auto' or at most 50.",
    ),
    "epochs text": (
        {"hyperparameters": {"n_epochs": "many"}},
        "hyperparameters.n_epochs",
        "got 'many'; use 'auto' or a whole number.",
    ),
    "batch": (
        {"hyperparameters": {"batch_size": 0}},
        "hyperparameters.batch_size",
        "got 0; use 'auto' or at least 1.",
    ),
    "rate": (
        {"hyperparameters": {"learning_rate_multiplier": 0}},
        "hyperparameters.learning_rate_multiplier",
        "got 0; use 'auto' or more than 0.",
    ),
    "beta": ({"hyperparameters": {"beta": 0.1}}, "hyperparameters.beta", "Unrecognized"),
    "metadata many": (
        {"metadata": {str(i): "x" for i in range(17)}},
        "metadata",
        "'metadata': has 17 pairs; at most 16 are kept.",
    ),
    "metadata key": ({"metadata": {"k" * 65: "x"}}, "metadata", "64"),
    "metadata value": ({"metadata": {"k": "x" * 513}}, "metadata", "512"),
    "metadata number": ({"metadata": {"k": 1}}, "metadata.k", "got 1; use text."),
    "integration": ({"integrations": [{"type": "slack"}]}, "integrations.0.type", "wandb"),
    "two methods": ({"method": {"type": "supervised", "dpo": {}}}, "method", "has 'dpo', but its type is 'supervised'"),
    "other method": ({"method": {"type": "dpo", "supervised": {}}}, "method", "has 'supervised', but its type is"),
    "rank 0": ({"lora": {"r": 0}}, "lora.r", "at least 1, got 0"),
    "rank -1": ({"lora": {"r": -1}}, "lora.r", "at least 1"),
    "rank huge": ({"lora": {"r": 10**30}}, "lora.r", "use at most 65,536"),
    "rank 1e18": ({"lora": {"r": 1e18}}, "lora.r", "got 1e+18; use at most 65,536."),
    "rank of a pattern": ({"lora": {"rank_pattern": {"q_proj": 1e18}}}, "lora.rank_pattern.q_proj", "at most 65,536"),
    "layer 1e9": ({"settings": {"adapter": {"layers_to_transform": [1, 10**9]}}}, "lora.layers_to_transform.1", "most"),
    "layers many": (
        {"lora": {"layers_to_transform": list(range(1025))}},
        "lora.layers_to_transform",
        "has 1,025 entries; at most 1,024 are accepted.",
    ),
    "ranks many": ({"lora": {"rank_pattern": {f"m{i}": 1 for i in range(1025)}}}, "lora.rank_pattern", "1,025 entries"),
    "module long": ({"lora": {"target_modules": ["q" * 1025]}}, "lora.target_modules.0", "has 1,025 characters"),
    "settings many": ({"settings": {f"s{i}": 1 for i in range(1025)}}, "settings", "1,025 entries"),
    "epochs 1e18": (
        {"settings": {"num_train_epochs": 1e18}},
        "settings.num_train_epochs",
        "use at most 2,147,483,647.",
    ),
    "rank text": ({"lora": {"r": "much"}}, "lora.r", "whole number"),
    "lora typo": ({"lora": {"lora_alhpa": 1}}, "lora.lora_alhpa", "Did you mean lora_alpha?"),
    "two names": ({"lora": {"r": 1, "rank": 2}}, "lora.rank", "two names"),
    "dropout": ({"lora": {"dropout": 1.0}}, "lora.lora_dropout", "below 1"),
    "regex": ({"lora": {"target_modules": "(a+)+$"}}, "lora.target_modules", "not a module name"),
    "regex in a list": ({"lora": {"target_modules": ["q_proj", "(.*)*"]}}, "lora.target_modules", "not a module name"),
    "regex of ia3": (
        {"lora": {"method": "ia3", "feedforward_modules": "(a+)+$"}},
        "lora.feedforward_modules",
        "not a module name",
    ),
    "new tokens": ({"lora": {"new_tokens": ["<a>"]}}, "lora.new_tokens", "answers with the backbone's own tokens"),
    "regex as pattern": ({"lora": {"rank_pattern": {"(x+)+": 4}}}, "lora.rank_pattern", "not a module name"),
    "regex of rates": (
        {"settings": {"learning_rate_pattern": {"(x+)+": 2}}},
        "settings.learning_rate_pattern",
        "not a module name",
    ),
    "lora list": ({"lora": [1]}, "lora", "got a list; use an object."),
    "priority": ({"priority": 1}, "priority", "at most 0"),
    "steps": ({"max_steps": 0}, "max_steps", "use at least 1."),
    "length": ({"max_length": 1}, "max_length", "use at least 2."),
    "settings typo": ({"settings": {"learning_rat": 1}}, "settings.learning_rat", "Did you mean learning_rate?"),
    "settings lr": ({"settings": {"lr": -1}}, "learning_rate", "above 0"),
    "settings name": ({"settings": {"name": "x"}}, "settings.name", "set by the service"),
    "settings data": ({"settings": {"data": ["/etc/passwd"]}}, "settings.train_data", "set by the service"),
    "settings tenant": ({"settings": {"tenant": "globex"}}, "settings.tenant", "set by the service"),
    "settings template": ({"settings": {"chat_template": "{{ x }}"}}, "settings.chat_template", "program"),
    "settings adapter": ({"settings": {"init_adapter": "/x"}}, "settings.init_adapter", "directory of the server"),
    "settings twice": ({"settings": {"max_steps": 1}, "max_steps": 2}, "settings.max_steps", "twice"),
}


@pytest.mark.parametrize("kind", BAD)
def test_job_when_the_body_is_bad_then_400_names_the_field_and_nothing_is_made(home: Home, kind: str):
    change, param, text = BAD[kind]
    body = {"model": "tiny", "training_file": home.upload(data=chat_lines(2)), **change}
    answer = home.call("POST", "/v1/fine_tuning/jobs", json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400, answer.text
    assert error["param"] == param, error
    assert text in error["message"], error
    assert home.count(JOBS) == 0


RAW = {
    "empty": (b"", "model"),
    "text": (b"hello", "not valid JSON"),
    "list": (b"[]", "must be a JSON object"),
    "nan": (b'{"seed": NaN}', "NaN"),
    "twice": (b'{"model": "a", "model": "b"}', "twice"),
    "surrogate": (b'{"model": "\\ud800"}', "surrogate"),
    "nul": (b'{"model": "\\u0000"}', "NUL"),
    "latin-1": (b'{"model": "\xe9"}', "UTF-8"),
    "deep": (b'{"metadata": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested"),
    "65 deep": (b'{"lora": ' + b"[" * 64 + b"]" * 64 + b"}", "nested more than 64"),
    "digits": (b'{"seed": ' + b"9" * 9999 + b"}", "digits"),
}


@pytest.mark.parametrize("kind", RAW)
def test_body_when_it_is_no_json_object_then_400(home: Home, kind: str):
    data, text = RAW[kind]
    answer = home.call("POST", "/v1/fine_tuning/jobs", content=data, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert text in answer.json()["error"]["message"]


LARGE = {
    "keys": (json.dumps({"metadata": {f"k{i}": "" for i in range(20_001)}}), "more than 20,000 keys"),
    "keys in many objects": (json.dumps({"lora": [{"k": 1}] * 20_001}), "more than 20,000 keys"),
    "items": (json.dumps({"lora": [0] * (2**18 + 1)}), "more than 262,144 items"),
    "lists": ('{"lora": [' + "[]," * 2**17 + "[]]}", "more than 262,144 items"),
    "nested": ('{"lora": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested more than 64 deep"),
    "string without an end": ('{"lora": "' + '\\"' * 10**6, "not valid JSON"),
}


@pytest.mark.parametrize("kind", LARGE)
def test_body_when_it_has_too_many_parts_then_400_before_it_is_parsed(home: Home, kind: str, monkeypatch):
    data, text = LARGE[kind]
    if "JSON" not in text:
        monkeypatch.setattr("weft.serve.api.requests.parse_json", lambda *_: pytest.fail("parsed"))
    answer = home.call("POST", "/v1/fine_tuning/jobs", content=data, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert text in answer.json()["error"]["message"]


def test_body_when_a_text_is_full_of_marks_then_they_do_not_count(home: Home):
    body = {"model": "tiny", "training_file": home.upload(data=chat_lines(2)), "suffix": '{[,:\\"' * 10**5}
    answer = home.call("POST", "/v1/fine_tuning/jobs", json=body)
    assert answer.json()["error"]["param"] == "suffix", answer.text


def test_body_when_it_is_large_then_other_requests_are_answered_while_it_is_parsed(home: Home, monkeypatch):
    import weft.serve.api.requests as requests

    parse, threads = requests.parse_json, []
    monkeypatch.setattr(requests, "parse_json", lambda *a: threads.append(threading.current_thread()) or parse(*a))
    for size in (10, 10**6):
        home.call("POST", "/v1/fine_tuning/jobs", json={"model": "x" * size})
    loop, other = threads
    assert "AnyIO worker" in other.name and "AnyIO worker" not in loop.name


def test_body_when_too_long_then_413(home: Home):
    data = b'{"model": "' + b"x" * home.settings.limits.body_bytes + b'"}'
    assert home.call("POST", "/v1/fine_tuning/jobs", content=data).status_code == 413


def test_job_when_made_then_its_row_is_a_real_job_spec(home: Home):
    id = home.job(seed=3, extra_body={"lora": {"r": 4}, "settings": {"lr_scheduler": "cosine"}})
    with home.database.read() as tx:
        spec = spec_of(get_job(tx, "acme", id), "train.jsonl", "valid.jsonl")
    assert (spec.name, spec.seed, spec.tenant, spec.adapter.r) == (id, 3, "acme", 4)
    assert (spec.lr_scheduler_type, spec.learning_rate, spec.eval_data) == ("cosine", 2e-4, ("valid.jsonl",))


def test_lists_when_paged_by_the_sdk_then_every_item_comes_once_newest_first(home: Home):
    file = home.upload(data=chat_lines(2))
    made = [home.job(file=file, metadata={"even": str(i % 2 == 0)} if i < 6 else {}) for i in range(7)]
    jobs = home.sdk().fine_tuning.jobs
    assert [job.id for job in jobs.list(limit=3)] == made[::-1]
    assert jobs.list(limit=7).has_more is False
    assert jobs.list(limit=6).has_more is True
    events = [event.id for event in jobs.list_events(made[0], limit=2)]
    assert len(set(events)) == 3
    home.upload(data=chat_lines(2))
    files = home.sdk().files
    ids = [f.id for f in files.list(limit=1)]
    assert len(ids) == 2
    assert [f.id for f in files.list(limit=1, order="asc")] == ids[::-1]
    assert files.list().to_dict()["first_id"] == ids[0]
    found = home.call("GET", "/v1/fine_tuning/jobs", params={"metadata[even]": "True"}).json()["data"]
    assert [job["id"] for job in found] == made[4::-2]
    none = home.call("GET", "/v1/fine_tuning/jobs", params={"metadata": "null"}).json()["data"]
    assert [job["id"] for job in none] == [made[6]]


@pytest.mark.parametrize("query", ["limit=0", "limit=101", "limit=x", "after=ftjob-none", "after=%00", 'metadata["]=x'])
def test_list_when_the_query_is_bad_then_4xx_in_openais_shape(home: Home, query: str):
    answer = home.call("GET", f"/v1/fine_tuning/jobs?{query}")
    assert answer.status_code in (400, 404)
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_submit_when_sent_by_many_threads_with_one_key_then_one_job(home: Home):
    file = home.upload(data=chat_lines(2))
    answers: dict[int, list[Any]] = {key: [] for key in range(4)}

    def submit(key: int) -> None:
        body = {"model": "tiny", "training_file": file, "seed": key}
        headers = {"idempotency-key": f"key-{key}"}
        answers[key].append(home.call("POST", "/v1/fine_tuning/jobs", json=body, headers=headers))

    threads = [threading.Thread(target=submit, args=(i % 4,)) for i in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert home.count(JOBS) == home.count(IDEMPOTENCY) == 4
    assert home.count(EVENTS) == 12
    for found in answers.values():
        assert [answer.status_code for answer in found] == [200] * 8
        assert len({answer.text for answer in found}) == 1


def test_submit_when_the_key_comes_with_another_body_then_409_and_no_retry(home: Home):
    file = home.upload(data=chat_lines(2))
    client = home.sdk(max_retries=2)
    options = {"model": "tiny", "training_file": file, "extra_headers": {"Idempotency-Key": "k"}}
    first = client.fine_tuning.jobs.create(**options)
    assert client.fine_tuning.jobs.create(**options).id == first.id
    with pytest.raises(openai.ConflictError) as refused:
        client.fine_tuning.jobs.create(**options, seed=9)
    assert refused.value.code == "idempotency_mismatch"
    assert refused.value.response.headers["x-should-retry"] == "false"
    # A key is its tenant's own.
    other = home.job("globex", extra_headers={"Idempotency-Key": "k"})
    assert other != first.id


def test_quota_when_used_up_then_429_with_the_arithmetic(home: Home):
    file = home.upload(data=chat_lines(2))
    home.limit("acme", max_active_jobs=2)
    first = home.job(file=file)
    home.job(file=file)
    with pytest.raises(openai.RateLimitError, match="2 of at most 2 jobs are active"):
        home.job(file=file)
    home.sdk().fine_tuning.jobs.cancel(first)
    home.finish(home.job(file=file))
    home.limit("acme", max_trained_tokens=120)
    with pytest.raises(openai.RateLimitError, match="120 tokens have been trained of at most 120"):
        home.job(file=file)
    home.limit("acme", max_trained_tokens=10_000, max_priority=5)
    assert home.job(file=file, extra_body={"priority": 5})


def test_integrations_when_the_server_has_none_then_400_reports_it(home: Home, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(openai.BadRequestError, match="has no Weights & Biases") as refused:
        home.job(integrations=[{"type": "wandb", "wandb": {"project": "p"}}])
    assert (refused.value.param, refused.value.code) == ("integrations", "unsupported_integration")


def test_tokens_when_many_jobs_come_at_once_then_together_they_stay_below_the_limit(home: Home):
    file = home.upload(data=chat_lines(8))
    planned = guess_tokens(JobSpec("j", ("t",), num_train_epochs=2, global_batch_size=1), 8, len(chat_lines(8)))
    home.limit("acme", max_trained_tokens=3 * planned)
    answers: list[Any] = []

    def submit(seed: int) -> None:
        body = {"model": "tiny", "training_file": file, "seed": seed, "hyperparameters": {"n_epochs": 2}}
        answers.append(home.call("POST", "/v1/fine_tuning/jobs", json=body))

    threads = [threading.Thread(target=submit, args=(i,)) for i in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answer.status_code for answer in answers) == [200] * 3 + [429] * 7
    refused = next(answer for answer in answers if answer.status_code == 429).json()["error"]
    assert f"{3 * planned:,} more are reserved by jobs that have not ended" in refused["message"]
    assert f"this job needs about {planned:,}" in refused["message"]
    made = next(answer.json()["id"] for answer in answers if answer.status_code == 200)
    home.sdk().fine_tuning.jobs.cancel(made)
    assert home.job(file=file, hyperparameters={"n_epochs": 2})


def test_job_when_it_starts_from_a_fine_tuned_model_then_reports_it_and_keeps_the_model(home: Home):
    model = home.finish(home.job())
    client = home.sdk()
    job = client.fine_tuning.jobs.create(model=model, training_file=home.upload(), suffix="more")
    assert job.model == model
    with home.database.read() as tx:
        row = get_job(tx, "acme", job.id)
    assert (row["model"], row["settings"]["init_adapter"]) == ("tiny", model)
    with pytest.raises(openai.BadRequestError, match=f"Job {job.id} starts from {model};"):
        client.models.delete(model)
    checkpoint = client.fine_tuning.jobs.create(model=f"{model}:ckpt-step-1", training_file=home.upload())
    assert checkpoint.model == f"{model}:ckpt-step-1"
    client.fine_tuning.jobs.cancel(job.id)
    with pytest.raises(openai.BadRequestError, match=f"Job {checkpoint.id} starts from {model}:ckpt-step-1;"):
        client.models.delete(model)
    client.fine_tuning.jobs.cancel(checkpoint.id)
    assert client.models.delete(model).deleted


def test_job_when_the_model_is_foreign_or_missing_then_the_same_400(home: Home):
    model = home.finish(home.job())
    file = home.upload("globex")
    texts = []
    for name in (model, "ft:tiny:acme:x:00000000", f"{model}:ckpt-step-1"):
        with pytest.raises(openai.BadRequestError) as refused:
            home.sdk("globex").fine_tuning.jobs.create(model=name, training_file=file)
        assert (refused.value.param, refused.value.code) == ("model", "model_not_found")
        texts.append(refused.value.message.replace(name, "<model>"))
    assert len(set(texts)) == 1


def test_job_when_the_backbone_of_its_model_is_offered_no_more_then_400(home: Home):
    model = home.finish(home.job())
    file = home.upload()
    home.app.state.service.settings = replace(home.settings, base_models={"other": "tiny"})
    with pytest.raises(openai.BadRequestError, match="cannot be fine-tuned here; use other"):
        home.sdk().fine_tuning.jobs.create(model=model, training_file=file)


@pytest.mark.parametrize("extra", [{"lora": {"r": 4}}, {"settings": {"adapter": {"r": 4}}}])
def test_job_when_it_starts_from_a_model_and_names_a_shape_then_400(home: Home, extra: dict[str, Any]):
    model = home.finish(home.job())
    with pytest.raises(openai.BadRequestError, match="keeps the shape of its adapter"):
        home.sdk().fine_tuning.jobs.create(model=model, training_file=home.upload(), extra_body=extra)


def test_rate_when_passed_then_429_reports_when_to_try_again(home: Home):
    home.limit("acme", max_requests_per_minute=3)
    statuses = [home.call("GET", "/v1/models").status_code for _ in range(4)]
    assert statuses == [200, 200, 200, 429]
    answer = home.call("GET", "/v1/models")
    assert 0 < int(answer.headers["retry-after"]) <= 20
    assert answer.json()["error"]["code"] == "rate_limit_exceeded"
    assert home.call("GET", "/v1/models", "globex").status_code == 200


def test_events_when_streamed_then_come_in_order_and_end_with_the_job(home: Home):
    id = home.job()
    seen: list[str] = []

    def work() -> None:
        with home.database.begin() as tx:
            add_event(tx, "acme", id, "info", "one step", "metrics", {"loss": 1.5})
        home.finish(id)

    timer = threading.Timer(0.5, work)
    timer.start()
    with home.http.stream("GET", f"/v1/fine_tuning/jobs/{id}/events?stream=true", headers=home.headers()) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        seen = [line for line in answer.iter_lines() if line.startswith("data: ")]
    timer.join()
    assert seen[0].count(f"Created fine-tuning job: {id}") == 1
    assert '"loss": 1.5' in seen[3]
    assert "successfully completed" in seen[-2]
    assert seen[-1] == "data: [DONE]"
    again = home.call("GET", f"/v1/fine_tuning/jobs/{id}/events?stream=true&limit=5")
    assert [line for line in again.text.splitlines() if line.startswith("data: ")] == seen
    assert home.call("GET", f"/v1/fine_tuning/jobs/{id}/events?stream=true&after=nope").status_code == 404
    assert home.call("GET", f"/v1/fine_tuning/jobs/{id}/events?stream=true", "globex").status_code == 404


def test_server_when_something_breaks_then_500_hides_it_and_names_the_request(
    home: Home, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("the secret reason")

    monkeypatch.setattr("weft.serve.db.files.list_models", broken)
    answer = home.call("GET", "/v1/models")
    assert answer.status_code == 500
    assert "secret reason" not in answer.text
    assert answer.json()["error"]["type"] == "server_error"
    assert answer.headers["x-request-id"] in caplog.text or any(
        getattr(r, "fields", {}).get("request") == answer.headers["x-request-id"] for r in caplog.records
    )


def test_server_when_it_is_stopping_then_takes_nothing_new_but_still_answers(home: Home):
    id = home.job()
    home.app.state.service.is_draining = True
    assert home.call("POST", f"/v1/fine_tuning/jobs/{id}/cancel").status_code == 503
    answer = home.call("POST", "/v1/files", files={"file": ("a", b"{}")}, data={"purpose": "fine-tune"})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "2")
    assert home.call("GET", f"/v1/fine_tuning/jobs/{id}").json()["status"] == "queued"


def test_database_when_locked_then_503_with_retry_after_and_reads_go_on(home: Home):
    id = home.job()
    home.database._lock_wait_s = 0.2
    other = sqlite3.connect(home.settings.data_dir / "weft.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    answer = home.call("POST", f"/v1/fine_tuning/jobs/{id}/cancel")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "busy")
    assert answer.headers["retry-after"] == "2"
    assert home.call("GET", f"/v1/fine_tuning/jobs/{id}").json()["status"] == "queued"
    other.execute("ROLLBACK")
    other.close()
    assert home.call("POST", f"/v1/fine_tuning/jobs/{id}/cancel").json()["status"] == "cancelled"


def test_urls_when_unknown_then_404_and_405_in_openais_shape(home: Home):
    for method, path, status in (("GET", "/v1/nothing", 404), ("PUT", "/v1/files", 405), ("GET", "/v1/files/", 404)):
        answer = home.call(method, path)
        assert answer.status_code == status
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def preference_lines(number: int) -> bytes:
    """Pairs of answers as OpenAI's files have them."""
    rows = [
        {
            "input": {"messages": [{"role": "user", "content": f"name {i}"}], "tools": [], "parallel_tool_calls": True},
            "preferred_output": [{"role": "assistant", "content": f"{i}!"}],
            "non_preferred_output": [{"role": "assistant", "content": "no"}],
        }
        for i in range(number)
    ]
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def test_job_when_the_method_is_dpo_then_its_pairs_and_beta_become_the_jobs_settings(home: Home):
    file = home.upload(data=preference_lines(12))
    given = {"type": "dpo", "dpo": {"hyperparameters": {"beta": 0.3, "n_epochs": 2}}}
    job = home.sdk().fine_tuning.jobs.create(model="tiny", training_file=file, method=given)
    assert job.method is not None and job.method.type == "dpo" and job.method.dpo is not None
    used = job.method.dpo.hyperparameters
    assert used is not None and (used.beta, used.n_epochs, used.batch_size) == (0.3, 2, 1)
    assert set(job.hyperparameters.model_dump(exclude_unset=True)) == {
        "n_epochs", "batch_size", "learning_rate_multiplier"
    }, "those of a method alone are in the method"  # fmt: skip
    assert job.settings["objective"] == "dpo" and job.settings["beta"] == 0.3  # type: ignore[attr-defined]


def test_job_when_beta_is_auto_then_it_is_the_usual_one(home: Home):
    file = home.upload(data=preference_lines(12))
    job = home.sdk().fine_tuning.jobs.create(model="tiny", training_file=file, method={"type": "dpo"})
    assert job.method is not None and job.method.dpo is not None and job.method.dpo.hyperparameters is not None
    assert job.method.dpo.hyperparameters.beta == 0.1
