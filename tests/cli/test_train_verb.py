"""`weft train` goes on where it can, and reports what it did."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from weft.cli.demo import SKILLS
from weft.engine import engine as engine_module
from weft.engine.events import StepDone
from weft.model.source import TINY
from weft.plan.cost.shape import capacities
from weft.report.live import LiveTable


def write_jobs(folder: Path, *, broken: bool) -> None:
    """Two jobs; the data of the second may be broken."""
    for name in ("shout", "reverse"):
        rows = "".join(json.dumps(row) + "\n" for row in SKILLS[name].rows(0, 12))
        (folder / f"{name}.jsonl").write_text(rows)
    if broken:
        (folder / "reverse.jsonl").write_text("{not json\n")
    (folder / "jobs.yaml").write_text(
        "base_model: tiny\n"
        "defaults: {max_steps: 2, global_batch_size: 2, max_length: 64, adapter: {r: 2}}\n"
        "jobs:\n"
        "  - {name: shout, train_data: shout.jsonl}\n"
        "  - {name: reverse, train_data: reverse.jsonl}\n"
    )


def state(job: str) -> str:
    return json.loads(Path("out", job, "status.json").read_text())["state"]


def reported_s(out: str) -> float:
    """The seconds of the last line of a command."""
    found = re.search(r"^time      ([\d.]+) s: ", out, re.MULTILINE)
    assert found is not None
    return float(found[1])


def test_report_when_a_run_was_resumed_then_counts_what_all_commands_have_reported(weft, tmp_path, monkeypatch):
    """To the end of each, with its report; what differs is rounded."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("weft.cli.train.process_start_s", time.perf_counter)
    write_jobs(tmp_path, broken=True)
    first = weft("train", "jobs.yaml", "--out", "out", "--keep-going").out
    (line,) = [line for line in first.splitlines() if line.startswith("time ")]
    assert line in weft("report", "out").out.splitlines()
    write_jobs(tmp_path, broken=False)
    second = weft("train", "jobs.yaml", "--out", "out", "--resume").out
    spent_s = json.loads(Path("out/time.json").read_text())["wall_s"]
    assert spent_s == pytest.approx(reported_s(first) + reported_s(second), abs=0.11)
    # The page is written before the second command ends, and rounds to whole seconds from ten on.
    page = Path("out/report.html").read_text(encoding="utf-8")
    (shown,) = re.findall(r"([\d.]+) s from the command", page)
    assert reported_s(first) - 0.55 <= float(shown) <= spent_s + 0.55


