"""A method and an objective are added as CONTRIBUTING's tables state, and then pass the same tests as the others."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TOYS = ROOT / "tests" / "toys"
METHOD = {"config.py": "kron_config.py.txt", "method.py": "kron_method.py.txt"}
JOBS = """
base_model: tiny
output_dir: {out}
defaults: {{train_data: rows.jsonl, max_steps: 3, global_batch_size: 2, max_length: 64, adapter: {{method: lora}}}}
jobs:
{jobs}
"""
PLAIN = "- {name: plain, adapter: {r: 4}}"
KRON = "- {name: kron, adapter: {method: kron, kron_scale: 0.7}}"
FOCAL = "- {name: focal, objective: focal, focal_gamma: 1.5, adapter: {r: 4}}"


def table(title: str) -> list[str]:
    """The files of the package in one of CONTRIBUTING's tables."""
    section = (ROOT / "CONTRIBUTING.md").read_text().split(f"### {title}\n")[1].split("\n### ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `src/")]
    return [path for row in rows for path in re.findall(r"`src/weft/(.*?)`", row)]


def register(registry: Path, line: str, *edits: tuple[str, str]) -> None:
    """Adds an import to a registry, and to its lines whatever stands after each of some texts."""
    text = registry.read_text().replace("\nfrom weft.", f"\n{line}\nfrom weft.", 1)
    for after, added in edits:
        assert after in text
        text = text.replace(after, after + added, 1)
    registry.write_text(text)


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """The package with both toys, in a folder of its own."""
    package = tmp_path_factory.mktemp("toys") / "weft"
    shutil.copytree(ROOT / "src" / "weft", package, ignore=shutil.ignore_patterns("__pycache__"))
    folder, also, registry = table("A PEFT method")
    assert (folder, also) == ("methods/<name>/config.py", "methods/<name>/method.py")
    (package / "methods/kron").mkdir()
    (package / "methods/kron/__init__.py").write_text("")
    for name, toy in METHOD.items():
        shutil.copyfile(TOYS / toy, package / "methods/kron" / name)
    line = "from weft.methods.kron.config import KronSettings"
    register(package / registry, line, ("class MethodSettings(\n", "    KronSettings,\n"))
    file, registry = table("An objective")
    shutil.copyfile(TOYS / "focal.py.txt", package / file.replace("<name>", "focal"))
    register(
        package / registry,
        "from weft.objectives.focal import Focal, FocalSettings",
        ("OBJECTIVES: dict[str, Objective] = {\n", '    "focal": Focal(),\n'),
        ("class ObjectiveSettings(", "FocalSettings, "),
    )
    return package.parent


def run(source: Path, *command: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(source), str(ROOT / "tests")))}
    return subprocess.run([sys.executable, *command], cwd=cwd, env=environment, capture_output=True, text=True)


def test_toys_when_added_as_the_tables_state_then_the_conformance_tests_pass(source):
    tests = ["tests/methods/test_methods.py", "tests/objectives/test_objectives.py"]
    options = ["-k", "[kron] or [kron- or -kron] or focal or registry", "-p", "no:cacheprovider"]
    found = run(source, "-c", "import weft; print(weft.__file__)").stdout.strip()
    assert found == str(source / "weft" / "__init__.py")
    done = run(source, "-m", "pytest", *tests, *options)
    passed = re.search(r"(\d+) passed", done.stdout)
    assert done.returncode == 0 and passed is not None and int(passed[1]) >= 10, done.stdout


@pytest.fixture
def folder(tmp_path) -> Path:
    rows = [{"prompt": f"{i} and", "completion": f"{i + 1}"} for i in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return tmp_path


def train(source: Path, folder: Path, name: str, jobs: tuple[str, ...], *options: str):
    (folder / f"{name}.yaml").write_text(JOBS.format(out=name, jobs="\n".join(jobs)))
    return run(source, "-m", "weft", "train", f"{name}.yaml", *options, cwd=folder)


@pytest.mark.slow
def test_toys_when_they_train_beside_a_lora_then_it_has_the_bits_it_has_alone(source, folder):
    alone = train(source, folder, "alone", (PLAIN,))
    together = train(source, folder, "together", (PLAIN, KRON, FOCAL))
    assert (alone.returncode, together.returncode) == (0, 0), together.stderr
    weights = [next((folder / run / "plain").rglob("adapter_model.safetensors")) for run in ("alone", "together")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    for job in ("kron", "focal"):
        assert list((folder / "together" / job).rglob("adapter_model.safetensors"))


def test_toy_method_when_layers_are_divided_then_is_refused_in_a_sentence(source, folder):
    done = train(source, folder, "divided", (PLAIN, KRON), "--layout", "tensor:2")
    assert done.returncode == 2
    assert "jobs.1.adapter.method: kron does not support layers that are divided over devices" in " ".join(
        done.stderr.split()
    )
    assert "Traceback" not in done.stderr
