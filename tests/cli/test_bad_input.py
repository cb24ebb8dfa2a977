"""What users get wrong: each mistake is one sentence and exit code 2, and the disk is as it was before."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from bad_inputs import CASES, VERBS
from covering import chosen, each_value, slow
from input_case import CHAT, JOBS, Case
from tiny_adapters import LEAVES, tiny_tensors

from weft.cli.demo import SKILLS
from weft.errors import StorageError
from weft.model.source import TINY
from weft.spec import AdapterSpec
from weft.store import faults
from weft.store.faults import FaultPlan
from weft.store.peft_files import write_adapter
from weft.store.run_dir import RunDirectory, RunRecord


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copies of the embedded model, each spoilt in its own way."""
    folder = tmp_path_factory.mktemp("models")
    weights = (TINY / "model.safetensors").read_bytes()

    def spoilt(name: str, *without: str, **settings: object) -> Path:
        path = folder / name
        path.mkdir()
        for file in TINY.iterdir():
            if file.name not in without:
                (path / file.name).symlink_to(file)
        if settings:
            (path / "config.json").unlink()
            config = json.loads((TINY / "config.json").read_text())
            (path / "config.json").write_text(json.dumps({**config, **settings}))
        return path

    (folder / "file").write_text("a model?")
    spoilt("no_config", "config.json")
    (spoilt("broken_config", "config.json") / "config.json").write_text("{")
    spoilt("bad_setting", hidden_size="wide")
    spoilt("no_weights", "model.safetensors")
    (spoilt("pickled", "model.safetensors") / "pytorch_model.bin").write_bytes(b"\x80\x04N.")
    (spoilt("corrupt", "model.safetensors") / "model.safetensors").write_bytes(bytes(100))
    (spoilt("cut_short", "model.safetensors") / "model.safetensors").write_bytes(weights[:5000])
    spoilt("other_size", hidden_size=96)
    spoilt("more_layers", num_hidden_layers=7)
    spoilt("own_code", auto_map={"AutoModelForCausalLM": "mine.Model"})
    spoilt("unknown_type", model_type="lllama")
    spoilt("encoder_decoder", model_type="t5", is_encoder_decoder=True)
    spoilt("no_tokenizer", "tokenizer.json", "tokenizer_config.json")
    return folder


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters that do not fit the jobs."""
    folder = tmp_path_factory.mktemp("adapters")
    for rank in (2, 4):
        spec = AdapterSpec(r=rank, target_modules=tuple(LEAVES))
        tensors = tiny_tensors(0.1, rank=rank)
        write_adapter(folder / f"rank{rank}", spec, tensors, base_model="tiny", target_names=LEAVES)
    (folder / "pickled").mkdir()
    config = {"peft_type": "LORA", "target_modules": LEAVES}
    (folder / "pickled" / "adapter_config.json").write_text(json.dumps(config))
    (folder / "pickled" / "adapter_model.bin").write_bytes(b"\x80\x04N.")
    return folder


@pytest.fixture
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a jobs file that trains and its data; no network, and no wandb."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "jobs.yaml").write_text(JOBS)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in SKILLS["shout"].rows(0, 8)))
    return tmp_path


def look(directory: Path) -> dict[str, bytes | None]:
    """Everything below a directory, but for who looked into a run last."""
    found = sorted(path for path in directory.rglob("*") if not path.name.startswith(".owner-"))
    return {str(path.relative_to(directory)): None if path.is_dir() else path.read_bytes() for path in found}


Mistake = Callable[..., str]


@pytest.fixture
def mistake(weft, workdir: Path) -> Mistake:
    """Runs a command that must be refused with one sentence and change nothing; returns the sentence."""

    def run(*arguments: object) -> str:
        before = look(workdir)
        result = weft(*arguments)
        assert result.code == 2, result
        assert result.err.startswith("error: ")
        assert result.err.endswith("\n")
        assert result.err.count("\n") == 1
        assert look(workdir) == before
        return result.err.removeprefix("error: ").rstrip("\n")

    return run


def test_train_when_nothing_is_wrong_then_takes_the_file(weft, workdir: Path):
    """Without this, every case below might be refused for another reason than its own."""
    assert weft("train", "jobs.yaml", "--dry-run").code == 0
    assert sorted(look(workdir)) == ["jobs.yaml", "rows.jsonl"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_train_when_the_input_is_wrong_then_reports_it_in_a_sentence_and_writes_nothing(
    case: Case, mistake: Mistake, workdir: Path, models: Path, stored: Path
):
    folders = {"MODELS": str(models), "ADAPTERS": str(stored)}

    def filled(text: str) -> str:
        for word, folder in folders.items():
            text = text.replace(word, folder)
        return text

    old, new = case.edit
    assert not old or JOBS.count(old) == 1, "a case changes one line"
    (workdir / "jobs.yaml").write_text(case.text if case.text is not None else JOBS.replace(old, filled(new)))
    for name, content in case.files.items():
        (workdir / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    sentence = mistake("train", *case.args)
    first, *others = map(filled, case.messages)
    assert sentence.startswith(first)
    assert all(part in sentence for part in others), sentence


def test_cases_when_counted_then_are_many_and_different():
    assert len(CASES) >= 60
    assert len({(case.edit, case.text, case.args, tuple(case.files.items())) for case in CASES}) == len(CASES)


def test_train_when_there_is_no_gpu_to_train_on_then_reports_it(mistake: Mistake, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert mistake("train", "jobs.yaml", "device=cuda") == (
        "device: cuda needs a GPU, and torch sees none; use cpu or auto."
    )


def test_train_when_the_directory_is_not_writable_then_reports_it(
    mistake: Mistake, workdir: Path, monkeypatch: pytest.MonkeyPatch
):
    # Root may write anywhere, so the answer is made up.
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    assert mistake("train", "jobs.yaml") == f"out: {workdir} is not writable."


def test_train_when_an_option_is_unknown_then_shows_the_usage(weft, workdir: Path):
    before = look(workdir)
    for arguments, sentence in (
        (("train", "jobs.yaml", "--ouput", "x"), "No such option: --ouput"),
        (("train",), "Missing argument"),
        (("tarin", "jobs.yaml"), "No such command 'tarin'"),
    ):
        result = weft(*arguments)
        assert result.code == 2
        assert sentence in result.err
        assert "Traceback" not in result.err
    assert look(workdir) == before


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("plan jobs.yaml --layout auto --gpus 0", "--gpus: must be at least 1, got 0."),
        ("plan jobs.yaml --layout auto --gpus -1", "--gpus: must be at least 1, got -1."),
        ("plan jobs.yaml --layout auto --gpus 1025", "--gpus: must be at most 1024, got 1025."),
        ("sweep sweep.yaml --dry-run --gpus 1000000000", "--gpus: must be at most 1024, got 1000000000."),
        ("serve --api-processes 257", "--api-processes: must be at most 256, got 257."),
        ("plan jobs.yaml --stages two", "--stages: must be a whole number, got two."),
        ("plan jobs.yaml --steps 1.5", "--steps: must be a whole number, got 1.5."),
        ("sweep sweep.yaml --dry-run --gpus 0", "--gpus: must be at least 1, got 0."),
        ("serve --port 99999", "--port: must be at most 65535, got 99999."),
        ("serve --min-samples 0", "--min-samples: must be at least 1, got 0."),
        ("tune --rows 63", "--rows: must be at least 64, got 63."),
        ("tune --jobs jobs.yaml --steps 1001", "--steps: must be at most 1000, got 1001."),
        ("rank --wait -1", "--wait: must be at least 0, got -1."),
        ("rank --wait long", "--wait: must be a number, got long."),
    ],
)
def test_verb_when_an_option_cannot_have_its_value_then_one_sentence(mistake: Mistake, words: str, sentence: str):
    assert mistake(*words.split()) == sentence


@pytest.fixture(scope="module")
def trained() -> list[Path]:
    """Where the run of the jobs file lies, once the first test has trained it."""
    return []


@pytest.fixture
def finished(weft, workdir: Path, trained: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output directory of the jobs file, trained."""
    if not trained:
        assert weft("train", "jobs.yaml").code == 0
        trained.append(shutil.copytree(workdir / "out", tmp_path_factory.mktemp("trained") / "out"))
    else:
        shutil.copytree(trained[0], workdir / "out")
    return workdir / "out"


