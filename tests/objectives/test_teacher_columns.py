"""Rows that hold a teacher's output: read whole, or refused with their line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_tokenizer import make_tokenizer

from weft.data.load import load_dataset, load_job_data
from weft.errors import DataError
from weft.spec import JobSpec

ROW = {
    "input_ids": [5, 6, 7, 8],
    "labels": [-100, -100, 7, 8],
    "teacher_ids": [[7, 9], [3, 8]],
    "teacher_logprobs": [[-0.1, -3.0], [-2.0, -0.5]],
}


def load(folder: Path, *rows: dict[str, Any], name: str = "rows.jsonl") -> Any:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_dataset([name], make_tokenizer(), max_length=64, base_dir=folder)


def test_row_when_read_then_has_its_teachers_tokens_in_order_also_from_the_cache(tmp_path):
    longer = {**ROW, "input_ids": [4, 5, 6, 7, 8], "labels": [-100, -100, -100, 7, 8]}
    for _ in range(2):
        data = load(tmp_path, ROW, longer)
        assert data.objective.name == "distillation" and data.has_teacher
        for sample in data.samples:
            teacher = sample.teacher
            assert teacher.ids.tolist() == [[7, 9], [8, 3]]
            assert teacher.logprobs.ravel().tolist() == pytest.approx([-0.1, -3.0, -0.5, -2.0])
    assert data.samples.take(np.array([1]))[0].teacher.ids.tolist() == [[7, 9], [8, 3]]
    assert data.samples.arrays.teacher_ids.shape == (8,), "only supervised tokens have any"
    cut = data.samples[1].cut(4)
    assert cut.teacher.ids.tolist() == [[7, 9]]
    other = load(tmp_path, {**ROW, "teacher_ids": [[7, 10], [3, 8]]}, longer)
    assert other.fingerprint != data.fingerprint


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"teacher_ids": None}, "teacher_ids is nothing; expected a list of tokens for each supervised token."),
        ({"teacher_ids": [[7, 9], 3]}, "teacher_ids[1] is 3; expected a list of tokens."),
        (
            {"teacher_ids": [[7, 9], [8]]},
            "teacher_ids and teacher_logprobs differ in size; expected as many tokens for",
        ),
        ({"teacher_ids": [[7, 7], [3, 8]]}, "teacher_ids[0] is [7, 7]; expected different token ids."),
        ({"teacher_ids": [[7, -9], [3, 8]]}, "teacher_ids[0] is [7, -9]; expected different token ids."),
        ({"teacher_logprobs": [[-0.1, "a"], [-1, -2]]}, "teacher_logprobs[0] is [-0.1, 'a']; expected finite numbers."),
        ({"teacher_logprobs": [[-(10**400), -1], [-1, -2]]}, "teacher_logprobs[0] is [-1000"),
        (
            {"teacher_ids": [list(range(1001))] * 2, "teacher_logprobs": [[-1.0] * 1001] * 2},
            "teacher_ids names 1,001 tokens for each; the most is 1,000.",
        ),
        ({"labels": [-100, 6, 7, 8]}, "teacher_ids has 2 items; expected 3, one for each supervised token."),
        (
            {"teacher_ids": [[7], [8]], "teacher_logprobs": [[-1], [-1]]},
            "holds 1 token of its teacher for each token, and the rows before it 2; give all the same number.",
        ),
        (
            {"teacher_ids": [], "teacher_logprobs": []},
            "holds 0 tokens of its teacher for each token, and the rows before it 2; give all the same number.",
        ),
    ],
)
def test_row_when_it_is_wrong_then_is_refused_with_its_line(tmp_path, changes, message):
    with pytest.raises(DataError) as refused:
        load(tmp_path, ROW, {**ROW, **changes})
    assert str(refused.value).startswith(f"rows.jsonl line 2: {message}")


def test_sources_when_their_teachers_name_different_numbers_of_tokens_then_are_refused(tmp_path):
    load(tmp_path, ROW)
    load(tmp_path, {**ROW, "teacher_ids": [[7], [8]], "teacher_logprobs": [[-1], [-1]]}, name="other.jsonl")
    with pytest.raises(DataError, match="rows hold 2 and 1 tokens of their teachers for each token; give all the same"):
        load_dataset(["rows.jsonl", "other.jsonl"], make_tokenizer(), max_length=64, base_dir=tmp_path)


def test_evaluation_when_only_training_rows_hold_a_teacher_then_is_refused(tmp_path):
    load(tmp_path, ROW)
    plain = {name: ROW[name] for name in ("input_ids", "labels")}
    load(tmp_path, plain, name="eval.jsonl")
    job = JobSpec("student", ("rows.jsonl",), ("eval.jsonl",))
    with pytest.raises(DataError, match=r"^student: eval_data: holds no teacher_logprobs, unlike train_data\.$"):
        load_job_data(job, make_tokenizer(), tmp_path)
