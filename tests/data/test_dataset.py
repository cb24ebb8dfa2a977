from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_data import supervised_text
from transformers import PreTrainedTokenizerFast

from weft.data.dataset import Dataset
from weft.data.load import load_dataset, load_job_data
from weft.data.order import BatchSchedule
from weft.data.samples import Sample, Samples
from weft.errors import DataError
from weft.spec import JobSpec

Write = Callable[..., str]


def pairs(*answers: str) -> list[dict[str, str]]:
    return [{"prompt": "ask", "completion": answer} for answer in answers]


@pytest.fixture
def load(write: Write, tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> Callable[..., Dataset]:
    def load_rows(rows: list[Any], **settings: Any) -> Dataset:
        name = write("train.jsonl", rows)
        return load_dataset([name], tokenizer, **{"max_length": 64, **settings}, base_dir=tmp_path)

    return load_rows


def test_dataset_when_loaded_then_the_summary_counts_it(
    load: Callable[..., Dataset], tokenizer: PreTrainedTokenizerFast
):
    data = load(pairs("yes", "maybe"))
    lengths = [sample.length for sample in data.samples]
    assert [supervised_text(sample, tokenizer) for sample in data.samples] == [
        ["yes<|im_end|>\n"],
        ["maybe<|im_end|>\n"],
    ]
    summary = data.summary
    assert (summary.sources, summary.format, summary.num_rows, summary.num_samples) == (
        ("train.jsonl",),
        "completion",
        2,
        2,
    )
    assert (summary.num_tokens, summary.num_supervised_tokens) == (sum(lengths), 3 + 5 + 2 * 2)
    assert (summary.min_length, summary.mean_length, summary.max_length) == (lengths[0], lengths[0] + 1, lengths[0] + 2)
    assert summary.describe() == (
        f"train.jsonl: 2 samples (completion); {sum(lengths)} tokens, 12 supervised, "
        f"lengths {lengths[0]} to {lengths[1]}, mean {lengths[0] + 1}"
    )


def test_long_samples_when_truncated_then_are_cut_and_counted(load: Callable[..., Dataset]):
    data = load(pairs("yes", "long " * 20))
    assert [sample.length for sample in data.samples][1] == 64
    assert (data.summary.num_truncated, data.summary.max_length) == (1, 64)
    assert "1 cut to 64 tokens" in data.summary.describe()


def test_long_samples_when_dropped_then_are_counted(load: Callable[..., Dataset]):
    data = load(pairs("yes", "long " * 20), long_samples="drop")
    assert (data.summary.num_samples, data.summary.num_rows, data.summary.num_dropped_long) == (1, 2, 1)
    assert "1 over 64 tokens dropped" in data.summary.describe()


def test_long_samples_when_an_error_then_names_the_line_and_both_lengths(load: Callable[..., Dataset]):
    length = load(pairs("yes")).samples[0].length + 97
    with pytest.raises(DataError, match=rf"^train\.jsonl line 2: has {length} tokens, but max_length is 64\."):
        load(pairs("yes", "y" * 100), long_samples="error")


def test_sample_when_its_answer_is_past_the_limit_then_is_dropped_and_counted(load: Callable[..., Dataset]):
    data = load([{"prompt": "q" * 100, "completion": "a"}, *pairs("yes")])
    assert (data.summary.num_samples, data.summary.num_dropped_unsupervised, data.summary.num_truncated) == (1, 1, 0)
    assert "1 with nothing to learn dropped" in data.summary.describe()


def test_sample_when_blank_or_untrained_then_is_dropped_and_counted(load: Callable[..., Dataset]):
    assert load([{"text": "once"}, {"text": " "}]).summary.num_dropped_unsupervised == 1
    quiet = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0}]
    loud = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert load([{"messages": quiet}, {"messages": loud}]).summary.num_dropped_unsupervised == 1


def test_dataset_when_nothing_is_left_then_the_error_explains_why(load: Callable[..., Dataset]):
    with pytest.raises(DataError) as caught:
        load([{"prompt": "q" * 100, "completion": "a"}] * 2)
    assert str(caught.value) == (
        "train.jsonl: there are no supervised tokens to train on: of 2 rows, 2 have their answers past max_length 64."
    )
    with pytest.raises(DataError, match=r"of 2 rows, 2 are longer than max_length 64 and were dropped"):
        load(pairs("y" * 100, "z" * 100), long_samples="drop")
    with pytest.raises(DataError, match=r"of 1 rows, 1 have no trained turn or text"):
        load([{"text": " "}])


def test_dataset_when_trained_on_inputs_then_all_but_the_first_token_count(load: Callable[..., Dataset]):
    data = load(pairs("yes"), train_on_inputs=True)
    assert data.summary.num_supervised_tokens == data.summary.num_tokens - 1


