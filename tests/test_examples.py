"""Every example runs as its first lines show, with fewer steps where the command can set them."""

from __future__ import annotations

import runpy
import shutil
from pathlib import Path

import pytest

from weft.cli.main import main

EXAMPLES = Path(__file__).parent.parent / "examples"
FILES = sorted(path.name for path in EXAMPLES.iterdir() if path.suffix in (".yaml", ".py"))
FEWER = {"train": ["defaults.max_steps=2"], "sweep": ["job.max_steps=2"]}
"""The promise is that it works, not how well it learns."""


def command_of(path: Path) -> list[str]:
    """The command in an example's first lines."""
    lines = [line.strip("# \n") for line in path.read_text().splitlines()[:6]]
    return next(line for line in lines if line.startswith(("weft ", "python "))).split()


@pytest.mark.parametrize("name", FILES)
def test_example_when_run_as_it_shows_then_leaves_adapters_or_a_plan(name, tmp_path, monkeypatch, capsys):
    shutil.copytree(EXAMPLES, tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    program, *words = command_of(EXAMPLES / name)
    if program == "python":
        runpy.run_path(words[0], run_name="__main__")
    else:
        monkeypatch.setattr("sys.argv", [program, *words, *FEWER.get(words[0], [])])
        with pytest.raises(SystemExit) as end:
            main()
        assert not end.value.code, capsys.readouterr()
    if "plan" in words:
        assert "nothing was run" in capsys.readouterr().out and list(tmp_path.glob("*.svg"))
    else:
        assert list(tmp_path.rglob("adapter_model.safetensors"))


def test_examples_when_listed_then_the_page_names_each():
    page = (EXAMPLES / "README.md").read_text()
    assert all(f"`{name}`" in page for name in FILES)
