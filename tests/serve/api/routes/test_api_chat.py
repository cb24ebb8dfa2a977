"""Chats and completions go to the worker that holds the backbone, and come back in OpenAI's words."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from chat_worker import CHAT, Worker
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from service_home import ADAPTER, Home

from weft.serve.db import files
from weft.serve.db.jobs import move, update_job


def test_chat_when_requested_then_the_adapter_of_the_model_answers(home: Home, worker: Worker):
    model = home.finish(home.job())
    answer = home.sdk().chat.completions.create(
        model=model, messages=CHAT, max_completion_tokens=9, temperature=0, top_p=0.5, seed=-1, stop="\n"
    )
    assert answer.choices[0].message.content == "well, hello"
    assert (answer.choices[0].finish_reason, answer.object, answer.model) == ("length", "chat.completion", model)
    assert answer.usage.total_tokens == 8
    (sent,) = worker.requests
    assert (sent["path"], sent["token"], sent["base"]) == ("/generate", "secret", "tiny")
    assert sent["messages"] == [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
    with home.blobs.open(sent["model_blob"]) as blob:
        assert blob.read() == ADAPTER
    assert (sent["max_tokens"], sent["temperature"], sent["top_p"], sent["stop"]) == (9, 0, 0.5, ["\n"])
    assert sent["seed"] == 2**32 - 1
    usage = home.call("GET", "/v1/usage").json()
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (5, 3)


def test_chat_when_streamed_then_the_sdk_joins_the_pieces(home: Home, worker: Worker):
    options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(home.sdk().chat.completions.create(model="tiny", messages=CHAT, **options))
    texts = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    assert "".join(texts) == "well, hello"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage.completion_tokens == 3
    assert worker.requests[0]["model_blob"] is None
    assert home.call("GET", "/v1/usage").json()["completion_tokens"] == 3


def test_chat_when_a_developer_speaks_then_it_is_the_system_prompt_as_in_training_files(home: Home, worker: Worker):
    chat = [{"role": "developer", "content": "be kind"}, {"role": "user", "content": "hi"}]
    home.sdk().chat.completions.create(model="tiny", messages=chat)
    assert [turn["role"] for turn in worker.requests[0]["messages"]] == ["system", "user"]


def test_completion_when_requested_then_goes_on_with_the_text(home: Home, worker: Worker):
    answer = home.sdk().completions.create(model="tiny", prompt="once")
    assert (answer.choices[0].text, answer.object) == ("well, hello", "text_completion")
    chunks = list(home.sdk().completions.create(model="tiny", prompt="once", stream=True))
    assert "".join(c.choices[0].text for c in chunks) == "well, hello"
    assert [sent["prompt"] for sent in worker.requests] == ["once", "once"]


PROMPT_LISTS = {
    "texts": (["once", "twice", ""], ["once", "twice", ""]),
    "one list of tokens": ([5, 6, 7], [[5, 6, 7]]),
    "lists of tokens": ([[5, 6], [7]], [[5, 6], [7]]),
}


@pytest.mark.parametrize("name", PROMPT_LISTS)
def test_completion_when_it_has_a_list_of_prompts_then_each_has_its_choice_and_tokens_are_added_up(
    home: Home, worker: Worker, name: str
):
    prompt, sent = PROMPT_LISTS[name]
    answer = home.sdk().completions.create(model="tiny", prompt=prompt)
    # They are sent one after another and answered together, in any order.
    assert sorted(map(str, (question["prompt"] for question in worker.requests))) == sorted(map(str, sent))
    assert [choice.index for choice in answer.choices] == list(range(len(sent)))
    assert {(choice.text, choice.finish_reason) for choice in answer.choices} == {("well, hello", "length")}
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5 * len(sent), 3 * len(sent))
    assert home.call("GET", "/v1/usage").json()["prompt_tokens"] == 5 * len(sent)


def test_completion_when_a_list_of_prompts_is_streamed_then_every_chunk_has_its_index(home: Home, worker: Worker):
    options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(home.sdk().completions.create(model="tiny", prompt=["a", "b"], **options))
    texts = {0: "", 1: ""}
    for chunk in chunks[:-1]:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == {0: "well, hello", 1: "well, hello"}
    ends = [chunk.choices[0].index for chunk in chunks[:-1] if chunk.choices[0].finish_reason]
    assert sorted(ends) == [0, 1]
    assert (chunks[-1].choices, chunks[-1].usage.total_tokens) == ([], 16)


def test_completion_when_one_of_its_prompts_is_refused_then_all_are_and_nothing_is_counted(home: Home, worker: Worker):
    worker.mode = "refuse"
    with pytest.raises(openai.BadRequestError, match="too long"):
        home.sdk().completions.create(model="tiny", prompt=["a", "b"])
    assert home.call("GET", "/v1/usage").json()["prompt_tokens"] == 0


@pytest.mark.parametrize("prompt", [[], [[]], ["a"] * 21, [1, "a"], [-1], [2**31], [1.5], {"a": 1}, [["a"]], None])
def test_completion_when_its_prompts_are_none_of_openais_then_400(home: Home, worker: Worker, prompt: Any):
    answer = home.call("POST", "/v1/completions", json={"model": "tiny", "prompt": prompt})
    assert (answer.status_code, answer.json()["error"]["param"].split(".")[0]) == (400, "prompt")
    assert worker.requests == []


SETTINGS: dict[str, Any] = {
    "presence_penalty": 0.5,
    "frequency_penalty": -1.0,
    "logit_bias": {"5": -100},
    "min_p": 0.1,
    "repetition_penalty": 1.2,
    "stop_token_ids": [7, 8],
}


def test_completions_when_settings_of_sampling_are_given_then_the_worker_gets_them(home: Home, worker: Worker):
    for fields in (
        {"path": "/v1/chat/completions", "messages": [{"role": "user", "content": "x"}]},
        {"path": "/v1/completions", "prompt": "x"},
    ):
        path = fields.pop("path")
        body = {"model": "tiny", **fields, **SETTINGS, "top_k": -1, "stop": ["a", "b"]}
        assert home.call("POST", path, json=body).status_code == 200
        sent = worker.requests[-1]
        assert {name: sent[name] for name in SETTINGS} == SETTINGS
        assert (sent["top_k"], sent["stop"], sent["logprobs"]) == (0, ["a", "b"], None)


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FORMATS = {
    "text": ({"type": "text"}, (None, None)),
    "object": ({"type": "json_object"}, ({"type": "object"}, None)),
    "schema": ({"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}, (SCHEMA, False)),
    "strict": ({"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}, (SCHEMA, True)),
}


@pytest.mark.parametrize("name", FORMATS)
def test_chat_when_a_response_format_is_given_then_the_worker_gets_its_schema(home: Home, worker: Worker, name: str):
    wanted, (schema, is_strict) = FORMATS[name]
    home.sdk().chat.completions.create(model="tiny", messages=CHAT, response_format=wanted)
    assert (worker.requests[0].get("json_schema"), worker.requests[0].get("is_strict")) == (schema, is_strict)


def test_chat_when_several_answers_are_wanted_then_each_has_a_seed_and_the_prompt_counts_once(
    home: Home, worker: Worker
):
    def seeds(**options: Any) -> set[int]:
        del worker.requests[:]
        answer = home.sdk().chat.completions.create(model="tiny", messages=CHAT, n=3, **options)
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 9)
        return {sent["seed"] for sent in worker.requests}

    assert seeds(seed=7) == seeds(seed=7) >= {7}
    assert len(seeds(seed=7)) == len(seeds()) == 3
    chunks = list(home.sdk().chat.completions.create(model="tiny", messages=CHAT, n=2, stream=True))
    texts = {0: "", 1: ""}
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == {0: "well, hello", 1: "well, hello"}
    assert [c.choices[0].index for c in chunks if c.choices[0].delta.role] == [0, 1]


def test_completion_when_prompts_have_several_answers_then_they_come_prompt_by_prompt_up_to_the_most(
    home: Home, worker: Worker
):
    answer = home.sdk().completions.create(model="tiny", prompt=["a", "b"], n=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert sorted(sent["prompt"] for sent in worker.requests) == ["a", "a", "b", "b"]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (10, 12)
    with pytest.raises(openai.BadRequestError, match="3 prompts with 7 answers each are 21; use at most 20") as refused:
        home.sdk().completions.create(model="tiny", prompt=["a", "b", "c"], n=7)
    assert refused.value.param == "n"


def test_chat_when_logprobs_are_wanted_then_they_come_whole_and_in_pieces(home: Home, worker: Worker):
    options: dict[str, Any] = {"model": "tiny", "messages": CHAT, "logprobs": True, "top_logprobs": 2}
    answer = home.sdk().chat.completions.create(**options)
    (token,) = answer.choices[0].logprobs.content
    assert (token.token, token.logprob, token.bytes) == ("well", -0.5, list(b"well"))
    assert [(top.token, top.logprob) for top in token.top_logprobs] == [("well", -0.5), (" bad", -2.0)]
    chunks = list(home.sdk().chat.completions.create(**options, stream=True))
    found = [c.choices[0].logprobs.content for c in chunks if c.choices[0].logprobs]
    assert found == [answer.choices[0].logprobs.content]
    assert [sent["logprobs"] for sent in worker.requests] == [2, 2]
    plain = home.sdk().chat.completions.create(model="tiny", messages=CHAT)
    assert plain.choices[0].logprobs is None and worker.requests[-1]["logprobs"] is None


def test_completion_when_logprobs_and_echo_are_wanted_then_columns_come(home: Home, worker: Worker):
    answer = home.sdk().completions.create(model="tiny", prompt="x", logprobs=1, echo=True)
    found = answer.choices[0].logprobs
    assert (found.tokens, found.token_logprobs, found.text_offset) == (["well"], [-0.5], [0])
    assert found.top_logprobs == [{"well": -0.5}]
    assert (worker.requests[0]["echo"], worker.requests[0]["logprobs"]) == (True, 1)


def test_chat_when_a_tool_was_called_then_the_worker_gets_the_call_and_its_result(home: Home, worker: Worker):
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ghent"}'}}
    chat = [
        {"role": "user", "content": "rain?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "no"},
    ]
    answer = home.sdk().chat.completions.create(model="tiny", messages=chat)
    assert answer.choices[0].message.content == "well, hello"
    assert worker.requests[0]["messages"] == [
        {"role": "user", "content": "rain?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "no", "tool_call_id": "call_1"},
    ]


def test_checkpoint_when_requested_then_answers_as_a_model(home: Home, worker: Worker):
    model = home.finish(home.job())
    home.sdk().chat.completions.create(model=f"{model}:ckpt-step-1", messages=CHAT)
    assert worker.requests[0]["model_blob"] is not None


def test_answers_when_read_by_the_types_of_the_sdk_then_fit_them_and_every_chunk_has_its_fields(
    home: Home, worker: Worker
):
    kinds = {"chat/completions": {"messages": [{"role": "user", "content": "x"}]}, "completions": {"prompt": "x"}}
    types: dict[str, tuple[Any, Any]] = {
        "chat/completions": (ChatCompletion, ChatCompletionChunk),
        "completions": (Completion, Completion),
    }
    fingerprints = set()
    for path, question in kinds.items():
        body = {"model": "tiny", **question}
        whole, piece = types[path]
        fingerprints.add(whole.model_validate(home.call("POST", f"/v1/{path}", json=body).json()).system_fingerprint)
        for options in ({}, {"stream_options": {"include_usage": True}}):
            text = home.call("POST", f"/v1/{path}", json={**body, "stream": True, **options}).text
            *chunks, end = [line.removeprefix("data: ") for line in text.splitlines() if line]
            assert end == "[DONE]"
            values = [json.loads(chunk) for chunk in chunks]
            if piece is ChatCompletionChunk:
                assert [piece.model_validate(value) for value in values]
            fingerprints |= {value["system_fingerprint"] for value in values}
            assert all("logprobs" in choice for value in values for choice in value["choices"])
            if options:
                assert [value["usage"] for value in values[:-1]] == [None] * (len(values) - 1)
                assert values[-1]["usage"]["total_tokens"] == 8
            else:
                assert not any("usage" in value for value in values)
    assert len(fingerprints) == 1 and next(iter(fingerprints)).startswith("fp_")


BAD = [
    {"messages": []},
    {"messages": [{"role": "king", "content": "x"}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]},
    {"messages": [{"role": "user"}]},
    {"n": 0},
    {"n": 21},
    {"presence_penalty": -3},
    {"frequency_penalty": "much"},
    {"logit_bias": {"warp": 1}},
    {"logit_bias": {"5": 101}},
    {"logprobs": 2},
    {"logprobs": True, "top_logprobs": 21},
    {"top_logprobs": 2},
    {"top_k": -2},
    {"min_p": 1.5},
    {"repetition_penalty": 0},
    {"stop_token_ids": [-1]},
    {"temperature": 3},
    {"temperature": -1},
    {"top_p": 0},
    {"max_tokens": 0},
    {"max_tokens": 10**9},
    {"tools": [{"type": "function"}]},
    {"response_format": {"type": "xml"}},
    {"response_format": {"type": "json_schema"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"a": "x" * 2**16}}}},
    {"stop": ["a"] * 5},
    {"model": "ft:tiny:acme::nothing"},
]


NOT_HERE = {
    "tools": [{"type": "function"}],
    "functions": [{"name": "f"}],
    "web_search_options": {},
}


@pytest.mark.parametrize("name", NOT_HERE)
def test_chat_when_a_field_is_not_served_then_refused_in_one_sentence_and_never_ignored(
    home: Home, worker: Worker, name: str
):
    with pytest.raises(openai.BadRequestError) as refused:
        home.sdk().chat.completions.create(model="tiny", messages=CHAT, extra_body={name: NOT_HERE[name]})
    assert refused.value.body["message"] == f"'{name}' is not available here. Leave it out."
    assert (refused.value.param, refused.value.code) == (name, "unsupported_parameter")
    assert worker.requests == []


def test_chat_when_fields_request_nothing_or_change_nothing_then_they_are_taken(home: Home, worker: Worker):
    """What clients send by habit."""
    habits = {
        "tools": [],
        "tool_choice": "auto",
        "n": 1,
        "frequency_penalty": 0.0,
        "logprobs": False,
        "logit_bias": None,
    }
    habits |= {"response_format": {"type": "text"}, "modalities": ["text"], "user": "me", "store": True, "metadata": {}}
    habits |= {"parallel_tool_calls": True, "service_tier": "auto", "reasoning_effort": "low", "max_tokens": 5}
    home.sdk().chat.completions.create(model="tiny", messages=CHAT, extra_body=habits)
    home.sdk().completions.create(model="tiny", prompt="x", best_of=1, echo=False, suffix="", user="me", n=1)
    assert len(worker.requests) == 2


SENTENCES = [
    ({"n": 21}, "Invalid value for 'n': got 21; use at most 20."),
    ({"frequency_penalty": -2.5}, "Invalid value for 'frequency_penalty': got -2.5; use at least -2."),
    ({"logit_bias": {"a": 1}}, "Invalid value for 'logit_bias': got 'a'; use the id of a token."),
    ({"logit_bias": {"5": 200}}, "Invalid value for 'logit_bias.5': got 200; use at most 100."),
    (
        {"logit_bias": {str(i): 1 for i in range(1025)}},
        "Invalid value for 'logit_bias': got an object of 1,025; use at most 1,024.",
    ),
    ({"top_logprobs": 2}, "Invalid value for 'top_logprobs': needs 'logprobs' to be true."),
    (
        {"response_format": {"type": "json_schema"}},
        "Missing required parameter: 'response_format.json_schema'.",
    ),
    ({"top_k": -2}, "Invalid value for 'top_k': got -2; use at least -1."),
    ({"repetition_penalty": 0}, "Invalid value for 'repetition_penalty': got 0; use more than 0."),
    ({"max_token": 5}, "Unrecognized request argument supplied: max_token. Did you mean max_tokens?"),
    ({"path": 5}, "Unrecognized request argument supplied: path"),
    ({"temperature": 3}, "Invalid value for 'temperature': got 3; use at most 2."),
    ({"stop": ["a"] * 5}, "Invalid value for 'stop': got a list of 5; use at most 4."),
    ({"stop": 5}, "Invalid value for 'stop': got 5; use text or a list."),
    ({"stream": "yes"}, "Invalid value for 'stream': got 'yes'; use true or false."),
    ({"messages": "hi"}, "Invalid value for 'messages': got 'hi'; use a list."),
    ({"messages": []}, "Invalid value for 'messages': got a list of 0; use at least 1."),
    ({"messages": [{"role": "user"}]}, "Missing required parameter: 'messages.0.content'."),
    (
        {"messages": [{"role": "king", "content": "x"}]},
        "Invalid value for 'messages.0.role': got 'king'; use 'system', 'developer', 'user', 'assistant' or 'tool'.",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "Invalid value for 'messages.0.content.0.type': got 'image_url'; use 'text'.",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "Missing required parameter: 'messages.0.content.0.text'.",
    ),
    ({"max_completion_tokens": 9999}, "Invalid value for 'max_completion_tokens': got 9999; use at most 4,096."),
]


@pytest.mark.parametrize(("change", "sentence"), SENTENCES)
def test_chat_when_a_field_is_wrong_then_the_sentence_has_what_we_got_and_what_we_accept(
    home: Home, change: dict[str, Any], sentence: str
):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], **change}
    error = home.call("POST", "/v1/chat/completions", json=body).json()["error"]
    assert error["message"] == sentence and f"{error['param']}" in sentence


@pytest.mark.parametrize("change", BAD)
def test_chat_when_the_body_is_bad_then_4xx_and_the_worker_gets_no_request(
    home: Home, worker: Worker, change: dict[str, Any]
):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], **change}
    answer = home.call("POST", "/v1/chat/completions", json=body)
    assert answer.status_code == (404 if "model" in change else 400)
    assert worker.requests == []


def test_chat_with_a_job_when_it_runs_then_goes_to_its_worker_and_later_to_its_model(home: Home, worker: Worker):
    job = home.job()
    name = files.model_name("tiny", "acme", None, job)
    body = {"model": job, "messages": CHAT}
    refused = home.call("POST", "/v1/chat/completions", json=body)
    assert refused.status_code == 400 and "is queued" in refused.json()["error"]["message"]
    with home.database.begin() as tx:
        move(tx, "acme", job, "running", fence=0, worker="w1")
    for model in (job, name):
        assert home.call("POST", "/v1/chat/completions", json={**body, "model": model}).status_code == 200
        assert worker.requests[-1]["model_blob"] == f"job:{job}@0"
        for tenant, status in (("globex", 404), ("acme", 200)):
            answer = home.call("POST", "/v1/chat/completions", tenant, json={**body, "model": model})
            assert answer.status_code == status
    file = home.upload()
    early = home.call("POST", "/v1/fine_tuning/jobs", json={"model": name, "training_file": file})
    assert early.status_code == 400, "there is no model yet that a job could start from"
    with home.database.begin() as tx:
        update_job(tx, "acme", job, fence=0, worker="gone")
    assert home.call("POST", "/v1/chat/completions", json=body).status_code == 503
