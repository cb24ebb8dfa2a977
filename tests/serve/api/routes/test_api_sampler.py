"""Prompts go on to a sampling server, which gets an adapter with the first prompt for it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chat_worker import CHAT
from sampler_server import BASE, SamplerServer
from service_home import Home, make_home
from starlette.requests import ClientDisconnect
from written_adapters import write_tiny

from weft.errors import ConfigError
from weft.serve.api import sampler as sampler_module
from weft.serve.folder_scan import FolderScan
from weft.serve.settings import Settings

BODY = {"model": "french", "messages": CHAT}


@pytest.fixture(params=["vllm", "sglang"])
def server(request: pytest.FixtureRequest) -> Iterator[SamplerServer]:
    made = SamplerServer(is_sglang=request.param == "sglang")
    yield made
    made.close()


@pytest.fixture
def home(tmp_path: Path, server: SamplerServer) -> Iterator[Home]:
    """A service without workers, with an adapter in a directory."""
    write_tiny(tmp_path / "lora" / "french")
    made = make_home(tmp_path / "data", adapters=str(tmp_path / "lora"), sampler=server.url)
    with made.http:
        FolderScan(made.settings, made.database).scan()
        yield made
    made.database.close()


def post_chat(home: Home, tenant: str = "acme", **changes: Any) -> Any:
    return home.call("POST", "/v1/chat/completions", tenant, json={**BODY, **changes})


def loads(server: SamplerServer) -> int:
    return sum(path == f"{server.prefix}/load_lora_adapter" for path, _ in server.requests)


def test_chat_when_repeated_then_the_adapter_is_loaded_once(home: Home, server: SamplerServer):
    model = home.finish(home.job())
    for name in ("tiny", "french", model, "french"):
        client = home.sdk().chat.completions
        answer = client.create(model=name, messages=CHAT, temperature=0.5, seed=3, user="me", stop=["."])
        assert (answer.choices[0].message.content, answer.model) == ("well", name)
    _, sent = server.requests[-1]
    there = sent.pop("model")
    assert there.startswith(f"{BASE}:weft-" if server.is_sglang else "weft-")
    turns = [{"role": "system", "content": "be kind"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    assert sent == {"messages": turns, "temperature": 0.5, "seed": 3, "stop": ["."], "max_tokens": 256}
    assert loads(server) == 2
    files = {"adapter_config.json", "adapter_model.safetensors"}
    assert [files <= set(own) for own in server.loaded.values()] == [True, True]
    usage = home.call("GET", "/v1/usage").json()
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (28, 8)


def test_completion_when_streamed_then_the_pieces_come_with_the_models_name(home: Home, server: SamplerServer):
    client = home.sdk().completions
    for with_usage in (False, True):
        options: dict[str, Any] = {"stream_options": {"include_usage": True}} if with_usage else {}
        chunks = list(client.create(model="french", prompt="hi", stream=True, **options))
        assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == "well"
        assert {chunk.model for chunk in chunks} == {"french"}
        assert [chunk.usage.total_tokens for chunk in chunks if chunk.usage] == ([9] if with_usage else [])
    usage = home.call("GET", "/v1/usage").json()
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (14, 4)


def test_chat_when_the_sampler_was_started_again_then_the_adapter_is_loaded_again(home: Home, server: SamplerServer):
    assert post_chat(home).status_code == 200
    server.loaded.clear()
    assert post_chat(home).status_code == 200
    assert loads(server) == 2


def test_chat_when_the_adapter_has_changed_then_it_is_loaded_under_another_name(home: Home, server: SamplerServer):
    assert post_chat(home).status_code == 200
    write_tiny(Path(str(home.settings.adapters)) / "french", seed=2)
    FolderScan(home.settings, home.database).scan()
    assert post_chat(home).status_code == 200
    assert len(server.loaded) == 2


def test_chat_when_many_adapters_are_loaded_then_the_least_recently_used_goes(
    home: Home, server: SamplerServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(sampler_module, "MOST_LOADED", 1)
    model = home.finish(home.job())
    for name in (model, "french"):
        assert post_chat(home, model=name).status_code == 200
    assert len(server.loaded) == 1 and not list((tmp_path / "data" / "sampler").iterdir())
    assert post_chat(home, model=model).status_code == 200
    assert home.call("DELETE", f"/v1/models/{model}").status_code == 200
    assert not server.loaded and not list((tmp_path / "data" / "sampler").iterdir())


WRONG = {
    "refuses": (400, "temperature must be in [0, 2]."),
    "refuses adapters": (400, "The sampling server cannot load the adapter: Loading lora it failed: its directory has"),
    "busy": (503, "The sampling server is busy; try again."),
    "broken": (502, "The sampling server failed with the status 500."),
    "key": (502, "The sampling server refuses the service's key."),
    "garbage": (502, "The sampling server sent no JSON."),
}


@pytest.mark.parametrize("mode", WRONG)
def test_chat_when_the_sampler_refuses_then_one_sentence_without_a_path(home: Home, server: SamplerServer, mode: str):
    server.mode = mode
    answer = post_chat(home)
    status, message = WRONG[mode]
    assert answer.status_code == status and answer.json()["error"]["message"].startswith(message)
    assert str(home.settings.adapters) not in answer.text
    server.mode = "good"
    assert post_chat(home).status_code == 200


def test_chat_when_the_sampler_is_away_then_503_and_a_bad_request_is_still_a_400(home: Home, server: SamplerServer):
    server.close()
    answer = post_chat(home)
    assert answer.status_code == 503 and "does not answer" in answer.json()["error"]["message"]
    assert post_chat(home, temperature=9).status_code == 400
    assert post_chat(home, max_tokens=10**6).status_code == 400
    assert post_chat(home, model="none").status_code == 404


def test_stream_when_the_sampler_breaks_off_then_it_ends_with_an_error_and_no_done(home: Home, server: SamplerServer):
    server.mode = "dies"
    lines = [line for line in post_chat(home, stream=True).text.splitlines() if line]
    assert "broke off" in json.loads(lines[-1].removeprefix("data: "))["error"]["message"]
    assert "[DONE]" not in "".join(lines)


@pytest.mark.parametrize(("asgi", "stream"), [("2.3", True), ("2.4", True), ("2.4", False)])
def test_answer_when_its_reader_goes_away_then_the_sampler_is_hung_up_on(
    home: Home, server: SamplerServer, asgi: str, stream: bool
):
    server.mode = "endless" if stream else "silent"
    left = asyncio.Event()
    requested: list[bytes] = []

    async def receive() -> dict[str, Any]:
        if not requested:
            requested.append(json.dumps({**BODY, "stream": stream}).encode())
            return {"type": "http.request", "body": requested[0]}
        if stream:
            await left.wait()
        else:
            while not server.was_called.is_set():
                await asyncio.sleep(0.01)
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.body":
            left.set()
            if asgi == "2.4":
                raise OSError("gone")

    headers = [(name.encode(), value.encode()) for name, value in home.headers().items()]
    scope = {"type": "http", "asgi": {"version": "3.0", "spec_version": asgi}, "http_version": "1.1", "method": "POST"}
    scope |= {"scheme": "http", "path": "/v1/chat/completions", "query_string": b"", "headers": headers}
    with contextlib.suppress(ClientDisconnect):
        asyncio.run(home.app(scope, receive, send))
    assert server.was_left.wait(60)


def test_chat_with_another_tenants_model_then_404_and_nothing_is_loaded(home: Home, server: SamplerServer):
    model = home.finish(home.job())
    assert post_chat(home, "globex", model=model).status_code == 404
    assert not server.requests


def test_key_of_the_sampler_when_set_then_it_is_sent(
    home: Home, server: SamplerServer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(sampler_module.KEY_VARIABLE, "secret")
    assert post_chat(home).status_code == 200
    assert set(server.keys) == {"Bearer secret"}


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://user:word@host", "http://", "http://x?y"])
def test_settings_when_the_url_is_none_then_one_sentence(url: str):
    with pytest.raises(ConfigError, match=r"--sampler: got .*; write http://HOST:PORT\."):
        Settings(sampler=url)