def test_dataset_when_tokens_are_given_then_they_are_kept(load: Callable[..., Dataset]):
    data = load([{"input_ids": [1, 2, 3], "labels": [-100, -100, 3]}])
    assert data.samples[0].tokens.tolist() == [1, 2, 3]
    assert data.samples[0].supervised.tolist() == [False, False, True]
    assert data.summary.format == "tokens"


def test_dataset_when_sources_have_several_formats_then_each_is_read_its_own_way(
    write: Write, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
):
    names = [write("a.jsonl", pairs("yes")), write("b.csv", "instruction,output\ngo,ok\n"), write("c.txt", "once\n")]
    data = load_dataset(names, tokenizer, max_length=64, base_dir=tmp_path)
    assert data.summary.format == "completion, alpaca, text"
    assert data.summary.num_samples == 3


def test_dataset_when_the_template_ignores_tools_then_a_note_reports_it(load: Callable[..., Dataset]):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    data = load([{"messages": messages, "tools": [{"name": "f"}]}, {"messages": messages}])
    assert data.summary.notes == ("the chat template has no place for the tools of 1 row",)


@pytest.mark.parametrize("name", ["reasoning_content", "thinking"])
def test_dataset_when_the_template_ignores_thoughts_then_a_note_reports_it(load: Callable[..., Dataset], name):
    question = {"role": "user", "content": "a"}
    rows = [{"messages": [question, {"role": "assistant", "content": "b", name: text}]} for text in ("hm", "", None)]
    (note,) = load(rows).summary.notes
    assert note.startswith("the thoughts of 1 row (reasoning_content, ") and "a template that reads them" in note
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b", name: "hm"}]
    beside = {"prompt": "a", "completion": "b", name: "hm"}
    assert [load([row]).summary.notes for row in ({"conversations": turns}, beside)] == [(note,), (note,)]
    rows.append({"messages": [question, {"role": "assistant", "content": "b"}]})
    shown = "{% for m in messages %}{{ m." + name + " }}{{ m.content }}{% endfor %}"
    assert load(rows, chat_template=shown).summary.notes == ()


def test_dataset_when_the_prompt_of_an_answer_ends_in_more_than_its_turn_shows_then_a_note_reports_it(
    load: Callable[..., Dataset],
):
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ '<think>\n' if add_generation_prompt }}"
    (note,) = load(pairs("yes"), chat_template=template).summary.notes
    assert note == "answers are trained after '<think>\\n', which the chat template opens every answer with"
    assert load(pairs("yes"), chat_template=template, train_on_inputs=True).summary.notes == ()


def test_fingerprint_when_data_or_mask_changes_then_changes(load: Callable[..., Dataset]):
    data = load(pairs("yes", "no"))
    assert len(data.fingerprint) == 64
    assert data.fingerprint == load(pairs("yes", "no")).fingerprint
    others = [load(pairs("yes", "on")), load(pairs("no", "yes")), load(pairs("yes", "no"), train_on_inputs=True)]
    assert len({data.fingerprint, *(other.fingerprint for other in others)}) == 4


def test_fingerprint_when_only_the_borders_of_samples_differ_then_differs():
    nothing = [Sample(np.zeros(length), np.zeros(length)) for length in (1, 1, 1, 1, 1, 5)]
    five, one = Dataset.of(nothing[:5], "five"), Dataset.of(nothing[5:], "one")
    assert five.fingerprint != one.fingerprint


def job(write: Write, rows: list[Any], **settings: Any) -> JobSpec:
    return JobSpec(name="job", train_data=(write("train.jsonl", rows),), **settings)


@pytest.mark.parametrize(("amount", "num_eval"), [(0.25, 5), (3, 3), (4.0, 4), (0.95, 19)])
def test_eval_split_when_an_amount_is_given_then_is_drawn_by_the_seed(
    amount: float, num_eval: int, write: Write, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
):
    spec = job(write, pairs(*(f"answer {i:02}" for i in range(20))), eval_data=amount, seed=3)
    first, again = load_job_data(spec, tokenizer, tmp_path), load_job_data(spec, tokenizer, tmp_path)
    assert first.eval is not None
    assert again.eval is not None
    assert (first.eval.summary.num_samples, first.train.summary.num_samples) == (num_eval, 20 - num_eval)
    assert (first.eval.fingerprint, first.train.fingerprint) == (again.eval.fingerprint, again.train.fingerprint)
    met = [supervised_text(s, tokenizer)[0] for s in (*first.train.samples, *first.eval.samples)]
    assert sorted(met) == [f"answer {i:02}<|im_end|>\n" for i in range(20)]
    train_only = [supervised_text(s, tokenizer)[0] for s in first.train.samples]
    assert train_only == sorted(train_only)


