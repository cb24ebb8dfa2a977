"""Adapters of the operator's directory are models of every tenant; an admin loads more of them by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from chat_worker import CHAT, Worker
from service_home import Home, make_home
from written_adapters import write_tiny

from weft.serve.db import adapters, tenants
from weft.serve.folder_scan import FolderScan

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    """A service with two adapters in a directory, of which one is broken."""
    write_tiny(tmp_path / "lora" / "french")
    (write_tiny(tmp_path / "lora" / "cut") / "adapter_model.safetensors").write_bytes(b"x")
    made = make_home(tmp_path / "data", adapters=str(tmp_path / "lora"), training=False)
    with made.http:
        FolderScan(made.settings, made.database).scan()
        yield made
    made.database.close()


def models(home: Home, tenant: str = "acme") -> list[str]:
    return [model.id for model in home.sdk(tenant).models.list()]


def test_adapters_of_the_directory_when_listed_then_every_tenant_sees_those_that_can_be_used(home: Home):
    assert models(home, "acme") == models(home, "globex") == ["tiny", "french"]
    one = home.call("GET", "/v1/models/french").json()
    assert (one["owned_by"], one["root"]) == ("weft", "tiny") and "lora" not in str(one)


def test_chat_with_an_adapter_of_the_directory_when_requested_then_the_worker_gets_its_folder_and_version(
    home: Home, worker: Worker
):
    client = home.sdk()
    first = client.chat.completions.create(model="french", messages=CHAT, seed=1)
    with home.database.read() as tx:
        row = adapters.find_adapter(tx, str(home.settings.adapters), "french")
    assert row is not None and adapters.folder_of(worker.requests[-1]["model_blob"]) == (row["version"], row["path"])
    base = client.chat.completions.create(model="tiny", messages=CHAT, seed=1)
    assert worker.requests[-1]["model_blob"] is None and first.system_fingerprint != base.system_fingerprint


def test_broken_adapter_when_requested_then_400_with_the_reason_and_no_path(home: Home, worker: Worker):
    answer = home.call("POST", "/v1/chat/completions", json={"model": "cut", "messages": CHAT})
    assert answer.status_code == 400 and "not a whole safetensors file" in answer.json()["error"]["message"]
    assert str(home.settings.adapters) not in answer.text
    assert home.call("POST", "/v1/chat/completions", json={"model": "none", "messages": CHAT}).status_code == 404


def test_adapter_when_an_admin_loads_and_unloads_it_by_name_then_it_comes_and_goes(
    home: Home, worker: Worker, tmp_path: Path
):
    path = str(write_tiny(tmp_path / "elsewhere" / "x"))
    loaded = home.call("POST", LOAD, json={"lora_name": "hot", "lora_path": path})
    assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'hot' added successfully.")
    assert worker.requests[-1]["path"] == "/check"
    assert models(home, "globex") == ["tiny", "french", "hot"]
    again = home.call("POST", LOAD, json={"lora_name": "hot", "lora_path": path})
    assert again.status_code == 400 and "load_inplace" in again.json()["error"]["message"]
    replaced = home.call("POST", LOAD, json={"lora_name": "hot", "lora_path": path, "load_inplace": True})
    assert replaced.status_code == 200
    assert home.call("POST", UNLOAD, json={"lora_name": "hot"}).status_code == 200
    assert models(home) == ["tiny", "french"]
    assert home.call("POST", UNLOAD, json={"lora_name": "hot"}).status_code == 404


WRONG = [
    ({"lora_name": "new", "lora_path": "/no/such/place"}, 404, "no adapter in 'lora_path'"),
    ({"lora_name": "new", "lora_path": "cut"}, 400, "not a whole safetensors file"),
    ({"lora_name": "french", "lora_path": "french"}, 400, "a model 'french' already"),
    ({"lora_name": "tiny", "lora_path": "french", "load_inplace": True}, 400, "'tiny' is a backbone"),
    ({"lora_name": "ft:x", "lora_path": "french"}, 400, "its name has a ':'"),
    ({"lora_name": "new"}, 400, "Missing required parameter: 'lora_path'"),
    ({"lora_name": "new", "lora_path": "french", "load_in_place": True}, 400, "Did you mean load_inplace?"),
]


@pytest.mark.parametrize(("body", "status", "message"), WRONG)
def test_load_when_wrong_then_one_sentence(home: Home, body: dict[str, object], status: int, message: str):
    answer = home.call("POST", LOAD, json=body)
    assert answer.status_code == status and message in answer.json()["error"]["message"]
    assert models(home) == ["tiny", "french"]


def test_load_when_a_worker_cannot_use_the_adapter_then_400_with_its_reason(home: Home, worker: Worker):
    worker.mode = "broken adapter"
    answer = home.call("POST", LOAD, json={"lora_name": "new", "lora_path": "french"})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "The adapter cannot be used: q_proj is missing."
    worker.mode = "busy"
    assert home.call("POST", LOAD, json={"lora_name": "new", "lora_path": "french"}).status_code == 503
    assert models(home) == ["tiny", "french"]


def test_scan_when_a_worker_cannot_use_an_adapter_then_its_clients_get_the_reason(home: Home, worker: Worker):
    worker.mode = "broken adapter"
    scan = FolderScan(home.settings, home.database)
    scan.check()
    assert [body["path"] for body in worker.requests] == ["/check"], "a broken one needs no worker"
    assert models(home) == ["tiny"]
    answer = home.call("POST", "/v1/chat/completions", json={"model": "french", "messages": CHAT})
    assert answer.status_code == 400 and "q_proj is missing." in answer.json()["error"]["message"]
    scan.check()
    assert len(worker.requests) == 1, "it is checked once"


def test_load_when_the_key_is_no_admins_then_403(home: Home):
    with home.database.begin() as tx:
        home.keys["plain"] = tenants.create_key(tx, "acme")
    for route in (LOAD, UNLOAD):
        assert home.call("POST", route, "plain", json={"lora_name": "a", "lora_path": "b"}).status_code == 403


def test_adapter_of_the_directory_when_downloaded_deleted_or_trained_on_then_400(home: Home):
    for method, path in (("DELETE", "/v1/models/french"), ("GET", "/v1/models/french/adapter")):
        answer = home.call(method, path)
        assert answer.status_code == 400 and "server's operator" in answer.json()["error"]["message"]
    file = home.upload()
    answer = home.call("POST", "/v1/fine_tuning/jobs", json={"model": "french", "training_file": file})
    assert answer.status_code == 400 and "--no-training" in answer.json()["error"]["message"]


def test_load_when_the_adapters_are_in_a_bucket_then_paths_are_below_it_or_urls_or_directories(tmp_path: Path):
    files, root = fsspec.filesystem("memory"), f"memory://{tmp_path.name}"
    files.put(f"{write_tiny(tmp_path / 'a')}/", f"/{tmp_path.name}/run/a/", recursive=True)
    home = make_home(tmp_path / "data", adapters=root, training=False)
    with home.http:
        for name, path in (("one", "run/a"), ("two", f"{root}/run/a"), ("three", str(tmp_path / "a"))):
            assert home.call("POST", LOAD, json={"lora_name": name, "lora_path": path}).status_code == 200
        assert home.call("POST", LOAD, json={"lora_name": "x", "lora_path": "run/b"}).status_code == 404
        assert models(home) == ["tiny", "one", "three", "two"]
    home.database.close()


def test_service_when_it_has_no_directory_then_nothing_can_be_loaded(tmp_path: Path):
    plain = make_home(tmp_path / "plain")
    with plain.http:
        answer = plain.call("POST", LOAD, json={"lora_name": "a", "lora_path": "b"})
        assert answer.status_code == 400 and "--adapters" in answer.json()["error"]["message"]
    plain.database.close()
