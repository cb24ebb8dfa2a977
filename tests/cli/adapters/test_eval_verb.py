"""`weft eval`."""

import json
import math
from pathlib import Path

import pytest
import torch
from tiny_adapters import LEAVES, tiny_tensors

from weft.adapters.parts import HEAD
from weft.data.load import load_dataset
from weft.model.source import load_tokenizer
from weft.objectives.heads import Classification
from weft.spec import AdapterSpec
from weft.store.peft_files import write_adapter

METRICS = "loss, perplexity, token-accuracy, exact-match"


def test_eval_when_run_then_compares_adapters_with_the_bare_model(weft, adapters: Path, echoes: Path):
    result = weft("eval", "--adapter", adapters / "strong", "--adapter", adapters / "idle", "--data", echoes, "--json")
    assert result.code == 0
    report = json.loads(result.out)
    assert (report["base_model"], report["num_samples"]) == ("tiny", 2)
    base, strong, idle = report["results"]
    assert [row["adapter"] for row in (base, strong, idle)] == ["base", "strong", "idle"]
    assert base["exact_match"] == idle["exact_match"] == 1.0
    assert strong["exact_match"] == 0.0
    assert base["loss"] == idle["loss"] < strong["loss"]
    assert strong["perplexity"] == pytest.approx(math.exp(strong["loss"]))
    assert base["token_accuracy"] == idle["token_accuracy"] == 1.0 > strong["token_accuracy"]


def test_eval_when_the_data_is_not_there_then_reports_it_before_the_model_is_loaded(refused):
    assert refused("eval", "--base-model", "./none", "--data", "gone.jsonl") == "gone.jsonl: there is no such file."


def test_eval_when_an_adapter_has_its_own_chat_template_then_it_is_measured_with_it(
    weft, adapters: Path, templated: Path, echoes: Path
):
    """Neither adapter changes the model, so what they read is all that differs."""
    result = weft("eval", "--adapter", templated, "--adapter", adapters / "idle", "--data", echoes, "--json")
    base, shouting, idle = json.loads(result.out)["results"]
    assert base["loss"] == idle["loss"] != shouting["loss"]
    assert base["exact_match"] == idle["exact_match"] == 1.0


def test_eval_when_metrics_and_a_limit_are_given_then_keeps_to_them(weft, rows: Path):
    chosen = "exact_match,token_accuracy,loss"
    result = weft("eval", "--base-model", "tiny", "--data", rows, "--metric", chosen, "--limit", 2)
    assert result.code == 0
    summary, header, base = result.out.splitlines()
    assert "2 samples (chat)" in summary
    assert header.split() == ["adapter", "exact", "match", "token", "accuracy", "loss"]
    assert base.split()[:2] == ["base", "0.0%"] and base.split()[2].endswith("%")


def test_eval_when_the_data_is_plain_text_then_measures_all_but_answers(weft, refused, tmp_path: Path):
    path = tmp_path / "text.jsonl"
    path.write_text('{"text": "a planet in a garden"}\n')
    report = json.loads(weft("eval", "--base-model", "tiny", "--data", path, "--json").out)
    assert report["results"][0].keys() == {"adapter", "loss", "perplexity", "token_accuracy"}
    command = refused("eval", "--base-model", "tiny", "--data", path, "--metric", "exact-match")
    assert command == f"{path}: has no answers to compare with, which exact-match needs."


def test_eval_when_the_data_is_pairs_then_measures_rewards_and_refuses_what_pairs_lack(
    weft, refused, adapters: Path, tmp_path: Path, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "200")
    path = tmp_path / "pairs.jsonl"
    path.write_text('{"prompt": "1+1=", "chosen": "2", "rejected": "window"}\n')
    command = ("eval", "--adapter", adapters / "idle", "--data", path)
    report = json.loads(weft(*command, "--json").out)
    base, idle = report["results"]
    assert report["objective"] == "dpo" and base["rewards/margins"] == idle["rewards/margins"] == 0.0
    assert base["loss"] == pytest.approx(math.log(2)) and "perplexity" not in base and "exact_match" not in base
    shown = weft(*command, "--objective", "simpo").out
    assert (
        "objective simpo (beta 2.0, loss_type sigmoid, label_smoothing 0.0, gamma 0.5), compared with nothing" in shown
    )
    assert "rewards/accuracies" in shown
    assert refused(*command, "--metric", "perplexity").startswith("--metric: perplexity is of single answers")
    assert refused(*command, "--objective", "dbo").endswith(". Did you mean dpo?")
    assert "which is not supported; the nearest is dpo." in refused(*command, "--objective", "ppo")


