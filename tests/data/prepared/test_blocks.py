"""Joined texts: blocks of one length that together are all tokens of the texts, in order."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from tiny_tokenizer import make_tokenizer

from weft.data.dataset import Dataset
from weft.data.load import load_dataset
from weft.errors import ConfigError

TEXTS = [{"text": "a planet in a garden " * n} for n in (1, 9, 2, 14)]


def load(folder: Path, rows: list[Any], sources: tuple[str, ...] = ("rows.jsonl",), **settings: Any) -> Dataset:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_dataset(sources, make_tokenizer(), base_dir=folder, **settings)


def group_texts(examples: list[list[int]], block_size: int) -> list[list[int]]:
    """As transformers' example run_clm.py does it, but for the rest, which it drops."""
    joined = list(chain(*examples))
    return [joined[i : i + block_size] for i in range(0, len(joined), block_size)]


@pytest.mark.parametrize("length", [8, 50, 4096])
def test_texts_when_grouped_then_blocks_are_those_of_group_texts_with_the_rest(tmp_path, length):
    apart = [sample.tokens.tolist() for sample in load(tmp_path, TEXTS, max_length=4096).samples]
    data = load(tmp_path, TEXTS, max_length=length, group_texts=True)
    expected = [block for block in group_texts(apart, length) if len(block) > 1]
    assert [sample.tokens.tolist() for sample in data.samples] == expected
    assert all(s.supervised.tolist() == [False] + [True] * (s.length - 1) for s in data.samples)
    assert data.samples.num_supervised.tolist() == [s.length - 1 for s in data.samples]
    assert data.summary.num_truncated == 0 and "4 texts joined and cut in blocks" in data.summary.describe()


def test_texts_when_grouped_of_two_sources_then_no_block_is_of_both(tmp_path):
    (tmp_path / "other.jsonl").write_text(json.dumps({"text": "fish"}) + "\n")
    one = load(tmp_path, TEXTS, max_length=50, group_texts=True)
    both = load(tmp_path, TEXTS, ("rows.jsonl", "other.jsonl"), max_length=50, group_texts=True)
    assert both.sizes == (one.num_groups, 1)
    again = load(tmp_path, TEXTS, ("rows.jsonl", "other.jsonl"), max_length=50, group_texts=True)
    assert again.fingerprint == both.fingerprint != one.fingerprint


@pytest.mark.parametrize(
    ("row", "what"),
    [
        ({"prompt": "a", "completion": "b"}, "in the completion format"),
        ({"text": "a", "weight": 0.5}, "for objective weighted"),
    ],
)
def test_rows_when_they_are_no_plain_texts_then_are_not_joined(tmp_path, row, what):
    with pytest.raises(ConfigError) as refused:
        load(tmp_path, [row], max_length=50, group_texts=True)
    assert str(refused.value) == f"group_texts: joins plain texts, and the rows are {what}."