def test_eval_split_when_the_seed_differs_then_differs(
    write: Write, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
):
    rows = pairs(*(f"answer {i:02}" for i in range(20)))
    prints = {
        data.fingerprint
        for seed in range(4)
        if (data := load_job_data(job(write, rows, eval_data=5, seed=seed), tokenizer, tmp_path).eval)
    }
    assert len(prints) == 4


def test_eval_split_when_jobs_split_alike_then_each_side_is_hashed_once(
    write: Write, tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
):
    spec = job(write, pairs(*(f"answer {i:02}" for i in range(20))), eval_data=5)
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "cache"))
    hashed: list[int] = []
    monkeypatch.setattr(Samples, "feed", lambda samples, digest: hashed.append(len(samples)))
    kept = [load_job_data(spec, tokenizer, tmp_path) for _ in range(3)]
    assert all(part is not None and part.fingerprint for data in kept for part in (data.train, data.eval))
    assert sorted(hashed) == [5, 15, 20], "and all samples once, when they are prepared"


@pytest.mark.parametrize(
    ("amount", "found"),
    [
        (0.1, "job: eval_data: 0.1 of 3 samples leaves no sample to evaluate on."),
        (0.9, "job: eval_data: 0.9 of 3 samples leaves no sample to train on."),
        (3, "job: eval_data: 3 of 3 samples leaves no sample to train on."),
    ],
)
def test_eval_split_when_a_side_is_empty_then_names_it(
    amount: float, found: str, write: Write, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
):
    with pytest.raises(DataError) as caught:
        load_job_data(job(write, pairs("a", "b", "c"), eval_data=amount), tokenizer, tmp_path)
    assert str(caught.value).startswith(found)


def test_eval_data_when_files_are_named_then_they_are_read(
    write: Write, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
):
    write("test.jsonl", pairs("c"))
    data = load_job_data(job(write, pairs("a", "b"), eval_data=("test.jsonl",)), tokenizer, tmp_path)
    assert data.train.summary.num_samples == 2
    assert data.eval is not None
    assert data.eval.summary.sources == ("test.jsonl",)
    assert load_job_data(job(write, pairs("a")), tokenizer, tmp_path).eval is None


@pytest.mark.parametrize("setting", ["train_data", "eval_data"])
def test_data_when_a_file_is_bad_then_the_error_has_the_setting_that_named_it(
    setting: str, write: Write, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
):
    """A service derives from it which of two files its user has to correct."""
    write("test.jsonl", pairs("c"))
    spec = job(write, pairs("a"), eval_data=("test.jsonl",))
    write("test.jsonl" if setting == "eval_data" else "train.jsonl", [{"prompt": "ask"}])
    with pytest.raises(DataError) as caught:
        load_job_data(spec, tokenizer, tmp_path)
    assert caught.value.setting == setting


def test_forward_tokens_when_a_reference_is_read_then_once_for_each_sample_or_each_time_if_nothing_is_kept(
    write: Write, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
):
    """Evaluations run every time; a reference's results for a sample are known after that, if there is room."""

    def forward(rows: list[Any], **settings: Any) -> tuple[int, int, int]:
        """Tokens that run forward alone in ten steps of two of four groups, and those of both parts of the data."""
        spec = job(write, rows, max_steps=10, global_batch_size=2, eval_data=1, eval_steps=5, **settings)
        data = load_job_data(spec, tokenizer, tmp_path)
        assert data.eval is not None
        order = BatchSchedule.of(spec, *data.train.sizes)
        assert (order.num_steps, data.train.num_groups) == (10, 4)
        sizes = (int(part.group_tokens.sum()) for part in (data.train, data.eval))
        return data.forward_tokens(order, spec.eval_steps), *sizes

    found, _, evaluated = forward(pairs("a", "bb", "ccc", "dddd", "eeeee"))
    assert found == 2 * evaluated
    preferences = [{"prompt": "ask", "chosen": "yes" * n, "rejected": "no"} for n in range(1, 6)]
    found, trained, evaluated = forward(preferences)
    assert found == trained + evaluated + 2 * evaluated
    found, trained, evaluated = forward(pairs("a", "a", "a", "a", "a"), objective="distillation", teacher="base")
    assert found == 5 * trained + 2 * evaluated + 2 * evaluated


def test_data_when_imported_then_neither_torch_nor_an_extra_is():
    code = (
        "import sys, weft.data.load; "
        "print([m for m in ('torch', 'transformers', 'pyarrow', 'datasets') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
