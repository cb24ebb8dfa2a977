"""Rows that become several samples: chats on templates that rewrite history."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_data import supervised_text
from tiny_tokenizer import make_tokenizer

from weft.data.dataset import JobData
from weft.data.load import load_dataset, load_job_data
from weft.errors import ConfigError, DataError
from weft.spec import AdapterSpec, JobSpec

Write = Callable[..., str]
ENDS_ONCE = (  # the last answer alone has an end, so each answer needs a sample of its own
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}{{ ';' if loop.last and m.role == 'assistant' }}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
TOKENIZER = make_tokenizer(template=ENDS_ONCE)


def chat(*answers: str) -> dict[str, Any]:
    turns = [({"role": "user", "content": "?"}, {"role": "assistant", "content": answer}) for answer in answers]
    return {"messages": [message for pair in turns for message in pair]}


def load_job(write: Write, tmp_path: Path, rows: list[Any], **settings: Any) -> JobData:
    spec = JobSpec(name="job", train_data=(write("train.jsonl", rows),), max_length=64, **settings)
    return load_job_data(spec, TOKENIZER, tmp_path)


def test_chat_when_history_is_rewritten_then_each_answer_is_a_sample_and_that_is_reported(write: Write, tmp_path: Path):
    """A row gives several samples, in the order of its answers, and the summary reports it once."""
    data = load_job(write, tmp_path, [chat("one", "two"), chat("three")]).train
    assert [supervised_text(sample, TOKENIZER) for sample in data.samples] == [["one;"], ["two;"], ["three;"]]
    assert (data.num_groups, data.summary.num_samples, data.summary.num_rows) == (3, 3, 2)
    assert data.rows is not None and data.rows.tolist() == [0, 0, 1]
    assert data.summary.describe().count("1 chat became 2 samples") == 1


def test_chat_when_history_is_masked_then_the_row_is_one_sample(write: Write, tmp_path: Path):
    """`mask_history` trains the last answer of each chat."""
    data = load_job(write, tmp_path, [chat("one", "two"), chat("three")], mask_history=True).train
    assert [supervised_text(sample, TOKENIZER) for sample in data.samples] == [["two;"], ["three;"]]
    assert not data.summary.notes


def test_evaluation_when_split_off_then_no_chat_is_on_both_sides(write: Write, tmp_path: Path):
    """Samples of one chat repeat each other, so a split takes whole rows."""
    data = load_job(write, tmp_path, [chat(f"a{i}", f"b{i}") for i in range(6)], eval_data=2)
    assert data.eval is not None
    assert (data.train.num_groups, data.eval.num_groups) == (8, 4)
    assert data.train.rows is not None and data.eval.rows is not None
    assert not set(data.train.rows) & set(data.eval.rows)


def test_long_samples_when_only_the_later_answers_are_too_long_then_the_first_stay(write: Write, tmp_path: Path):
    """Every sample is kept or dropped for itself, and counted."""
    data = load_job(write, tmp_path, [chat("one", "x" * 70), chat("two")], long_samples="drop").train
    assert [supervised_text(sample, TOKENIZER) for sample in data.samples] == [["one;"], ["two;"]]
    assert data.summary.num_dropped_long == 1


def test_pairs_when_a_format_is_stated_then_answers_are_read_and_text_is_refused(write: Write, tmp_path: Path):
    name = write("train.jsonl", [{"instruction": "?", "chosen": "yes", "rejected": "no"}])
    stated = load_dataset([name], TOKENIZER, data_format="alpaca", max_length=64, base_dir=tmp_path)
    plain = load_dataset([name], TOKENIZER, max_length=64, base_dir=tmp_path)
    assert stated.fingerprint == plain.fingerprint and stated.objective.name == "dpo"
    with pytest.raises(ConfigError, match=r"^data_format: got text; objective dpo reads a prompt and answers to it"):
        load_dataset([name], TOKENIZER, data_format="text", max_length=64, base_dir=tmp_path)


def test_group_when_a_part_would_be_several_samples_then_reports_it(write: Write, tmp_path: Path):
    """What an objective compares stays one sample a side."""
    answers = chat("one", "two")["messages"][1:]
    name = write(
        "train.jsonl", [{"prompt": "?", "chosen": answers, "rejected": [{"role": "assistant", "content": "no"}]}]
    )
    with pytest.raises(DataError, match=r"^train.jsonl line 1: has several answers .* Set mask_history"):
        load_dataset([name], TOKENIZER, objective="dpo", max_length=64, base_dir=tmp_path)


def test_data_when_virtual_tokens_leave_no_room_for_answers_then_the_error_explains_what_they_take(
    write: Write, tmp_path: Path
):
    adapter = AdapterSpec(method="prompt_tuning", num_virtual_tokens=60)
    with pytest.raises(DataError) as caught:
        load_job(write, tmp_path, [chat("a" * 30)], adapter=adapter)
    found = "1 have their answers past max_length 4. Of max_length 64, the adapter's virtual tokens take 60."
    assert str(caught.value).endswith(found)
