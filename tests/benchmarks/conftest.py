"""The benchmarks' command in this process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from benchmarks.__main__ import app
from weft.cli.main import main


@dataclass(frozen=True)
class Result:
    """How a command ended."""

    code: int
    out: str
    err: str


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Runs `python -m benchmarks ARGS...`."""

    def run(*arguments: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["benchmarks", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(app)
        found = capsys.readouterr()
        return Result(int(ended.value.code or 0), found.out, found.err)

    return run


@pytest.fixture
def refused(bench: Callable[..., Result]) -> Callable[..., str]:
    """Runs a command that must fail as a user's mistake; returns its one sentence."""

    def run(*arguments: object) -> str:
        result = bench(*arguments)
        assert result.code == 2 and result.out == "", result
        assert result.err.startswith("error: ") and result.err.count("\n") == 1
        return result.err.removeprefix("error: ").strip()

    return run