def test_train_when_its_lines_are_wider_than_what_reads_them_then_each_is_whole(weft, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_jobs(tmp_path, broken=False)
    words = ("train", "jobs.yaml", "device=cpu", "--dry-run")
    monkeypatch.setenv("COLUMNS", "1000")
    wide = [line for line in weft(*words).out.splitlines() if line.startswith(("backbone ", "kernels ", "capacity "))]
    monkeypatch.setenv("COLUMNS", "20")
    narrow = weft(*words).out.splitlines()
    assert len(wide) == 3 and all(line in narrow for line in wide)


def test_resume_when_a_job_set_aside_for_its_data_is_mended_then_it_is_trained(weft, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_jobs(tmp_path, broken=True)
    first = weft("train", "jobs.yaml", "--out", "out", "--keep-going")
    assert first.code == 1 and "reverse.jsonl line 1" in first.out
    assert (state("shout"), state("reverse")) == ("succeeded", "failed")
    assert re.search(r"^time      [\d,.]+ (s|min|h): .*loading", first.out, re.MULTILINE)
    before = json.loads(Path("out/time.json").read_text())
    assert before["computing_s"] > 0 and before["loading_s"] > 0 and before["writing_s"] > 0
    still = weft("train", "jobs.yaml", "--out", "out", "--resume")
    assert still.code == 2 and state("reverse") == "failed"
    write_jobs(tmp_path, broken=False)
    assert weft("train", "jobs.yaml", "--out", "out", "--resume").code == 0
    assert state("reverse") == "succeeded" and Path("out/reverse/adapter/adapter_config.json").exists()
    after = json.loads(Path("out/time.json").read_text())
    assert all(after[name] > before[name] for name in ("wall_s", "computing_s", "loading_s")), "sessions add up"
    assert after["wall_s"] == pytest.approx(sum(after.values()) - after["wall_s"])


def test_train_when_an_adapter_does_not_fit_and_the_others_are_to_go_on_then_only_its_job_fails(
    weft, tmp_path, monkeypatch
):
    """Corrected in the file, the job is trained when the run is resumed."""
    monkeypatch.chdir(tmp_path)
    write_jobs(tmp_path, broken=False)
    first = weft("train", "jobs.yaml", "jobs.reverse.adapter.r=5000", "--out", "out", "--keep-going")
    assert first.code == 1 and "reverse: failed: jobs.reverse.adapter.r=5000: " in first.out
    assert (state("shout"), state("reverse")) == ("succeeded", "failed")
    mended = weft("train", "jobs.yaml", "--out", "out", "--resume")
    assert mended.code == 0 and "takes over  reverse: adapter.r 5000 -> 2\n" in mended.out
    assert (state("shout"), state("reverse")) == ("succeeded", "succeeded")


def test_train_when_data_is_not_there_then_reports_it_before_the_model_is_loaded(weft, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_jobs(tmp_path, broken=False)
    Path("reverse.jsonl").unlink()
    found = weft("train", "jobs.yaml", "base_model=./none", "--out", "out")
    assert found.code == 2 and found.err.startswith("error: reverse.jsonl: there is no such file.")


def test_resume_when_every_job_has_ended_and_one_diverged_then_still_exits_with_1(weft, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_jobs(tmp_path, broken=False)
    wild = "jobs.reverse.learning_rate=1e10"
    assert weft("train", "jobs.yaml", wild, "--out", "out").code == 1
    again = weft("train", "jobs.yaml", wild, "--out", "out", "--resume")
    assert again.code == 1 and "nothing to resume" in again.out


def test_dry_run_when_the_run_is_endless_then_it_is_planned_all_the_same(weft, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_jobs(tmp_path, broken=False)
    plan = weft("train", "jobs.yaml", "jobs.shout.max_steps=1000000000", "--dry-run")
    assert plan.code == 0 and "1,000,000,000" in plan.out
    assert not Path("runs").exists()


def test_dry_run_when_its_directory_can_never_be_made_then_reports_it(weft, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_jobs(tmp_path, broken=False)
    before = sorted(os.listdir(tmp_path))
    for flags in (("--dry-run",), ()):
        result = weft("train", "jobs.yaml", "--out", "/proc/never/out", *flags)
        assert result.code == 2 and result.err.startswith("error: /proc/never")
        assert "backbone" not in result.out, "before anything is loaded"
    assert weft("train", "jobs.yaml", "--dry-run", "--out", "new/folder/out").code == 0
    assert sorted(os.listdir(tmp_path)) == before


def test_dry_run_when_the_output_directory_holds_a_run_then_reports_it_and_checks_all_the_same(
    weft, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    write_jobs(tmp_path, broken=False)
    assert weft("train", "jobs.yaml", "--out", "out").code == 0
    checked = weft("train", "jobs.yaml", "--out", "out", "--dry-run")
    assert checked.code == 0 and "note      out holds a run: train with --resume, or into another --out" in checked.out
    assert "holds a run" not in weft("train", "jobs.yaml", "--out", "out", "--dry-run", "--resume").out
    write_jobs(tmp_path, broken=True)
    assert weft("train", "jobs.yaml", "--out", "out", "--dry-run").code == 2


def test_train_when_one_of_several_jobs_has_bad_data_then_names_it_and_the_way_to_train_the_others(
    weft, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    write_jobs(tmp_path, broken=True)
    found = weft("train", "jobs.yaml")
    assert found.code == 2
    assert found.err.endswith("That is data of job reverse; --keep-going trains the others.\n")


def test_train_when_interrupted_then_the_way_on_has_the_same_flags(weft, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_jobs(tmp_path, broken=True)
    update = LiveTable.update

    def interrupting(table, event):
        update(table, event)
        if isinstance(event, StepDone):
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr(LiveTable, "update", interrupting)
        stopped = weft("train", "jobs.yaml", "--out", "out", "--keep-going")
    assert stopped.code == 130
    assert "go on with: weft train jobs.yaml --out out --resume --keep-going\n" in stopped.out
    for _ in range(2):
        again = weft("train", "jobs.yaml", "--out", "out", "--resume", "--keep-going")
        assert again.code == 1 and "reverse.jsonl line 1" in again.out
        assert (state("shout"), state("reverse")) == ("succeeded", "failed")


def test_train_when_a_batch_is_larger_than_the_data_then_reports_what_a_step_takes(weft, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_jobs(tmp_path, broken=False)
    found = weft("train", "jobs.yaml", "jobs.shout.global_batch_size=13", "defaults.global_batch_size=12", "--dry-run")
    assert found.code == 0
    notes = [line for line in found.out.splitlines() if line.startswith("note")]
    assert notes == ["note      shout: a batch of 13 samples is more than its data has; every step takes all 12."]


def test_train_when_a_setting_has_no_effect_then_reports_it(weft, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_jobs(tmp_path, broken=False)
    found = weft(
        "train",
        "jobs.yaml",
        "jobs.shout.eval_steps=3",
        "jobs.shout.warmup_steps=999",
        "tenant_weights={acme: 2, default: 1}",
        "--dry-run",
    )
    assert found.code == 0, found.err
    notes = [line for line in found.out.splitlines() if line.startswith("note")]
    assert notes == [
        "note      shout: eval_steps has no effect without eval_data.",
        "note      tenant_weights: no job is of tenant acme.",
        "note      shout: all of its 2 steps are warm-up (warmup_steps 999), below the learning rate.",
    ]


def test_train_when_memory_is_limited_on_a_cpu_then_accepts_a_size(weft, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_jobs(tmp_path, broken=False)
    found = weft("train", "jobs.yaml", "device=cpu", "--dry-run", "--memory-limit", "40GB")
    assert found.code == 0 and "memory_limit" not in found.out
    wrong = weft("train", "jobs.yaml", "--memory-limit", "lots")
    assert wrong.code == 2
    assert "memory_limit=lots: got lots; write a size such as 40GB" in " ".join(wrong.err.split())


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Whether the capacity is that of a GPU; the rest runs where it is."""

    def fake(is_gpu: bool) -> None:
        device = "cuda" if is_gpu else "cpu"
        monkeypatch.setattr(engine_module, "capacities", lambda given, _, longest: capacities(given, device, longest))

    return fake


def test_train_when_capacity_is_auto_then_it_is_chosen_once_and_kept_on_resume(weft, tmp_path, monkeypatch, on_a_gpu):
    """A run goes on with the number it began with, wherever it goes on, and its bits are those of a run left alone."""
    monkeypatch.chdir(tmp_path)
    write_jobs(tmp_path, broken=False)
    assert weft("train", "jobs.yaml", "--out", "whole").code == 0
    assert json.loads(Path("whole/run.json").read_text())["capacity"] == 2048
    write_jobs(tmp_path, broken=True)
    on_a_gpu(True)
    first = weft("train", "jobs.yaml", "--out", "out", "--keep-going")
    assert first.code == 1 and "capacity  8,192 tokens a microbatch" in first.out
    assert json.loads(Path("out/run.json").read_text())["capacity"] == 8192
    write_jobs(tmp_path, broken=False)
    on_a_gpu(False)
    other = weft("train", "jobs.yaml", "capacity=4096", "--out", "out", "--resume")
    assert other.code == 2 and "capacity=4096: the run in out has 8192, this file has 4096;" in other.err
    again = weft("train", "jobs.yaml", "--out", "out", "--resume")
    assert again.code == 0 and "capacity  8,192 tokens a microbatch" in again.out
    assert json.loads(Path("out/run.json").read_text())["capacity"] == 8192
    assert "8192 tokens" in Path("out/report.html").read_text()
    for job in ("shout", "reverse"):
        mine, alone = (Path(out, job, "adapter/adapter_model.safetensors").read_bytes() for out in ("out", "whole"))
        assert mine == alone


def test_dry_run_when_capacity_is_auto_then_it_holds_the_longest_sample_there_may_be(
    weft, tmp_path, monkeypatch, on_a_gpu
):
    monkeypatch.chdir(tmp_path)
    write_jobs(tmp_path, broken=False)
    assert "of up to 2,048 tokens" in weft("train", "jobs.yaml", "--dry-run").out
    shutil.copytree(TINY, "patient")
    config = json.loads(Path("patient/config.json").read_text())
    Path("patient/config.json").write_text(json.dumps({**config, "max_position_embeddings": 4096}))
    longer = ("train", "jobs.yaml", "base_model=patient", "jobs.shout.max_length=3000", "--dry-run")
    assert "of up to 4,096 tokens" in weft(*longer).out
    refused = weft(*longer, "capacity=2048")
    assert refused.code == 2 and "max_length 3000 is above the run's capacity of 2048 tokens" in refused.err
    on_a_gpu(True)
    assert "of up to 8,192 tokens" in weft("train", "jobs.yaml", "--dry-run").out
    assert "of up to 500 tokens" in weft("train", "jobs.yaml", "capacity=500", "--dry-run").out


@pytest.mark.parametrize(
    ("layout", "begins"), [(None, False), ("stages:1", False), ("spread:1", False), ("spread:2", True)]
)
def test_train_when_a_layout_is_one_device_then_nothing_is_begun_for_others(
    weft, tmp_path, monkeypatch, layout, begins
):
    monkeypatch.chdir(tmp_path)
    write_jobs(tmp_path, broken=False)
    begun: list[None] = []
    monkeypatch.setattr("weft.processes.prepare", lambda: begun.append(None))
    monkeypatch.setattr("weft.cli.train.train_order", lambda *given, **named: None)
    assert weft("train", "jobs.yaml", *(() if layout is None else ("--layout", layout))).code == 0
    assert bool(begun) == begins


def test_run_when_all_other_gpus_are_free_then_a_note_names_layouts_unless_replicas_were_given(
    weft, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr("weft.cli.layout_options.are_idle", lambda gpus: gpus == ["1"])
    monkeypatch.setattr("weft.cli.train.train_order", lambda *_, **__: sys.exit(0))
    write_jobs(tmp_path, broken=False)
    assert weft("train", "jobs.yaml").out.startswith("note      1 more GPU is free here: --layout auto ")
    for flags in (["--replicas", "2"], ["--devices", "1"], ["device=cpu"]):
        assert weft("train", "jobs.yaml", *flags).out == ""
