"""Every example runs as its first lines say."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
FILES = sorted(path.name for path in EXAMPLES.iterdir() if path.suffix in (".yaml", ".py"))


def command_of(path: Path) -> list[str]:
    """The command in an example's first lines."""
    lines = [line.strip("# \n") for line in path.read_text().splitlines()[:6]]
    words = next(line for line in lines if line.startswith(("weft ", "python "))).split()
    return [sys.executable, "-m", "weft", *words[1:]] if words[0] == "weft" else [sys.executable, *words[1:]]


@pytest.mark.parametrize("name", FILES)
def test_example_when_run_as_it_says_then_leaves_adapters_or_a_plan(name: str, tmp_path: Path):
    shutil.copytree(EXAMPLES, tmp_path / "examples")
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = command_of(EXAMPLES / name)
    finished = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=3600)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    if "plan" in command:
        assert "nothing was run" in finished.stdout and list(tmp_path.glob("*.svg"))
    else:
        assert list(tmp_path.rglob("adapter_model.safetensors"))


def test_examples_when_listed_then_the_page_names_each():
    page = (EXAMPLES / "README.md").read_text()
    assert all(f"`{name}`" in page for name in FILES)
