"""What kernels are launched with: by GPU, by class of ranks, and only what changes no bit."""

from __future__ import annotations

import json

import pytest
import torch

from weft.kernels import tuning
from weft.kernels.tuning import (
    H200,
    candidates,
    class_of,
    expand_blocks,
    shrink_blocks,
    shrink_grad_blocks,
    table_of,
    trying,
    tuned_tables,
    tuning_file,
    weight_grad_blocks,
)

CPU = torch.device("cpu")
LIKE = torch.empty(0, dtype=torch.bfloat16)
A100 = "NVIDIA A100-SXM4-80GB"


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A GPU of any name, with a file of tuned choices of its own."""
    monkeypatch.setenv("WEFT_TUNING", str(tmp_path / "tuning.json"))
    names = {"name": A100}
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: names["name"])
    table_of.cache_clear()
    yield names
    table_of.cache_clear()


def test_class_of_names_the_launch():
    assert [class_of(rank) for rank in (16, 32, 64, 128, 512)] == ["16", "64", "64", "more", "more"]


def test_table_when_the_gpu_is_known_then_is_its_own_and_else_the_h200s_with_a_hint(gpu):
    assert table_of(torch.device("cuda")) == (H200, "the H200's; `weft tune` would measure this GPU")
    table_of.cache_clear()
    gpu["name"] = "NVIDIA H100 80GB HBM3"
    assert table_of(torch.device("cuda")) == (H200, "the H100's")


def test_table_when_this_machine_was_measured_then_that_counts_for_its_gpu_alone(gpu):
    mine = {"num_warps": 8, "num_stages": 2}
    tuning_file().write_text(json.dumps({A100: {"shrink/16": mine}}))
    table, origin = table_of(torch.device("cuda"))
    assert (table["shrink/16"], origin) == (mine, "measured on this machine")
    assert table["shrink/64"] == H200["shrink/64"]
    table_of.cache_clear()
    gpu["name"] = "NVIDIA L40S"
    assert table_of(torch.device("cuda"))[0] is H200


@pytest.mark.parametrize("text", ["", "[1]", '{"a": 3}', '{"a": {"shrink/16": 4}}', '{"a": {"b": {"c": "x"}}}'])
def test_tuned_tables_when_the_file_is_no_table_then_there_are_none(tmp_path, text):
    """A broken cache costs speed, not a run."""
    path = tmp_path / "tuning.json"
    path.write_text(text)
    assert tuned_tables(path) == {}
    assert tuned_tables(tmp_path / "missing.json") == {}


def test_trying_when_inside_then_launches_use_the_choice_and_after_it_not():
    before = expand_blocks(16, CPU)
    with trying("expand/16", {"BN": 256, "num_warps": 8, "num_stages": 1}):
        assert expand_blocks(16, CPU) == {**before, "BN": 256, "num_warps": 8, "num_stages": 1}
        assert expand_blocks(64, CPU) == {"BR": 64, "RANK_BLOCKS": 1, **H200["expand/64"]}
    assert expand_blocks(16, CPU) == before


def test_stages_when_shared_memory_is_small_then_are_as_many_as_fit(monkeypatch):
    monkeypatch.setattr(tuning, "shared_limit", lambda device: 99 * 1024)
    assert shrink_blocks(256, 1, LIKE)["num_stages"] == 3  # (64 + 64) x 128 x 2 bytes each
    assert shrink_grad_blocks(256, LIKE)["num_stages"] == 2  # (64 + 128) x 128 x 2
    assert weight_grad_blocks(64, 3, LIKE)["num_stages"] == 3


@pytest.mark.parametrize("key", H200)
def test_candidates_when_listed_then_hold_what_is_in_use_and_nothing_that_is_summed_over(key):
    found = candidates(key)
    assert H200[key] in found
    assert all(set(choice) <= {"BM", "BN", "num_warps", "num_stages"} for choice in found)
    assert all(choice.get("BN", 64) >= 64 for choice in found)
