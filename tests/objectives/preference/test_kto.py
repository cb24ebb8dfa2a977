"""KTO: rows of good and bad answers, and the loss as it is written down."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_tokenizer import make_tokenizer

from weft.data.dataset import Dataset
from weft.data.load import load_dataset, load_job_data
from weft.errors import DataError
from weft.model.objective_loss import Groups
from weft.objectives.preference import Kto
from weft.spec import JobSpec

GOOD = {"prompt": "ask", "completion": "yes", "label": True}
BAD = {"prompt": "why", "completion": "no", "label": False}


def load(folder: Path, rows: list[Any], **settings: Any) -> Dataset:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_dataset(["rows.jsonl"], make_tokenizer(), max_length=64, base_dir=folder, **settings)


def test_rows_when_labels_are_true_and_false_then_kto_is_chosen_and_each_sample_has_its_label(tmp_path):
    data = load(tmp_path, [GOOD, BAD, {**GOOD, "prompt": "who"}])
    assert data.objective == Kto() and [sample.label for sample in data.samples] == [1.0, 0.0, 1.0]


def test_rows_when_they_are_pairs_then_each_becomes_a_good_and_a_bad_answer(tmp_path):
    rows = [{"prompt": "ask", "chosen": "yes", "rejected": "no"}, {**GOOD, "label": "False"}]
    data = load(tmp_path, rows, objective="kto")
    assert [sample.label for sample in data.samples] == [1.0, 0.0, 0.0]
    assert "chat template" not in data.summary.describe()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "completion": "b"}, "has no label; objective kto needs true or false for each answer."),
        ({**GOOD, "label": "maybe"}, "label is 'maybe'; expected true or false."),
        ({**GOOD, "label": 1}, "label is 1; expected true or false."),
        ({"prompt": "a", "chosen": "b"}, "has chosen and no rejected."),
    ],
)
def test_row_when_its_label_is_missing_or_odd_then_one_sentence_names_its_line(tmp_path, row, message):
    with pytest.raises(DataError) as refused:
        load(tmp_path, [GOOD, row], objective="kto")
    assert str(refused.value) == f"rows.jsonl line 2: {message}"


def test_job_when_every_label_is_the_same_then_is_refused(tmp_path):
    load(tmp_path, [GOOD, GOOD])
    job = JobSpec("tastes", ("rows.jsonl",))
    with pytest.raises(DataError, match=r"^tastes: train_data: every label is true; objective kto needs both\.$"):
        load_job_data(job, make_tokenizer(), tmp_path)


def test_job_when_the_only_bad_answer_is_split_off_then_is_refused(tmp_path):
    """Of eight orders of the rows, in one the bad answer stays and in another it goes to the evaluation."""
    load(tmp_path, [GOOD, GOOD, BAD, GOOD])
    ends = set()
    for seed in range(8):
        job = JobSpec("tastes", ("rows.jsonl",), eval_data=2, seed=seed, global_batch_size=1)
        try:
            labels = load_job_data(job, make_tokenizer(), tmp_path).train.samples.first_labels
            assert sorted(labels.tolist()) == [0.0, 1.0]
            ends.add("trained")
        except DataError as error:
            ends.add(str(error))
    assert ends == {
        "trained",
        "tastes: train_data: with eval_data split off, every label is true; objective kto needs both.",
    }


def test_members_when_read_then_each_prompt_also_has_the_next_rows_answer_within_the_limit(tmp_path):
    rows = [GOOD, {**BAD, "completion": "n" * 90}, {**GOOD, "prompt": "p" * 90, "completion": "y"}]
    data = load(tmp_path, rows[:2])
    own, mismatched = data.members(0)
    prompt, other = own.sample.tokens[: own.sample.first_supervised], data.samples[1]
    expected = np.concatenate([prompt, other.tokens[other.first_supervised :]])[:64]
    assert mismatched.sample.tokens.tolist() == expected.tolist()
    for group in range(data.num_groups):
        found = [member.sample.length for member in data.members(group)]
        assert found == data.member_lengths(group) and sum(found) <= data.longest_group
        assert all(member.sample.num_supervised for member in data.members(group))
    last = data.members(1)[1].sample
    assert last.tokens[last.first_supervised :].tolist() == own.sample.tokens[own.sample.first_supervised :].tolist()


def test_loss_when_compared_with_the_formula_then_it_and_its_slopes_are_equal():
    """TRL's loss of a microbatch of one answer."""
    objective = Kto(0.3, desirable_weight=1.5, undesirable_weight=0.5)
    generator = torch.Generator().manual_seed(1)
    lengths_S = torch.tensor([3, 2, 1, 4, 2, 2])
    logprobs_N, references_N = -torch.rand(2, 14, generator=generator) * 3
    logprobs_N.requires_grad_()
    labels_GM = torch.tensor([[1.0, math.nan], [0.0, math.nan], [0.0, math.nan]])
    loss = objective.likelihood_loss(Groups(logprobs_N, references_N, lengths_S, 2, labels_GM))
    gains = [piece.sum() for piece in (logprobs_N - references_N).split(lengths_S.tolist())]
    expected = []
    for own, other, label in zip(gains[::2], gains[1::2], (1, 0, 0), strict=True):
        kl = other.detach().clamp(min=0)
        expected.append(
            1.5 * (1 - torch.sigmoid(0.3 * (own - kl))) if label else 0.5 * (1 - torch.sigmoid(0.3 * (kl - own)))
        )
    torch.testing.assert_close(loss.losses_G, torch.stack(expected))
    slopes = torch.autograd.grad(torch.stack(expected).sum(), logprobs_N)[0]
    torch.testing.assert_close(loss.weights_N.detach(), -slopes)
    assert loss.metrics["rewards/chosen"].isnan().tolist() == [False, True, True]
