"""`weft cache` shows and removes prepared data."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_tokenizer import make_tokenizer
from typer.testing import CliRunner

from weft.cli.main import app
from weft.data.load import load_dataset


def output(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["cache", *arguments])
    assert done.exit_code == 0, done.output
    return done.output


def test_cache_when_data_was_prepared_then_is_shown_and_cleared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Entries are listed by the files they were made of."""
    folder = tmp_path / "kept"
    monkeypatch.setenv("WEFT_CACHE", str(folder))
    assert output() == f"{folder}: 0 entries, 0.0 kB of at most 20.0 GB\n"
    (tmp_path / "train.jsonl").write_text('{"text": "once"}\n{"text": "twice"}\n')
    load_dataset(["train.jsonl"], make_tokenizer(), max_length=64, base_dir=tmp_path)
    shown = output()
    assert "1 entry" in shown
    assert shown.splitlines()[-1].split()[:2] == ["train.jsonl", "2"]
    assert output("clear") == f"removed 1 entry from {folder}\n"
    assert output().startswith(f"{folder}: 0 entries")


def test_cache_when_off_then_reports_it(monkeypatch: pytest.MonkeyPatch):
    """Entries that are never made are not looked for."""
    monkeypatch.setenv("WEFT_CACHE", "off")
    assert output() == output("clear") == "WEFT_CACHE is off: nothing is kept\n"
