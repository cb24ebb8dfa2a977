"""Sources of which only a share or the first rows are wanted."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_data import supervised_text
from tiny_tokenizer import make_tokenizer

from weft.data.dataset import Dataset
from weft.data.load import load_dataset, load_job_data
from weft.data.order import BatchSchedule
from weft.errors import DataError
from weft.spec import JobSpec
from weft.spec.job import SourceSpec

Write = Callable[..., str]
TOKENIZER = make_tokenizer()


@pytest.fixture(autouse=True)
def _kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is prepared is kept, so that other data must have another key."""
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "cache"))


def test_mixture_when_loaded_then_each_source_keeps_its_samples_and_shares_are_reported(write: Write, tmp_path: Path):
    """Also after a split, which takes rows of all sources."""
    for name, number in (("a.jsonl", 8), ("b.jsonl", 4)):
        write(name, [{"prompt": "ask", "completion": f"{name} {i}"} for i in range(number)])
    sources = [{"path": "a.jsonl", "weight": 1}, {"path": "b.jsonl", "weight": 3, "rows": 3}]
    job = JobSpec("mixed", sources, eval_data=2, max_length=64)  # type: ignore[arg-type]
    data = load_job_data(job, TOKENIZER, tmp_path)
    sizes = data.train.sizes
    assert data.eval is not None and sum(sizes) == 9 and sum(data.eval.sizes) == 2
    names = [supervised_text(sample, TOKENIZER)[0][:7] for sample in data.train.samples]
    assert names == ["a.jsonl"] * sizes[0] + ["b.jsonl"] * sizes[1]
    shares = f"an epoch takes 2 from a.jsonl (which has {sizes[0]}), 7 from b.jsonl (which has {sizes[1]})"
    assert data.train.summary.notes == (shares,)
    again = load_job_data(replace(job, eval_data=None), TOKENIZER, tmp_path)
    assert again.train.sizes == (8, 3)


def test_rows_when_only_the_first_are_wanted_then_what_follows_them_is_not_looked_at(write: Write, tmp_path: Path):
    """A later line may be wrong; other rows after it are the same data, another number is not."""
    rows = [{"prompt": "ask", "completion": str(i)} for i in range(4)]
    name = write("a.jsonl", "\n\n".join(json.dumps(row) for row in rows) + "\nnot json\n")

    def load(number: int) -> Dataset:
        return load_dataset([SourceSpec(name, rows=number)], TOKENIZER, max_length=64, base_dir=tmp_path)

    assert [len(load(number).samples) for number in (1, 4, 2)] == [1, 4, 2]
    with pytest.raises(DataError, match=r"^a\.jsonl line 8: is not valid JSON"):
        load(5)


@pytest.mark.parametrize(("eval_data", "num_train", "num_eval"), [(None, 6, 0), (2, 6, 2), (0.25, 6, 2)])
def test_streamed_source_when_steps_are_limited_then_only_the_rows_they_take_are_read(
    eval_data: float | None, num_train: int, num_eval: int, write: Write, tmp_path: Path
):
    """In the order of the file; what follows, right or wrong, is not looked at. Each is met once."""
    rows = [{"prompt": "ask", "completion": str(i)} for i in range(num_train + num_eval)]
    name = write("a.jsonl", "".join(json.dumps(row) + "\n" for row in rows) + "not json\n")
    sources = [{"path": name, "streaming": True}]
    job = JobSpec("j", sources, eval_data=eval_data, max_steps=3, global_batch_size=2, max_length=64)  # type: ignore[arg-type]
    data = load_job_data(job, TOKENIZER, tmp_path)
    assert len(data.train.samples) == num_train
    assert (0 if data.eval is None else len(data.eval.samples)) == num_eval
    order = BatchSchedule.of(job, *data.train.sizes)
    assert sorted(int(i) for step in range(3) for i in order.batch(step)) == list(range(num_train))


def test_streamed_source_when_it_ends_early_then_all_of_it_is_read(write: Write, tmp_path: Path):
    name = write("a.jsonl", [{"prompt": "ask", "completion": "yes"}] * 3)
    job = JobSpec("j", (SourceSpec(name, streaming=True),), max_steps=10, max_length=64)
    assert len(load_job_data(job, TOKENIZER, tmp_path).train.samples) == 3
