"""Every number that a request may hold has two ends, and no number, however large, is an error of the server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from service_home import Home

from weft.serve.api.requests import BODIES

WILD = ("1e30", "-1e30", "1e300", "1e400", "-1e400", "0", "-1", "0.5", "9" * 30, f"-{'9' * 300}", f"{2**63}", "true")
"""As they are written in JSON: 1e400 is infinity to Python."""
CREATE = {
    "/v1/fine_tuning/jobs": {"model": "tiny"},
    "/v1/uploads": {"bytes": 10, "filename": "a", "mime_type": "b", "purpose": "fine-tune"},
    "/v1/chat/completions": {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"model": "tiny", "prompt": "hi"},
}
JOB_PATHS = (
    "seed", "priority", "max_steps", "max_length", "n", "hyperparameters.n_epochs", "hyperparameters.batch_size",
    "hyperparameters.learning_rate_multiplier", "method.supervised.hyperparameters.n_epochs", "lora.r", "lora.alpha",
    "lora.dropout", "lora.rank_pattern.q_proj", "lora.alpha_pattern.q_proj", "lora.layers_to_transform",
    "settings.learning_rate", "settings.warmup_steps", "settings.num_train_epochs", "settings.max_steps",
    "settings.global_batch_size", "settings.per_device_train_batch_size", "settings.gradient_accumulation_steps",
    "settings.weight_decay", "settings.adam_beta1", "settings.adam_epsilon", "settings.max_grad_norm",
    "settings.loraplus_lr_ratio", "settings.max_length", "settings.eval_steps", "settings.early_stopping_patience",
    "settings.save_steps", "settings.save_minutes", "settings.save_total_limit", "settings.logging_steps",
)  # fmt: skip
CHAT_PATHS = (
    "max_tokens", "max_completion_tokens", "temperature", "top_p", "seed", "n", "frequency_penalty", "presence_penalty",
    "logit_bias", "logit_bias.5", "top_k", "min_p", "repetition_penalty", "stop_token_ids", "top_logprobs", "stop",
)  # fmt: skip


def numbers_of(schema: Any, where: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema of a number inside a schema, with the way to it."""
    if isinstance(schema, dict):
        if schema.get("type") in ("integer", "number") and "const" not in schema:
            yield where, schema
        for key, inner in schema.items():
            yield from numbers_of(inner, f"{where}.{key}")
    elif isinstance(schema, list):
        for i, inner in enumerate(schema):
            yield from numbers_of(inner, f"{where}.{i}")


def is_bounded(schema: dict[str, Any]) -> bool:
    ends = [{"minimum", "exclusiveMinimum"} & schema.keys(), {"maximum", "exclusiveMaximum"} & schema.keys()]
    return all(ends)


def test_numbers_when_all_bodies_and_parameters_are_walked_then_each_has_two_ends(home: Home):
    """A number without an end somewhere is a mistake."""
    schema = home.app.openapi()
    found = [("bodies", *pair) for pair in numbers_of(schema["components"]["schemas"])]
    assert {body.__name__ for body in BODIES} <= schema["components"]["schemas"].keys()
    for path, operations in schema["paths"].items():
        for method, operation in operations.items():
            inputs = {"parameters": operation.get("parameters", []), "body": operation.get("requestBody", {})}
            found += [(f"{method} {path}", *pair) for pair in numbers_of(inputs)]
    assert len(found) > 20
    assert [(name, where) for name, where, number in found if not is_bounded(number)] == []


def body_with(base: dict[str, Any], path: str, number: str) -> str:
    """A body as text, because no JSON writer writes 1e400; the number is put where a mark stands."""
    body = json.loads(json.dumps(base))
    *outer, last = path.split(".")
    inner = body
    for name in outer:
        inner = inner.setdefault(name, {"type": "supervised"} if name == "method" else {})
    inner[last] = "THE NUMBER"
    return json.dumps(body).replace('"THE NUMBER"', number)


def request_paths() -> list[tuple[str, str]]:
    jobs, chat = "/v1/fine_tuning/jobs", ("/v1/chat/completions", "/v1/completions")
    return [
        *((jobs, path) for path in JOB_PATHS),
        *((route, path) for route in chat for path in CHAT_PATHS),
        ("/v1/uploads", "bytes"),
        ("/v1/uploads", "expires_after.seconds"),
    ]


@pytest.mark.parametrize(("route", "path"), request_paths())
def test_body_when_a_number_is_wild_then_it_is_taken_or_refused_but_no_error_of_ours(home: Home, route: str, path: str):
    """Whatever number a client writes where a number belongs, the answer is about the request."""
    base = dict(CREATE[route])
    if "jobs" in route:
        base["training_file"] = home.upload()
    for number in WILD:
        answer = home.http.post(
            route, content=body_with(base, path, number), headers={**home.headers(), "content-type": "application/json"}
        )
        is_no_worker = answer.status_code == 503 and answer.json()["error"]["code"] == "no_worker"
        assert answer.status_code < 500 or is_no_worker, (number, answer.text)


@pytest.mark.parametrize(
    "path",
    [
        "/v1/fine_tuning/jobs?limit={}", "/v1/files?limit={}", "/v1/usage?start_time={}", "/v1/usage?end_time={}",
        "/dashboard/overview?months={}", "/v1/fine_tuning/jobs/{}", "/v1/files/{}",
        "/v1/fine_tuning/jobs/{}/events", "/v1/fine_tuning/jobs?after={}", "/v1/files?after={}",
    ],
)  # fmt: skip
def test_parameter_when_a_number_is_wild_then_it_is_taken_or_refused_but_no_error_of_ours(home: Home, path: str):
    """The same for what stands in an address."""
    for number in (*WILD, "nan", "inf", "%00"):
        answer = home.call("GET", path.format(number))
        assert answer.status_code < 500, (number, answer.text)
