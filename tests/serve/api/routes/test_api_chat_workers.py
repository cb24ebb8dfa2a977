"""Workers that cannot answer a chat: refusals, lost and frozen ones, clients that go away."""

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
from chat_worker import CHAT, Worker
from service_home import Home
from starlette.requests import ClientDisconnect

from weft.serve.api import chat_routes, pending_answers
from weft.serve.api.pending_answers import choose_worker
from weft.serve.db.adapters import short_name
from weft.serve.db.files import get_model
from weft.serve.db.workers import put_worker, remove_worker


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


def test_stream_when_the_worker_dies_in_the_middle_then_reports_it_and_has_no_end_mark(home: Home, worker: Worker):
    worker.mode = "dies"
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "stream": True}
    text = home.call("POST", "/v1/chat/completions", json=body).text
    assert "went away" in text
    assert "[DONE]" not in text
    with pytest.raises(openai.APIError, match="went away"):
        list(home.sdk().chat.completions.create(model="tiny", messages=CHAT, stream=True))


@pytest.mark.parametrize("asgi", ["2.3", "2.4"])
def test_stream_when_its_reader_goes_away_then_the_worker_is_hung_up_on(home: Home, worker: Worker, asgi: str):
    """Servers report it by a message before ASGI 2.4 and by a failing send since."""
    worker.mode = "endless"
    left = asyncio.Event()

    async def receive() -> dict[str, Any]:
        if not requested:
            requested.append(json.dumps({"model": "tiny", "messages": CHAT, "stream": True}).encode())
            return {"type": "http.request", "body": requested[0]}
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.body":
            left.set()
            if asgi == "2.4":
                raise OSError("gone")

    requested: list[bytes] = []
    headers = [(name.encode(), value.encode()) for name, value in home.headers().items()]
    scope = {"type": "http", "asgi": {"version": "3.0", "spec_version": asgi}, "http_version": "1.1", "method": "POST"}
    scope |= {"scheme": "http", "path": "/v1/chat/completions", "query_string": b"", "headers": headers}
    with contextlib.suppress(ClientDisconnect):
        asyncio.run(home.app(scope, receive, send))
    assert worker.was_left.wait(60)


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
        put_worker(tx, "w0", base_model="tiny", address=frozen, token="x", info={"adapters": [short_name(blob)]})
    body = {"model": model, "messages": [{"role": "user", "content": "x"}], "stream": stream}
    for number in (1, 2):
        answer = home.call("POST", "/v1/chat/completions", json=body)
        assert answer.status_code == 200 and "well" in answer.text
        assert len(worker.requests) == number
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
            requested.set()
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
        while not requested.is_set():
            await asyncio.sleep(0.01)
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        raise AssertionError("there is no one to answer")

    requested, bodies = threading.Event(), []
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


def test_prompts_when_the_adapter_is_loaded_somewhere_then_that_worker_gets_them():
    """Elsewhere it would have to be loaded first; where it is loaded nowhere, its name decides, always the same."""
    rows = [{"id": f"w{i}", "base_model": "tiny", "address": "http://x", "is_draining": False} for i in range(4)]
    able = [{**row, "info": {"adapters": [short_name("aa/1")] if row["id"] == "w2" else []}} for row in rows]
    assert {choose_worker(able, "tiny", "aa/1")["id"] for _ in range(9)} == {"w2"}
    assert len({choose_worker(able, "tiny", "bb/2")["id"] for _ in range(9)}) == 1
    assert len({choose_worker(able, "tiny", f"cc/{i}")["id"] for i in range(40)}) == 4, "adapters are spread"
    leaving = [{**row, "is_draining": row["id"] == "w2"} for row in able]
    assert choose_worker(leaving, "tiny", "aa/1")["id"] != "w2"
