"""A resumed run refuses other inputs than it began with, before it writes anything, and goes on once they are back."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file, save_file
from tiny_adapters import LEAVES, tiny_tensors

from weft.model.source import TINY
from weft.spec import AdapterSpec
from weft.store.peft_files import write_adapter

STEP = {"max_steps": 4, "save_steps": 1, "save_total_limit": 4, "global_batch_size": 2}
ADAPTER = AdapterSpec(r=2, lora_alpha=4, target_modules=tuple(LEAVES))


def rows(path: Path, answer: str) -> None:
    lines = [{"prompt": f"count {i}", "completion": f"{answer} {i}"} for i in range(6)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def pairs(path: Path) -> None:
    lines = [{"prompt": f"name {i}", "chosen": f"yes {i}", "rejected": f"no {i}"} for i in range(6)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def adapter(path: Path, strength: float, spec: AdapterSpec = ADAPTER) -> None:
    shutil.rmtree(path, ignore_errors=True)
    write_adapter(path, spec, tiny_tensors(strength, rank=spec.r), base_model="model", target_names=LEAVES)


def make_inputs(folder: Path) -> None:
    shutil.copytree(TINY, folder / "model")
    rows(folder / "train.jsonl", "it is")
    rows(folder / "eval.jsonl", "it was")
    pairs(folder / "pairs.jsonl")
    for name, strength in (("before", 0.1), ("judge", 0.2), ("teacher", 0.3)):
        adapter(folder / name, strength)
    jobs = [
        {"name": "plain", "train_data": "train.jsonl", "eval_data": "eval.jsonl", "init_adapter": "before"},
        {"name": "pairs", "train_data": "pairs.jsonl", "objective": "dpo", "reference": "judge", "adapter": {"r": 2}},
        {"name": "taught", "train_data": "train.jsonl", "objective": "distillation", "teacher": "teacher"},
    ]
    jobs[2]["adapter"] = {"r": 2}
    run = {"base_model": "./model", "output_dir": "out", "jobs": [{**job, **STEP} for job in jobs]}
    (folder / "jobs.yaml").write_text(yaml.safe_dump(run))


@pytest.fixture(scope="module")
def trained() -> list[Path]:
    return []


@pytest.fixture
def stopped(weft, trained: list[Path], tmp_path: Path, tmp_path_factory, monkeypatch) -> Path:
    """The folder of a run whose jobs were killed after their second step."""
    monkeypatch.chdir(tmp_path)
    if trained:
        shutil.copytree(trained[0], tmp_path, dirs_exist_ok=True)
        return tmp_path
    make_inputs(tmp_path)
    result = weft("train", "jobs.yaml")
    assert result.code == 0, result
    for job in ("plain", "pairs", "taught"):
        for step in (3, 4):
            shutil.rmtree(tmp_path / "out" / job / "checkpoints" / f"step-{step:08d}")
        shutil.rmtree(tmp_path / "out" / job / "adapter")
        status = tmp_path / "out" / job / "status.json"
        status.write_text(status.read_text().replace("succeeded", "running"))
    trained.append(shutil.copytree(tmp_path, tmp_path_factory.mktemp("stopped") / "run"))
    return tmp_path


def files(folder: Path) -> dict[str, bytes]:
    """All files of a run but those that name the process that works there."""
    found = {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    return {name: data for name, data in found.items() if not name.startswith((".lock", ".owner-"))}


def scale(folder: Path) -> None:
    """The weights, and each of them only a little."""
    path = folder / "model" / "model.safetensors"
    save_file({name: tensor * 1.01 for name, tensor in load_file(path).items()}, path, {"format": "pt"})


def change(folder: Path, file: str, **settings: object) -> None:
    path = folder / "model" / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


TEMPLATE = json.loads((TINY / "tokenizer_config.json").read_text())["chat_template"]
MODEL = "the base model has changed since the run began ({}); put it back, or start a new run."
COMPARED = (
    "the adapter that the job compares with is not the one its checkpoint was trained with; put that back, or start"
)
CHANGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "weights": (scale, MODEL.format("weights")),
    "norm": (lambda f: change(f, "config.json", rms_norm_eps=1e-3), MODEL.format("config")),
    "tokenizer": (
        lambda f: change(f, "tokenizer_config.json", clean_up_tokenization_spaces=True),
        MODEL.format("tokenizer"),
    ),
    "template": (
        lambda f: change(f, "tokenizer_config.json", chat_template=f"{{# by another #}}{TEMPLATE}"),
        MODEL.format("chat template"),
    ),
    "evaluation": (
        lambda f: rows(f / "eval.jsonl", "it will be"),
        "plain: eval_data is not what the run began with; put that back, or start a new run.",
    ),
    "start": (
        lambda f: adapter(f / "before", 0.1, AdapterSpec(r=2, lora_alpha=8, target_modules=tuple(LEAVES))),
        "plain: init_adapter has another lora_alpha than when the run began; put that adapter back",
    ),
    "shape": (
        lambda f: adapter(f / "before", 0.1, AdapterSpec(r=4, lora_alpha=4, target_modules=tuple(LEAVES))),
        "plain: init_adapter has another r than when the run began; put that adapter back",
    ),
    "reference": (lambda f: adapter(f / "judge", 0.5), f"pairs: {COMPARED}"),
    "teacher": (lambda f: adapter(f / "teacher", 0.5), f"taught: {COMPARED}"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_resume_when_an_input_has_changed_then_refused_unwritten_and_goes_on_once_it_is_back(
    weft, stopped: Path, tmp_path_factory, name: str
):
    apply, sentence = CHANGES[name]
    kept = shutil.copytree(stopped, tmp_path_factory.mktemp("kept") / "run")
    apply(stopped)
    before = files(stopped / "out")
    for flags in ((), ("--dry-run",)):
        refused = weft("train", "jobs.yaml", "--resume", *flags)
        assert refused.code == 2 and refused.err.count("\n") == 1, refused
        assert sentence in refused.err
        assert files(stopped / "out") == before
    for path in kept.iterdir():
        if path.name == "out":
            continue
        if path.is_dir():
            shutil.rmtree(stopped / path.name)
            shutil.copytree(path, stopped / path.name)
        else:
            shutil.copy(path, stopped / path.name)
    result = weft("train", "jobs.yaml", "--resume")
    assert result.code == 0, result
    assert json.loads((stopped / "out" / "pairs" / "status.json").read_text())["state"] == "succeeded"


def test_dry_run_when_a_run_is_to_go_on_then_shows_what_is_left_and_writes_nothing(weft, stopped: Path):
    before = files(stopped / "out")
    shown = weft("train", "jobs.yaml", "--resume", "--dry-run", "jobs.0.save_steps=7")
    assert shown.code == 0, shown
    assert "takes over  plain: save_steps 1 -> 7" in shown.out
    refused = weft("train", "jobs.yaml", "--resume", "--dry-run", "jobs.0.learning_rate=0.5")
    assert refused.code == 2 and "a resumed job keeps its settings" in refused.err
    assert files(stopped / "out") == before


def test_resume_when_the_dtype_is_another_then_refused_as_for_quantize(weft, stopped: Path):
    before = files(stopped / "out")
    refused = weft("train", "jobs.yaml", "--resume", "dtype=bfloat16")
    assert refused.code == 2
    assert "was trained with dtype float32, the backbone is loaded with bfloat16" in refused.err
    assert files(stopped / "out") == before


def test_resume_when_the_run_is_of_a_version_without_digests_then_it_goes_on(weft, stopped: Path):
    """What is not recorded is not compared; the checkpoints then written have all of it."""
    import hashlib

    names = ("weights", "config", "tokenizer", "chat_template")
    for path in stopped.glob("out/*/checkpoints/*/state.json"):
        content = json.loads(path.read_text())["content"]
        content["environment"] = {k: v for k, v in content["environment"].items() if k not in names}
        content["state"] = {k: v for k, v in content["state"].items() if k not in ("eval_data", "adapter")}
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        path.write_text(json.dumps({"format": 1, "sha256": digest, "content": content}))
    scale(stopped)
    result = weft("train", "jobs.yaml", "--resume")
    assert result.code == 0, result
    newest = json.loads((stopped / "out" / "plain" / "checkpoints" / "step-00000004" / "state.json").read_text())
    assert {*names} <= newest["content"]["environment"].keys()
