"""Weights reach the loss from every place a file can have them, and a weight of 1 changes nothing."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from tiny_models import assert_same_bits, job_spec, random_backbone, random_data, small_job, train, weighted_data
from tiny_tokenizer import make_tokenizer

from weft.data.dataset import Dataset
from weft.data.load import load_dataset
from weft.errors import DataError
from weft.objectives.registry import OBJECTIVES

WEIGHTED = OBJECTIVES["weighted"]


def load(folder: Path, rows: list[Any], **settings: Any) -> Dataset:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_dataset(["rows.jsonl"], make_tokenizer(), max_length=256, base_dir=folder, **settings)


def row(**columns: Any) -> dict[str, Any]:
    return {"prompt": "ask", "completion": "yes", **columns}


def chat(*weights: float | None) -> dict[str, Any]:
    turns = [{"role": "assistant", "content": "yes"} | ({} if w is None else {"weight": w}) for w in weights]
    return {"messages": [turn for answer in turns for turn in ({"role": "user", "content": "ask"}, answer)]}


@pytest.mark.parametrize("weight", [-1, -0.001, math.nan, math.inf, 10**400, "heavy", "nan", True, [1]])
def test_weight_when_it_is_no_number_from_0_up_then_is_refused_with_its_line(weight):
    with pytest.raises(DataError, match=r"^rows.jsonl line 3: weight is .*; expected a number from 0 to 1e\+18\."):
        WEIGHTED.parts(row(weight=weight), "rows.jsonl line 3")


@pytest.mark.parametrize(
    ("weight", "expected"), [(2, 2.0), (0, 0.0), (0.5, 0.5), ("0.25", 0.25), ("", 1.0), (None, 1.0)]
)
def test_weight_when_it_is_a_number_or_absent_then_is_read(weight, expected):
    assert [part.weight for part in WEIGHTED.parts(row(weight=weight), "x")] == [expected]


def test_rows_when_any_has_a_weight_then_all_are_weighted_and_the_summary_reports_it(tmp_path):
    data = load(tmp_path, [row(weight=0.5), row(), row(weight=0), row(weight=3)])
    assert data.objective is WEIGHTED
    counted = [s.total_weight / s.num_supervised for s in data.samples]
    assert counted == [0.5, 1.0, 3.0]
    assert data.summary.num_dropped_unsupervised == 1
    assert data.summary.describe().endswith("1 with nothing to learn dropped; objective weighted, by the columns")


def test_rows_when_the_job_is_supervised_then_their_weight_is_not_read_and_the_summary_reports_it(tmp_path):
    data = load(tmp_path, [row(weight="5 kg"), row(weight="7 kg")], objective="supervised")
    assert [s.weights for s in data.samples] == [None, None]
    assert "objective supervised, though the columns are those of weighted" in data.summary.notes


def test_weight_when_a_cell_of_a_table_then_is_read(tmp_path):
    (tmp_path / "rows.csv").write_text("prompt,completion,weight\nask,yes,0.5\nask,no,\n")
    data = load_dataset(["rows.csv"], make_tokenizer(), max_length=256, base_dir=tmp_path)
    assert [s.total_weight / s.num_supervised for s in data.samples] == [0.5, 1.0]


def test_messages_when_they_have_weights_then_each_turn_counts_its_own(tmp_path):
    data = load(tmp_path, [chat(0.5, None, 0, 4), chat(1, 0), {**chat(0.5), "weight": 3}])
    assert data.objective is WEIGHTED
    mixed, plain, both = data.samples
    assert mixed.weights is not None and plain.weights is None and both.weights is not None
    assert sorted(set(mixed.weights[mixed.supervised].tolist())) == [0.5, 1.0, 4.0]
    assert set(both.weights[both.supervised].tolist()) == {1.5}
    turn = both.num_supervised
    assert (mixed.num_supervised, mixed.total_weight) == (3 * turn, 5.5 * turn)


def test_messages_when_their_weights_cannot_count_then_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"rows.jsonl line 1: messages have weights besides 0 and 1"):
        load(tmp_path, [chat(0.5)], objective="supervised")
    with pytest.raises(DataError, match=r"rows.jsonl line 1: messages have weights, but train_on_inputs"):
        load(tmp_path, [chat(0.5)], train_on_inputs=True)


def test_fingerprint_when_weights_are_1_then_is_that_without_any(tmp_path):
    plain = load(tmp_path, [row(), row()]).fingerprint
    assert load(tmp_path, [row(weight=1), row(weight=1.0)]).fingerprint == plain
    assert len({plain, *(load(tmp_path, [row(weight=w), row()]).fingerprint for w in (2, 3))}) == 3


@pytest.mark.parametrize("kernels", ["reference", "fused"])
def test_weighted_job_when_it_has_neighbours_or_weights_of_1_then_the_same_bits(kernels):
    spec = job_spec("weighted", seed=3, eval_steps=3, adapter={"lora_dropout": 0.1})
    data = random_data(3, num_samples=9, num_eval=3)
    neighbours = [small_job(f"n{i}", i) for i in range(3)]
    backbone = random_backbone("llama", kernels=kernels)
    mine = weighted_data(data)
    alone = train(backbone, [(spec, mine)])["weighted"]
    assert_same_bits(alone, train(backbone, [*neighbours, (spec, mine)])["weighted"])
    plain = train(backbone, [(spec, data)])["weighted"]
    assert alone.losses != plain.losses and alone.eval_losses != plain.eval_losses
    assert_same_bits(plain, train(backbone, [*neighbours[1:], (spec, weighted_data(data, weights=(1.0,)))])["weighted"])
