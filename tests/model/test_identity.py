"""Digests of a model's files change with what decides numbers, and with nothing else."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from weft.model.source import TINY, _weights_digest, find_source, load_tokenizer, model_digests


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TINY, tmp_path / "model"))


def digests(model: Path) -> dict[str, str]:
    return model_digests(find_source(str(model)), load_tokenizer(str(model)))


def change(path: Path, **settings: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


def scale_one(model: Path) -> None:
    path = model / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith("norm.weight"))
    tensors[name] *= 1.01
    save_file(tensors, path, {"format": "pt"})


CHANGES: dict[str, Callable[[Path], None]] = {
    "weights": scale_one,
    "config": lambda model: change(model / "config.json", rms_norm_eps=1e-3),
    "tokenizer": lambda model: change(model / "tokenizer_config.json", model_max_length=77),
    "chat_template": lambda model: change(model / "tokenizer_config.json", chat_template="{{ messages }}"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_digests_when_something_changes_then_only_its_own(model: Path, name: str):
    before = digests(model)
    CHANGES[name](model)
    after = digests(model)
    assert {key for key in before if before[key] != after[key]} == {name}
    assert before.keys() == after.keys() == CHANGES.keys()


def test_digests_when_files_are_saved_again_by_another_version_then_the_same(model: Path):
    before = digests(model)
    change(model / "config.json", transformers_version="9.0", torch_dtype="bfloat16")
    (model / "tokenizer.json").write_text(json.dumps(json.loads((model / "tokenizer.json").read_text()), indent=3))
    save_file(load_file(model / "model.safetensors"), model / "model.safetensors", {"format": "pt"})
    assert digests(model) == before


def test_digests_when_weights_are_in_several_files_then_all_count(model: Path):
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, own in parts.items():
        save_file({name: tensors[name] for name in own}, model / file, {"format": "pt"})
    weight_map = {name: file for file, own in parts.items() for name in own}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    before = digests(model)
    save_file({name: tensors[name] * 2 for name in names[1::2]}, model / "model-2.safetensors", {"format": "pt"})
    assert digests(model)["weights"] != before["weights"]


def test_digests_when_a_hub_model_is_not_on_this_machine_then_it_has_none():
    found = model_digests(find_source("nobody-here/no-such-model"), load_tokenizer(str(TINY)))
    assert found.keys() == {"chat_template"}


@pytest.mark.parametrize("size", [1, 4096, 5000, 3 * 2**22 + 7])
def test_weights_of_another_format_when_scaled_then_noticed_in_a_bounded_time(tmp_path: Path, size: int):
    """Of a large file only blocks are read, the last byte among them."""
    path = tmp_path / "model.gguf"
    path.write_bytes(bytes(size))
    before = _weights_digest(path)
    path.write_bytes(bytes(size - 1) + b"\x01")
    last = _weights_digest(path)
    path.write_bytes(b"\x02" * size)
    assert len({before, last, _weights_digest(path)}) == 3
