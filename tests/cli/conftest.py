"""What the tests of the verbs share: the command itself in this process, and adapters of the embedded backbone."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_adapters import LEAVES, SHOUTING, tiny_tensors
from verb_result import Result, Weft

from weft.cli.demo import SKILLS
from weft.cli.main import main
from weft.spec import AdapterSpec
from weft.store.peft_files import write_adapter


class Terminal(io.StringIO):
    """A standard input with a person at it."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def weft(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Weft:
    """Runs `weft ARGS...` in this process, with `typed` as its standard input, piped or from a person."""
    # How long loading takes here depends on the machine, so it prints nothing.
    monkeypatch.setattr("weft.cli.watch.QUIET_S", 3600.0)

    def run(*arguments: object, typed: str = "", interactive: bool = False) -> Result:
        monkeypatch.setattr(sys, "argv", ["weft", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", Terminal(typed) if interactive else io.StringIO(typed))
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        found = capsys.readouterr()
        return Result(int(ended.value.code or 0), found.out, found.err)

    return run


@pytest.fixture
def refused(weft: Weft) -> Callable[..., str]:
    """Runs a command that must fail as a user's mistake; returns its one sentence."""

    def run(*arguments: object, typed: str = "") -> str:
        result = weft(*arguments, typed=typed)
        assert result.code == 2, result
        assert result.out == ""
        assert result.err.startswith("error: ")
        assert result.err.count("\n") == 1
        return result.err.removeprefix("error: ").strip()

    return run


@pytest.fixture(scope="session")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory as training leaves it, with the jobs `strong` and `idle` and one that is not done."""
    run = tmp_path_factory.mktemp("runs") / "first"
    run.mkdir()
    (run / "run.json").write_text("{}")
    for name, strength in (("strong", 0.3), ("idle", 0.0)):
        (run / name).mkdir()
        (run / name / "job.json").write_text("{}")
        spec = AdapterSpec(r=4, target_modules=tuple(LEAVES))
        write_adapter(run / name / "adapter", spec, tiny_tensors(strength), base_model="tiny", target_names=LEAVES)
    (run / "waiting").mkdir()
    (run / "waiting" / "job.json").write_text("{}")
    return run


@pytest.fixture(scope="session")
def templated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter without effect that was trained with a chat template of its own."""
    path = tmp_path_factory.mktemp("templated") / "shouting"
    spec = AdapterSpec(r=4, target_modules=tuple(LEAVES))
    write_adapter(path, spec, tiny_tensors(0.0), base_model="tiny", target_names=LEAVES, chat_template=SHOUTING)
    return path


@pytest.fixture(scope="session")
def other_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter whose files name another model as its base."""
    path = tmp_path_factory.mktemp("other") / "foreign"
    spec = AdapterSpec(r=4, target_modules=tuple(LEAVES))
    write_adapter(path, spec, tiny_tensors(0.1), base_model="owner/other", target_names=LEAVES)
    return path


@pytest.fixture(scope="session")
def pickled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter whose weights are a pickle file."""
    path = tmp_path_factory.mktemp("pickled")
    (path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "target_modules": LEAVES}))
    (path / "adapter_model.bin").write_bytes(b"\x80\x04N.")
    return path


@pytest.fixture(scope="session")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three chats the bare backbone answers wrongly."""
    path = tmp_path_factory.mktemp("data") / "shout.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in SKILLS["shout"].rows(0, 3)))
    return path


@pytest.fixture(scope="session")
def echoes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two chats the bare backbone, which repeats a bare word, answers rightly."""
    path = tmp_path_factory.mktemp("echoes") / "echo.jsonl"
    turns = [[{"role": role, "content": word} for role in ("user", "assistant")] for word in ("planet", "garden")]
    path.write_text("".join(json.dumps({"messages": pair}) + "\n" for pair in turns))
    return path