def test_train_when_the_directory_holds_a_run_then_offers_resume(mistake: Mistake, finished: Path):
    assert mistake("train", "jobs.yaml") == "out: already holds a run. Use --resume to go on with it, or another --out."


def test_train_when_resumed_with_other_settings_then_names_the_first(mistake: Mistake, finished: Path, workdir: Path):
    kept = "a resumed job keeps its settings."
    assert mistake("train", "jobs.yaml", "--resume", "jobs.two.lr=2e-3") == (
        f"jobs.two.lr=2e-3: jobs.1.learning_rate: was 0.001 and is 0.002; {kept}"
    )
    (workdir / "jobs.yaml").write_text(JOBS.replace("rank: 4", "rank: 8"))
    assert mistake("train", "jobs.yaml", "--resume") == (f"jobs.yaml line 6: jobs.0.adapter.r: was 4 and is 8; {kept}")
    (workdir / "jobs.yaml").write_text(JOBS.replace("name: two", "name: three"))
    assert mistake("train", "jobs.yaml", "--resume") == (
        "jobs.yaml line 7: jobs: the run in out has two, this file has one, three; "
        "a resumed run keeps its jobs and may have more."
    )
    (workdir / "jobs.yaml").write_text(JOBS.replace("tiny", "other/model"))
    assert mistake("train", "jobs.yaml", "--resume").startswith(
        "jobs.yaml line 1: base_model: the run in out has tiny,"
    )


