"""`weft cache` shows and removes prepared data."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_tokenizer import make_tokenizer
from typer.testing import CliRunner

from weft.cli.main import app
from weft.data.load import load_dataset


def said(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["cache", *arguments])
    assert done.exit_code == 0, done.output
    return done.output


def test_cache_when_data_was_prepared_then_is_shown_and_cleared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Entries are listed by the files they were made of."""
    place = tmp_path / "kept"
    monkeypatch.setenv("WEFT_CACHE", str(place))
    assert said() == f"{place}: 0 entries, 0.0 kB of at most 20.0 GB\n"
    (tmp_path / "train.jsonl").write_text('{"text": "once"}\n{"text": "twice"}\n')
    load_dataset(["train.jsonl"], make_tokenizer(), max_length=64, base_dir=tmp_path)
    shown = said()
    assert "1 entry" in shown
    assert shown.splitlines()[-1].split()[:2] == ["train.jsonl", "2"]
    assert said("clear") == f"removed 1 entry from {place}\n"
    assert said().startswith(f"{place}: 0 entries")


def test_cache_when_off_then_says_so(monkeypatch: pytest.MonkeyPatch):
    """Nobody looks for entries that are never made."""
    monkeypatch.setenv("WEFT_CACHE", "off")
    assert said() == said("clear") == "WEFT_CACHE is off: nothing is kept\n"
