"""Adapters of a directory are found by their files, and the table follows them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import fsspec
import pytest
from written_adapters import write_tiny

from weft.errors import ConfigError, StorageError
from weft.serve.adapter_folders import AdapterFolder, adapter_at, adapters_below, common_base
from weft.serve.db import adapters
from weft.serve.db.engine import Database
from weft.serve.folder_scan import FolderScan
from weft.serve.settings import Settings
from weft.store.remote_files import RemoteDirectory


def look_at(path: Path) -> AdapterFolder:
    own = adapter_at("a", str(path))
    assert own is not None
    return own


def bucket(tmp_path: Path) -> str:
    """The files of a directory, as they are now, in a bucket."""
    url = f"memory://{tmp_path.parent.name}-{tmp_path.name}"
    files, _ = fsspec.url_to_fs(url)
    if files.exists(url):
        files.rm(url, recursive=True)
    files.put(f"{tmp_path}/", f"{url}/", recursive=True)
    return url


def test_folders_when_adapters_lie_in_several_layouts_then_all_are_found_by_their_way_there(tmp_path: Path):
    for path in ("plain", "job/adapter", "run/a/adapter", "run/b/adapter", "deep/er/adapter-1", ".hidden"):
        write_tiny(tmp_path / path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    for path in ("plain/more", "run/checkpoints/7", "a/b/c/d/e"):
        write_tiny(tmp_path / path)
    for root in (str(tmp_path), bucket(tmp_path)):
        assert set(adapters_below(root)) == {"plain", "job", "run/a", "run/b", "deep/er/adapter-1"}


def test_folder_when_its_files_change_then_it_has_another_version(tmp_path: Path):
    path = write_tiny(tmp_path / "a")
    first = look_at(path)
    assert first.error is None and first.base == "tiny" and look_at(path) == first
    write_tiny(path, seed=2)
    assert look_at(path).version != first.version


BROKEN = {
    "is not a whole safetensors file": lambda path: cut(path / "adapter_model.safetensors"),
    "adapter_model.safetensors is missing": lambda path: (path / "adapter_model.safetensors").unlink(),
    "is not valid JSON": lambda path: cut(path / "adapter_config.json"),
    "does not hold a JSON object": lambda path: (path / "adapter_config.json").write_text("[]"),
}


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


@pytest.mark.parametrize("message", BROKEN)
def test_folder_when_broken_then_one_sentence_without_a_path(message: str, tmp_path: Path):
    path = write_tiny(tmp_path / "a")
    BROKEN[message](path)
    error = look_at(path).error
    assert error is not None and message in error and str(tmp_path) not in error
    assert adapters_below(bucket(tmp_path))["a"].error == error


def test_base_when_adapters_agree_then_it_is_theirs_else_it_must_be_chosen(tmp_path: Path):
    with pytest.raises(ConfigError, match="there is no adapter in it yet"):
        common_base(str(tmp_path))
    write_tiny(tmp_path / "a")
    assert common_base(str(tmp_path)) == "tiny"
    write_tiny(tmp_path / "b", base="smollm2")
    with pytest.raises(ConfigError, match="a on tiny and b on smollm2"):
        common_base(str(tmp_path))


def rows(database: Database, root: Path | str | None) -> dict[str, str | None]:
    with database.read() as tx:
        return {row["name"]: row["error"] for row in adapters.list_adapters(tx, str(root))}


def test_scan_when_directories_come_change_and_go_then_the_table_follows(database: Database, tmp_path: Path):
    root = tmp_path / "lora"
    write_tiny(root / "a")
    scan = FolderScan(Settings(tmp_path, adapters=str(root)), database)
    scan.scan()
    assert rows(database, root) == {"a": None}
    write_tiny(root / "b")
    scan.scan()
    assert rows(database, root) == {"a": None}, "what has just come may still be copied"
    scan.scan()
    assert rows(database, root) == {"a": None, "b": None}
    cut(root / "a" / "adapter_model.safetensors")
    shutil.rmtree(root / "b")
    for _ in range(2):
        scan.scan()
    found = rows(database, root)
    assert found.keys() == {"a"} and "whole" in str(found["a"])
    write_tiny(root / "a", seed=3)
    for _ in range(2):
        scan.scan()
    assert rows(database, root) == {"a": None}
    assert rows(database, tmp_path / "another") == {}, "another service has another directory"


def test_scan_when_adapters_come_change_and_go_in_a_bucket_then_the_table_follows(database: Database, tmp_path: Path):
    folder = tmp_path / "lora"
    write_tiny(folder / "a")
    root = bucket(folder)
    files, at = fsspec.url_to_fs(root)
    scan = FolderScan(Settings(tmp_path / "data", adapters=root), database)
    scan.scan()
    assert rows(database, root) == {"a": None}
    files.put(f"{write_tiny(folder / 'b', seed=2)}/", f"{at}/b/", recursive=True)
    scan.scan()
    assert rows(database, root) == {"a": None}, "what has just come may lack files"
    scan.scan()
    assert rows(database, root) == {"a": None, "b": None}
    files.rm(f"{at}/a/adapter_model.safetensors")
    files.rm(f"{at}/b", recursive=True)
    for _ in range(2):
        scan.scan()
    assert rows(database, root) == {"a": "adapter_model.safetensors is missing."}


def test_bucket_when_nothing_has_changed_then_no_file_is_read_again(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write_tiny(tmp_path / "a")
    scan = FolderScan(Settings(tmp_path, adapters=bucket(tmp_path)), database)
    scan.scan()
    monkeypatch.delattr(RemoteDirectory, "read")
    scan.scan()
    assert rows(database, scan._settings.adapters) == {"a": None}


def test_scan_when_the_directory_cannot_be_read_then_what_was_found_stays(database: Database, tmp_path: Path):
    root = tmp_path / "lora"
    write_tiny(root / "a")
    scan = FolderScan(Settings(tmp_path, adapters=str(root)), database)
    scan.scan()
    root.rename(tmp_path / "away")
    with pytest.raises(StorageError):
        scan.scan()
    assert rows(database, root) == {"a": None}


def test_scan_when_an_adapter_names_none_of_several_backbones_then_it_is_not_served(database: Database, tmp_path: Path):
    root = tmp_path / "lora"
    write_tiny(root / "a")
    write_tiny(root / "b", base="elsewhere/llama")
    config = json.loads((write_tiny(root / "c") / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = "/models/two"
    (root / "c" / "adapter_config.json").write_text(json.dumps(config))
    models = {"tiny": "tiny", "second": "/models/two"}
    FolderScan(Settings(tmp_path, adapters=str(root), base_models=models), database).scan()
    assert rows(database, root) == {
        "a": None,
        "b": "it was trained on elsewhere/llama; here are tiny, second.",
        "c": None,
    }
