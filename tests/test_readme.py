"""The commands of the README, the quick start and the page about many GPUs work as written."""

from __future__ import annotations

import io
import re
import shlex
from pathlib import Path

import pytest

from weft.cli.main import main

ROOT = Path(__file__).parent.parent
TRAINED_LAYOUT = "tensor:2,stages:2"
"""Whose processes are started here. What the others train is tested by tests/cli/test_lost_stages.py and
tests/engine/execute/stages; here their lines are only checked, as four processes take half a minute to start."""


def commands(page: str) -> list[list[str]]:
    """The `weft` commands of a page's shell blocks, in order."""
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if line.startswith("weft ")]
    return [shlex.split(line, comments=True) for line in lines]


def files(page: str) -> dict[str, str]:
    """The YAML blocks of a page that begin with the name of their file."""
    blocks = re.findall(r"```yaml\n(# (\S+\.yaml)\b.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    return {name: text for text, name in blocks}


def python_example() -> str:
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)[0]


@pytest.mark.parametrize(
    "page", ["README.md", "docs/quickstart.md", pytest.param("docs/clusters.md", marks=pytest.mark.slow)]
)
def test_page_when_its_commands_are_typed_in_order_then_each_works(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    typed = commands(page)
    assert len(typed) >= 4
    assert page != "docs/clusters.md" or any(TRAINED_LAYOUT in words for words in typed)
    for name, text in files(page).items():
        Path(name).write_text(text, encoding="utf-8")
    fewer = {"train": ["defaults.max_steps=4"], "sweep": ["job.max_steps=4", "trials=2", "compare_speed=false"]}
    for words in typed:
        if words[1] == "serve" or {"--devices", "--cluster", "--listen"} & set(words):
            # It serves until it is stopped, as in tests/serve; or it needs a GPU or machines.
            continue
        # Fewer steps than in the file: the promise is that it works, not how well it learns.
        extra = fewer.get(words[1], [])
        if "--layout" in words and TRAINED_LAYOUT not in words:
            extra = [*extra, "--dry-run"]
        words = [word.replace("s3://", "memory://") for word in words]  # a bucket that everybody has
        monkeypatch.setattr("sys.argv", [*words, *extra])
        monkeypatch.setattr("sys.stdin", io.StringIO("planet\n"))
        with pytest.raises(SystemExit) as end:
            main()
        assert not end.value.code, f"{shlex.join(words)} ended with {end.value.code}: {capsys.readouterr()}"


def test_readme_when_its_python_is_run_then_it_trains(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["weft", "init"])
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    exec(compile(python_example().replace("max_steps=60", "max_steps=3"), "README.md", "exec"), {})
    assert "StepDone(job='shout', step=3" in capsys.readouterr().out