def test_eval_when_an_adapter_has_a_head_then_measures_its_classes_and_no_verb_lets_it_write(
    weft, refused, adapters: Path, tmp_path: Path
):
    path, mood = tmp_path / "texts.jsonl", tmp_path / "mood"
    path.write_text('{"text": "good", "label": "pos"}\n{"text": "bad", "label": "neg"}\n')
    spec = AdapterSpec(r=4, target_modules=tuple(LEAVES))
    tensors = {**tiny_tensors(0.0), HEAD: (torch.zeros(2, 192),)}
    classes = Classification(("neg", "pos"))
    write_adapter(mood, spec, tensors, base_model="tiny", target_names=LEAVES, head=classes)
    report = json.loads(weft("eval", "--adapter", mood, "--data", path, "--json").out)
    assert report["objective"] == "classification"
    (found,) = report["results"]
    assert found == {"adapter": "mood", "loss": pytest.approx(math.log(2)), "accuracy": 0.5, "f1": pytest.approx(1 / 3)}
    assert refused("generate", "--adapter", mood, "--prompt", "x").endswith("it classifies and does not write.")
    assert refused("export", mood, "--for", "vllm").endswith("it classifies and does not write.")
    assert "AutoModelForSequenceClassification.from_pretrained(" in (
        printed := weft("export", mood, "--for", "peft").out
    )
    assert "num_labels=2)" in printed
    assert "has a head for labels, for which a language model has no place" in refused(
        "merge", mood, "--out", tmp_path / "merged"
    )
    both = ("eval", "--adapter", mood, "--adapter", adapters / "idle", "--data", path)
    assert refused(*both) == "--adapter: mood has a head for labels and idle has none; measure them apart."


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--metric", "bleu"], f"--metric: got 'bleu'; accepted are {METRICS}."),
        (
            ["--metric", "loss,perplexty"],
            f"--metric: got 'perplexty'; accepted are {METRICS}. Did you mean perplexity?",
        ),
        (["--metric", ","], f"--metric: names none; accepted are {METRICS}."),
        (["--limit", "0"], "--limit: must be at least 1, got 0."),
    ],
)
def test_eval_when_an_option_is_wrong_then_names_it(refused, rows: Path, arguments: list[str], sentence: str):
    assert refused("eval", "--base-model", "tiny", "--data", rows, *arguments) == sentence


def test_eval_when_a_line_of_the_data_is_bad_then_names_it(refused, tmp_path: Path):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "x"}, {"role": "helper", "content": "y"}]}\n')
    sentence = refused("eval", "--base-model", "tiny", "--data", path)
    assert sentence.startswith(f"{path} line 1: messages[1].role is 'helper'")


def test_eval_when_an_answer_only_begins_like_the_reference_then_it_is_not_exact(weft, tmp_path: Path):
    path = tmp_path / "prefix.jsonl"
    path.write_text('{"prompt": "planet", "completion": "plane"}\n')
    report = json.loads(weft("eval", "--base-model", "tiny", "--data", path, "--metric", "exact-match", "--json").out)
    assert report["results"] == [{"adapter": "base", "exact_match": 0.0}]


def test_logits_when_written_then_jobs_read_the_adapters_logits_of_every_supervised_token(
    weft, refused, adapters: Path, echoes: Path, tmp_path: Path
):
    path = tmp_path / "printed.jsonl"
    result = weft("eval", "--adapter", adapters / "strong", "--data", echoes, "--logits", path, "--top-k", 3)
    assert result.code == 0 and result.out.endswith(f"logits  {path}\n")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    data = load_dataset([str(path)], load_tokenizer("tiny"), max_length=512, base_dir=Path())
    assert (data.objective.name, data.summary.format, len(data.samples)) == ("distillation", "tokens", len(rows))
    for row, sample in zip(rows, data.samples, strict=True):
        assert row["input_ids"] == sample.tokens.tolist()
        assert len(row["teacher_ids"]) == sample.num_supervised == sum(label != -100 for label in row["labels"])
        assert sample.teacher.ids.tolist() == row["teacher_ids"]
        assert all(logprobs == sorted(logprobs, reverse=True) for logprobs in row["teacher_logprobs"])
    report = json.loads(weft("eval", "--adapter", adapters / "strong", "--data", path, "--json").out)
    base, strong = report["results"]
    assert strong["teacher_agreement"] == 1.0 > base["teacher_agreement"] and strong["kl"] < base["kl"]
    command = ("eval", "--base-model", "tiny", "--data", echoes, "--logits")
    assert refused(*command, path) == f"--logits: {path} is there already; name another file."
    for wrong in (str(tmp_path / "a.txt"), "."):
        assert refused(*command, wrong) == f"--logits: got {wrong}; expected the name of a .jsonl file."
    assert refused(*command, tmp_path / "b.jsonl", "--top-k", 0) == "--top-k: must be from 1 to 1,000, got 0."
    held = ("eval", "--data", path, "--reference", adapters / "strong", "--adapter", adapters / "idle")
    assert refused(*held) == "--reference: the rows have the outputs of their teacher; leave it out."


def test_reference_when_it_is_an_adapter_then_students_are_measured_beside_it(
    weft, refused, adapters: Path, echoes: Path
):
    command = ("eval", "--adapter", adapters / "strong", "--adapter", adapters / "idle", "--data", echoes)
    taught = (*command, "--objective", "distillation", "--reference", adapters / "strong")
    base, strong, idle = json.loads(weft(*taught, "--json").out)["results"]
    assert strong["kl"] == 0.0 < base["kl"] == idle["kl"] and strong["teacher_agreement"] == 1.0
    assert "compared with strong" in weft(*taught).out
    assert (
        refused(*command, "--reference", adapters / "strong")
        == "--reference: objective supervised compares with nothing."
    )
