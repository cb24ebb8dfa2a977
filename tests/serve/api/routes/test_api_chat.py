"""Chats and completions go to the worker that holds the backbone, and come back in OpenAI's words."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from service_home import ADAPTER, Home
from starlette.requests import ClientDisconnect

from weft.serve.api import chat_routes, pending_answers
from weft.serve.api.pending_answers import choose_worker
from weft.serve.db.files import get_model
from weft.serve.db.workers import put_worker, remove_worker

COUNTS = {"prompt_tokens": 5, "completion_tokens": 3}
CHAT = [{"role": "system", "content": "be kind"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]


class Worker:
    """A stand-in for a worker process, at its real boundary: HTTP."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.mode = "good"
        self.was_left = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                outer.asked.append({**body, "token": self.headers["x-weft-token"], "path": self.path})
                outer.reply(self, body)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def reply(self, handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        status = {"refuse": 400, "busy": 503, "wrong token": 401}.get(self.mode, 200)
        handler.send_response(status)
        handler.end_headers()
        if status != 200:
            handler.wfile.write(
                b'{"error": {"message": "the prompt is too long.", "code": "data", "param": "messages"}}'
            )
        elif self.mode == "garbage":
            handler.wfile.write(b"hello")
        elif not body["stream"]:
            answer = {"text": "well, hello", "done": True, "finish_reason": "length", **COUNTS}
            handler.wfile.write(json.dumps(answer).encode())
        elif self.mode == "endless":
            self.talk_until_left(handler)
        else:
            pieces = ["well", ", ", "hello"]
            for i, text in enumerate(pieces):
                done = i == len(pieces) - 1
                if self.mode == "dies" and done:
                    return
                answer = {"text": text, "done": done, "finish_reason": "stop" if done else None, **COUNTS}
                handler.wfile.write(f"data: {json.dumps(answer)}\n\n".encode())
                handler.wfile.flush()

    def talk_until_left(self, handler: BaseHTTPRequestHandler) -> None:
        try:
            while True:
                handler.wfile.write(b'data: {"text": "well", "done": false}\n\n')
        except ConnectionError:
            self.was_left.set()


@pytest.fixture
def worker(home: Home) -> Iterator[Worker]:
    """A live worker of the backbone `tiny`."""
    made = Worker()
    address = f"http://127.0.0.1:{made.server.server_port}"
    with home.database.begin() as tx:
        put_worker(tx, "w1", base_model="tiny", address=address, token="secret", info={"tokens_per_s": 12.5})
    yield made
    made.server.shutdown()
    made.server.server_close()


def test_chat_when_asked_then_the_adapter_of_the_model_answers(home: Home, worker: Worker):
    model = home.finish(home.job())
    answer = home.sdk().chat.completions.create(
        model=model, messages=CHAT, max_completion_tokens=9, temperature=0, top_p=0.5, seed=-1, stop="\n"
    )
    assert answer.choices[0].message.content == "well, hello"
    assert (answer.choices[0].finish_reason, answer.object, answer.model) == ("length", "chat.completion", model)
    assert answer.usage.total_tokens == 8
    (asked,) = worker.asked
    assert (asked["path"], asked["token"], asked["base"]) == ("/generate", "secret", "tiny")
    assert asked["messages"] == [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
    with home.blobs.open(asked["model_blob"]) as blob:
        assert blob.read() == ADAPTER
    assert (asked["max_tokens"], asked["temperature"], asked["top_p"], asked["stop"]) == (9, 0, 0.5, ["\n"])
    assert asked["seed"] == 2**32 - 1
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
    assert worker.asked[0]["model_blob"] is None
    assert home.call("GET", "/v1/usage").json()["completion_tokens"] == 3


def test_chat_when_a_developer_speaks_then_it_is_the_system_prompt_as_in_training_files(home: Home, worker: Worker):
    chat = [{"role": "developer", "content": "be kind"}, {"role": "user", "content": "hi"}]
    home.sdk().chat.completions.create(model="tiny", messages=chat)
    assert [turn["role"] for turn in worker.asked[0]["messages"]] == ["system", "user"]


def test_completion_when_asked_then_goes_on_with_the_text(home: Home, worker: Worker):
    answer = home.sdk().completions.create(model="tiny", prompt="once")
    assert (answer.choices[0].text, answer.object) == ("well, hello", "text_completion")
    chunks = list(home.sdk().completions.create(model="tiny", prompt="once", stream=True))
    assert "".join(c.choices[0].text for c in chunks) == "well, hello"
    assert [asked["prompt"] for asked in worker.asked] == ["once", "once"]


PROMPT_LISTS = {
    "texts": (["once", "twice", ""], ["once", "twice", ""]),
    "one list of tokens": ([5, 6, 7], [[5, 6, 7]]),
    "lists of tokens": ([[5, 6], [7]], [[5, 6], [7]]),
}


@pytest.mark.parametrize("name", PROMPT_LISTS)
def test_completion_when_it_has_a_list_of_prompts_then_each_has_its_choice_and_tokens_are_added_up(
    home: Home, worker: Worker, name: str
):
    prompt, asked = PROMPT_LISTS[name]
    answer = home.sdk().completions.create(model="tiny", prompt=prompt)
    # They are sent one after another and answered together, in any order.
    assert sorted(map(str, (question["prompt"] for question in worker.asked))) == sorted(map(str, asked))
    assert [choice.index for choice in answer.choices] == list(range(len(asked)))
    assert {(choice.text, choice.finish_reason) for choice in answer.choices} == {("well, hello", "length")}
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5 * len(asked), 3 * len(asked))
    assert home.call("GET", "/v1/usage").json()["prompt_tokens"] == 5 * len(asked)


def test_completion_when_a_list_of_prompts_is_streamed_then_every_chunk_says_whose_it_is(home: Home, worker: Worker):
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
    assert worker.asked == []


def test_chat_when_a_tool_was_asked_then_the_worker_hears_what_and_what_it_answered(home: Home, worker: Worker):
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ghent"}'}}
    chat = [
        {"role": "user", "content": "rain?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "no"},
    ]
    answer = home.sdk().chat.completions.create(model="tiny", messages=chat)
    assert answer.choices[0].message.content == "well, hello"
    assert worker.asked[0]["messages"] == [
        {"role": "user", "content": "rain?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "no", "tool_call_id": "call_1"},
    ]


def test_checkpoint_when_asked_then_answers_as_a_model(home: Home, worker: Worker):
    model = home.finish(home.job())
    home.sdk().chat.completions.create(model=f"{model}:ckpt-step-1", messages=CHAT)
    assert worker.asked[0]["model_blob"] is not None


@pytest.mark.parametrize(
    ("mode", "status"), [("refuse", 400), ("busy", 503), ("wrong token", 503), ("garbage", 503), ("gone", 503)]
)
def test_chat_when_the_worker_cannot_answer_then_an_error_in_openais_shape(
    home: Home, worker: Worker, mode: str, status: int
):
    worker.mode = mode
    if mode == "gone":
        worker.server.server_close()
    for stream in (False, True):
        body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "stream": stream}
        answer = home.call("POST", "/v1/chat/completions", json=body)
        assert answer.status_code == status
        assert ("retry-after" in answer.headers) == (status == 503)
        if mode == "refuse":
            assert answer.json()["error"]["message"] == "the prompt is too long."
    assert home.call("GET", "/v1/usage").json()["prompt_tokens"] == 0


def test_stream_when_the_worker_dies_in_the_middle_then_says_so_and_has_no_end_mark(home: Home, worker: Worker):
    worker.mode = "dies"
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "stream": True}
    text = home.call("POST", "/v1/chat/completions", json=body).text
    assert "went away" in text
    assert "[DONE]" not in text
    with pytest.raises(openai.APIError, match="went away"):
        list(home.sdk().chat.completions.create(model="tiny", messages=CHAT, stream=True))


@pytest.mark.parametrize("asgi", ["2.3", "2.4"])
def test_stream_when_its_reader_goes_away_then_the_worker_is_hung_up_on(home: Home, worker: Worker, asgi: str):
    """Servers tell it by a message before ASGI 2.4 and by a failing send since."""
    worker.mode = "endless"
    left = asyncio.Event()

    async def receive() -> dict[str, Any]:
        if not asked:
            asked.append(json.dumps({"model": "tiny", "messages": CHAT, "stream": True}).encode())
            return {"type": "http.request", "body": asked[0]}
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.body":
            left.set()
            if asgi == "2.4":
                raise OSError("gone")

    asked: list[bytes] = []
    headers = [(name.encode(), value.encode()) for name, value in home.headers().items()]
    scope = {"type": "http", "asgi": {"version": "3.0", "spec_version": asgi}, "http_version": "1.1", "method": "POST"}
    scope |= {"scheme": "http", "path": "/v1/chat/completions", "query_string": b"", "headers": headers}
    with contextlib.suppress(ClientDisconnect):
        asyncio.run(home.app(scope, receive, send))
    assert worker.was_left.wait(60)


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


@pytest.fixture
def frozen(monkeypatch) -> Iterator[str]:
    """The address of a worker that accepts connections and answers nothing."""
    monkeypatch.setattr(chat_routes, "SILENT_S", 0.1)
    monkeypatch.setattr(pending_answers, "PROBE_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


@pytest.mark.parametrize("stream", [False, True])
def test_chat_when_its_worker_is_frozen_then_another_answers_and_the_next_chat_does_not_try_it(
    home: Home, worker: Worker, frozen: str, stream: bool
):
    model = home.finish(home.job())
    with home.database.begin() as tx:
        blob = get_model(tx, "acme", model)["blob"]
        put_worker(tx, "w0", base_model="tiny", address=frozen, token="x", info={"adapters": [blob]})
    body = {"model": model, "messages": [{"role": "user", "content": "x"}], "stream": stream}
    for number in (1, 2):
        answer = home.call("POST", "/v1/chat/completions", json=body)
        assert answer.status_code == 200 and "well" in answer.text
        assert len(worker.asked) == number
        assert list(home.app.state.service.silent_workers) == ["w0"]


def test_chat_when_its_only_worker_is_frozen_then_503(home: Home, frozen: str):
    with home.database.begin() as tx:
        put_worker(tx, "w0", base_model="tiny", address=frozen, token="x", info={})
    answer = home.call("POST", "/v1/chat/completions", json={"model": "tiny", "messages": CHAT})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "worker_lost")


HUNG = {"trainer_silent_s": 60.0}


def test_chat_when_the_training_of_a_worker_hangs_then_another_answers_and_without_one_503(home: Home, worker: Worker):
    """A worker whose training hangs answers `/alive`; so its row decides."""
    with home.database.begin() as tx:
        put_worker(tx, "w0", base_model="tiny", address="http://127.0.0.1:1", token="x", info=HUNG)
    body = {"model": "tiny", "messages": CHAT}
    for _ in range(8):
        assert home.call("POST", "/v1/chat/completions", json=body).status_code == 200
    with home.database.begin() as tx:
        remove_worker(tx, "w1")
    answer = home.call("POST", "/v1/chat/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "worker_unavailable")


@pytest.mark.parametrize("stream", [False, True])
def test_chat_when_the_training_of_its_worker_comes_to_hang_then_503(home: Home, frozen: str, stream: bool):
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            with home.database.begin() as tx:
                put_worker(tx, "w0", base_model="tiny", address=address, token="x", info=HUNG)
            self.connection.recv(1)

        def do_GET(self) -> None:
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    address = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    with home.database.begin() as tx:
        put_worker(tx, "w0", base_model="tiny", address=address, token="x", info={})
    try:
        body = {"model": "tiny", "messages": CHAT, "stream": stream}
        assert home.call("POST", "/v1/chat/completions", json=body).status_code == 503
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("mode", ["busy", "gone"])
def test_chat_when_one_worker_cannot_answer_then_another_does(home: Home, worker: Worker, mode: str):
    worker.mode = mode
    if mode == "gone":
        worker.server.server_close()
    other = Worker()
    address = f"http://127.0.0.1:{other.server.server_port}"
    with home.database.begin() as tx:
        put_worker(tx, "w2", base_model="tiny", address=address, token="secret", info={})
    try:
        for _ in range(8):
            answer = home.call("POST", "/v1/chat/completions", json={"model": "tiny", "messages": CHAT})
            assert answer.status_code == 200
    finally:
        other.server.shutdown()
        other.server.server_close()


def test_chat_when_its_client_goes_away_then_the_worker_is_hung_up_on(home: Home, frozen: str):
    """Also while nothing is streamed and the worker lives."""
    hung_up = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            asked.set()
            if not self.connection.recv(1):
                hung_up.set()

        def do_GET(self) -> None:
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    async def receive() -> dict[str, Any]:
        if not bodies:
            bodies.append(json.dumps({"model": "tiny", "messages": CHAT}).encode())
            return {"type": "http.request", "body": bodies[0]}
        while not asked.is_set():
            await asyncio.sleep(0.01)
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        raise AssertionError("there is no one to answer")

    asked, bodies = threading.Event(), []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    with home.database.begin() as tx:
        address = f"http://127.0.0.1:{server.server_port}"
        put_worker(tx, "w0", base_model="tiny", address=address, token="x", info={})
    headers = [(name.encode(), value.encode()) for name, value in home.headers().items()]
    scope = {"type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "method": "POST"}
    scope |= {"scheme": "http", "path": "/v1/chat/completions", "query_string": b"", "headers": headers}
    try:
        asyncio.run(home.app(scope, receive, send))
        assert hung_up.wait(60)
    finally:
        server.shutdown()
        server.server_close()


def test_chat_when_no_worker_is_there_then_503_with_retry_after(home: Home):
    with pytest.raises(openai.InternalServerError) as refused:
        home.sdk().chat.completions.create(model="tiny", messages=CHAT)
    assert refused.value.status_code == 503
    assert refused.value.response.headers["retry-after"] == "5"


BAD = [
    {"messages": []},
    {"messages": [{"role": "king", "content": "x"}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]},
    {"messages": [{"role": "user"}]},
    {"n": 2},
    {"temperature": 3},
    {"temperature": -1},
    {"top_p": 0},
    {"max_tokens": 0},
    {"max_tokens": 10**9},
    {"tools": [{"type": "function"}]},
    {"response_format": {"type": "json_object"}},
    {"stop": ["a"] * 5},
    {"model": "ft:tiny:acme::nothing"},
]


NOT_HERE = {
    "tools": [{"type": "function"}],
    "functions": [{"name": "f"}],
    "logprobs": True,
    "frequency_penalty": 1.0,
    "logit_bias": {"5": 1},
    "web_search_options": {},
}


@pytest.mark.parametrize("name", NOT_HERE)
def test_chat_when_a_field_is_not_served_then_one_sentence_says_so_and_nothing_is_passed_over(
    home: Home, worker: Worker, name: str
):
    with pytest.raises(openai.BadRequestError) as refused:
        home.sdk().chat.completions.create(model="tiny", messages=CHAT, extra_body={name: NOT_HERE[name]})
    assert refused.value.body["message"] == f"'{name}' is not available here. Leave it out."
    assert (refused.value.param, refused.value.code) == (name, "unsupported_parameter")
    assert worker.asked == []


def test_chat_when_fields_ask_for_nothing_or_change_nothing_then_they_are_taken(home: Home, worker: Worker):
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
    assert len(worker.asked) == 2


SENTENCES = [
    ({"n": 2}, "Invalid value for 'n': got 2; only 1 is available here. Leave it out."),
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
def test_chat_when_the_body_is_bad_then_4xx_and_the_worker_is_not_asked(
    home: Home, worker: Worker, change: dict[str, Any]
):
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], **change}
    answer = home.call("POST", "/v1/chat/completions", json=body)
    assert answer.status_code == (404 if "model" in change else 400)
    assert worker.asked == []


def test_prompts_when_the_adapter_is_loaded_somewhere_then_that_worker_is_asked():
    """Elsewhere it would have to be loaded first; where it is loaded nowhere, its name decides, always the same."""
    rows = [{"id": f"w{i}", "base_model": "tiny", "address": "http://x", "is_draining": False} for i in range(4)]
    able = [{**row, "info": {"adapters": ["aa/1"] if row["id"] == "w2" else []}} for row in rows]
    assert {choose_worker(able, "tiny", "aa/1")["id"] for _ in range(9)} == {"w2"}
    assert len({choose_worker(able, "tiny", "bb/2")["id"] for _ in range(9)}) == 1
    assert len({choose_worker(able, "tiny", f"cc/{i}")["id"] for i in range(40)}) == 4, "adapters are spread"
    leaving = [{**row, "is_draining": row["id"] == "w2"} for row in able]
    assert choose_worker(leaving, "tiny", "aa/1")["id"] != "w2"
