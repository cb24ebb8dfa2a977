"""Classes of texts and of words: found in the data, named by its lines, and kept through truncation."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_tokenizer import make_tokenizer

from weft.data.dataset import JobData
from weft.data.load import load_job_data
from weft.errors import ConfigError, DataError
from weft.objectives.heads import Classification, TokenClassification
from weft.objectives.objective import MetricTotals
from weft.spec import JobSpec

TEXTS = [{"text": "good", "label": "pos"}, {"sentence": "bad", "label": "neg"}, {"prompt": "so so", "labels": "pos"}]
WORDS = [{"tokens": ["Anna", "sings"], "ner_tags": [1, 0]}, {"words": ["who", "Tom"], "tags": [-100, 2]}]


def load(folder: Path, rows: list[Any], objective: str = "classification", **settings: Any) -> JobData:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = JobSpec("job", ("rows.jsonl",), objective=objective, **settings)
    return load_job_data(job, make_tokenizer(), folder)


def test_texts_when_labels_are_words_then_classes_go_by_their_letters_and_the_last_token_has_them(tmp_path):
    data = load(tmp_path, TEXTS).train
    assert data.objective == Classification(("neg", "pos"))
    assert [sample.label for sample in data.samples] == [1.0, 0.0, 1.0]
    first = data.samples[0]
    assert first.tokens.tolist() == make_tokenizer().encode("good", add_special_tokens=True)
    assert np.flatnonzero(first.supervised).tolist() == [first.length - 1] and first.num_supervised == 1


def test_texts_when_labels_are_numbers_then_all_up_to_the_largest_are_classes(tmp_path):
    rows = [{"text": "a", "label": "2"}, {"text": "b", "label": 0}, {"text": "c", "label": 2.0}]
    data = load(tmp_path, rows).train
    assert data.objective == Classification(("0", "1", "2")) and [s.label for s in data.samples] == [2.0, 0.0, 2.0]
    assert data.summary.notes == ("objective classification", "3 classes, of which the rows have 2: 0, 1, 2")
    assert load(tmp_path, TEXTS).train.summary.describe().endswith("; 2 classes: neg, pos")
    far = load(tmp_path, [{"text": "a", "label": 0}, {"text": "b", "label": 40}]).train.summary.notes[1]
    assert far == "41 classes, of which the rows have 2: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, …, 40"


@pytest.mark.parametrize("objective", ["reward", "classification", "token_classification"])
def test_job_when_it_learns_by_a_head_and_is_to_learn_from_texts_then_is_refused(objective):
    with pytest.raises(ConfigError) as refused:
        JobSpec("job", ("rows.jsonl",), objective=objective, train_on_inputs=True)
    assert str(refused.value) == (
        f"train_on_inputs: is a setting of supervised, weighted and distillation; the objective is {objective}."
    )


def test_texts_when_cut_then_the_last_token_that_is_left_has_the_label(tmp_path):
    data = load(tmp_path, [*TEXTS, {"text": "long " * 40, "label": "neg"}], max_length=16).train
    last = data.samples[3]
    assert last.length == 16 and last.labels is not None and last.labels[-1] == 0.0 and last.num_supervised == 1
    assert data.summary.num_truncated == 1


def test_words_when_they_have_tags_then_the_first_token_of_each_has_its_class(tmp_path):
    data = load(tmp_path, WORDS, "token_classification").train
    assert isinstance(data.objective, TokenClassification) and data.objective.labels == ("0", "1", "2")
    first, second = data.samples
    assert first.labels is not None and second.labels is not None
    assert [x for x in first.labels.tolist() if not math.isnan(x)] == [1.0, 0.0]
    assert [x for x in second.labels.tolist() if not math.isnan(x)] == [2.0]


@pytest.mark.parametrize(
    ("objective", "row", "message"),
    [
        ("classification", {"text": "a"}, "label is missing."),
        ("classification", {"label": "pos"}, "text is missing."),
        ("classification", {"text": 7, "label": "pos"}, "the text is 7; expected text."),
        ("classification", {"text": "a", "label": -1}, "label is -1; expected a text or a number from 0 up."),
        ("token_classification", {"tokens": ["a"], "ner_tags": [1, 2]}, "ner_tags has 2 items, but tokens has 1."),
        ("token_classification", {"tokens": "a b", "ner_tags": [1]}, "tokens is 'a b'; expected a list of words."),
        ("token_classification", {"tokens": ["a"], "ner_tags": "O"}, "ner_tags is 'O'; expected a list with one item"),
    ],
)
def test_row_when_it_is_wrong_then_one_sentence_names_its_line(tmp_path, objective, row, message):
    with pytest.raises(DataError) as refused:
        load(tmp_path, [*(TEXTS if objective == "classification" else WORDS), row], objective)
    number = 4 if objective == "classification" else 3
    assert str(refused.value).startswith(f"rows.jsonl line {number}: {message}")


def test_label_when_the_job_names_others_then_is_refused_with_what_was_meant(tmp_path):
    with pytest.raises(DataError) as refused:
        load(tmp_path, [*TEXTS, {"text": "a", "label": "poss"}], labels=("neg", "pos"))
    expected = "rows.jsonl line 4: label is 'poss'; accepted are neg, pos. Did you mean pos?"
    assert str(refused.value) == expected


def test_labels_when_there_is_only_one_then_job_and_data_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"^rows.jsonl: has only the label 'pos'; objective classification needs two"):
        load(tmp_path, TEXTS[:1])
    with pytest.raises(ConfigError, match=r"^labels: got a, a; expected two or more different names\.$"):
        JobSpec("job", ("rows.jsonl",), objective="classification", labels=("a", "a"))


def test_f1_when_classes_are_unevenly_right_then_is_the_mean_over_those_that_occur():
    """Class 0 has one hit, one miss and one false alarm, class 1 a hit and a false alarm, class 2 only a miss."""
    objective, tally = Classification(("a", "b", "c", "d")), MetricTotals()
    for right, predicted in ((0, 0), (0, 1), (1, 1), (2, 0)):
        tally.add(objective.score(right, 0.5, [predicted]))
    means = tally.means()
    assert means.further == {"accuracy": 0.5, "f1": pytest.approx((2 / 4 + 2 / 3 + 0) / 3)}