def test_train_when_resumed_on_other_data_then_refuses_before_it_changes_anything(
    mistake: Mistake, finished: Path, workdir: Path
):
    status = finished / "two" / "status.json"
    status.write_text(status.read_text().replace("succeeded", "running"))
    (workdir / "rows.jsonl").write_text(CHAT * 8)
    assert mistake("train", "jobs.yaml", "--resume") == (
        "two: train_data is not what the checkpoint was trained on; start a new run."
    )


def test_train_when_another_run_is_in_the_directory_then_names_its_process(mistake: Mistake, workdir: Path):
    in_use = f"out: is in use by process {os.getpid()}. Wait for its end, or name another directory."
    with RunDirectory.open(workdir / "out", resume=False) as other:
        assert mistake("train", "jobs.yaml") == in_use
        other.write_run(RunRecord(base_model="tiny"))
        assert mistake("train", "jobs.yaml") == in_use
        assert mistake("train", "jobs.yaml", "--resume") == in_use
        assert mistake("train", "jobs.yaml", "base_model=none", "--dry-run").startswith("base_model none: there is no")


@pytest.mark.faults
@pytest.mark.parametrize("hit", chosen([1, 6, 12, 30, 43], 1, 4))
def test_train_when_the_disk_is_full_at_the_start_then_leaves_nothing(mistake: Mistake, workdir: Path, hit: int):
    faults.arm(FaultPlan("enospc", hit))
    try:
        sentence = mistake("train", "jobs.yaml")
    finally:
        faults.disarm()
    assert sentence.startswith("out")
    assert sentence.endswith(": the disk is full.")


@pytest.mark.faults
@pytest.mark.parametrize("point", ["checkpoint.write", slow("metrics.append")])
def test_train_when_the_disk_fills_up_later_then_the_run_can_be_resumed(weft, workdir: Path, point: str):
    faults.arm(FaultPlan("enospc", 1, point))
    try:
        result = weft("train", "jobs.yaml")
    finally:
        faults.disarm()
    assert result.code == 2
    assert result.err.count("\n") == 1
    assert "the disk is full." in result.err
    assert weft("train", "jobs.yaml", "--resume").code == 0
    assert (workdir / "out" / "two" / "adapter" / "adapter_config.json").is_file()


@pytest.mark.faults
def test_train_when_the_disk_stays_full_then_explains_how_to_go_on_though_there_is_no_report(
    weft, workdir: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(*_: object, **__: object) -> None:
        raise StorageError("the disk is full.", where="out/report.html")

    monkeypatch.setattr("weft.cli.watch.write_report", full)
    faults.arm(FaultPlan("enospc", 1, "checkpoint.write"))
    try:
        result = weft("train", "jobs.yaml")
    finally:
        faults.disarm()
    assert result.code == 2
    assert result.err.endswith("Free some space and go on with --resume.\n")


@pytest.mark.parametrize("arguments", VERBS, ids=" ".join)
def test_verb_when_the_input_is_wrong_then_reports_it_in_a_sentence_and_writes_nothing(
    mistake: Mistake, stored: Path, arguments: tuple[str, ...]
):
    given = [argument.replace("ADAPTERS", str(stored)) for argument in arguments]
    assert mistake(*given).startswith(VERBS[arguments].replace("ADAPTERS", str(stored)))


@pytest.mark.faults
@pytest.mark.parametrize(
    ("arguments", "hit"),
    each_value(
        [
            ("init", "new/jobs.yaml"),
            ("export", "ADAPTERS/rank4", "--for", "peft", "--out", "new/deep/copy"),
            ("merge", "ADAPTERS/rank4", "--out", "new/deep/model"),
            ("demo", "--out", "new/demo"),
        ],
        [1, 9, 17],
    ),
)
def test_verb_when_the_disk_is_full_then_leaves_nothing(
    mistake: Mistake, stored: Path, arguments: tuple[str, ...], hit: int
):
    faults.arm(FaultPlan("enospc", hit))
    try:
        sentence = mistake(*(argument.replace("ADAPTERS", str(stored)) for argument in arguments))
    finally:
        faults.disarm()
    assert sentence.endswith("the disk is full.")


def test_error_when_a_name_has_several_lines_then_is_still_one(mistake: Mistake):
    assert mistake("train", "no\nsuch\nfile.yaml").startswith("no such file.yaml: there is no such file.")


def test_fault_plan_when_it_is_nonsense_then_reports_it(mistake: Mistake, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WEFT_FAULTS", "burn")
    assert mistake("train", "jobs.yaml").startswith("'burn' is not a fault plan; ")
