"""`weft worker` reports what is wrong with its options, and distinguishes a first request to stop from a second."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest

from weft.cli.service import worker as verb
from weft.cli.service.worker import AT_ONCE, REPEAT_S, StopSignals, worker
from weft.errors import ConfigError, MissingExtraError, WeftError, install_command


@pytest.fixture(autouse=True)
def _same_handlers():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Quitter:
    """A worker that counts how often it is requested to stop."""

    num_requested = 0

    def stop(self) -> None:
        self.num_requested += 1


def test_signals_when_they_come_together_then_they_are_one_request_and_a_later_one_ends_it_at_once(monkeypatch):
    exits: list[int] = []
    at = [100.0]
    monkeypatch.setattr(verb.os, "_exit", exits.append)
    monkeypatch.setattr(time, "monotonic", lambda: at[0])
    signals = StopSignals()
    signals.worker = Quitter()
    os.kill(os.getpid(), signal.SIGTERM)
    at[0] += REPEAT_S / 2
    os.kill(os.getpid(), signal.SIGTERM)
    assert signals.is_set
    assert signals.worker.num_requested == 2
    assert exits == []
    at[0] += REPEAT_S
    os.kill(os.getpid(), signal.SIGTERM)
    assert exits == [AT_ONCE]


def test_signals_when_the_model_is_still_being_loaded_then_the_worker_ends_at_once():
    StopSignals()
    with pytest.raises(SystemExit) as caught:
        signal.raise_signal(signal.SIGTERM)
    assert caught.value.code == 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_signals_when_an_exit_is_lost_in_a_destructor_then_the_worker_stops_once_it_is_there():
    """Python prints and forgets what a destructor raises."""

    class Noisy:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGTERM)

    signals = StopSignals()
    Noisy()
    assert signals.is_set
    signals.worker = Quitter()
    assert signals.worker.num_requested == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"base_model": "=x"}, "NAME=MODEL"),
        ({"base_model": "x="}, "NAME=MODEL"),
        ({"db": "mysql://x"}, "not supported"),
        ({"max_jobs": -1}, "--max-jobs"),
        ({"capacity": "1"}, "--capacity: must be at least 2, got 1."),
        ({"capacity": "most"}, "--capacity: expected auto or a whole number, got 'most'."),
        ({"lease": 0.1}, "--lease"),
        ({"quantize": "int3"}, "int3"),
        ({"layout": "stages:9"}, "--layout: got 9 stages; the model has 6 layers, so use 1 to 6."),
    ],
)
def test_worker_when_an_option_is_wrong_then_names_it(options, words, tmp_path):
    with pytest.raises(ConfigError) as caught:
        worker(data_dir=tmp_path / "data", **options)
    assert words in str(caught.value)


def test_worker_when_the_model_is_not_there_then_reports_it(tmp_path):
    (tmp_path / "data").mkdir()
    with pytest.raises(WeftError) as caught:
        worker(data_dir=tmp_path / "data", base_model="loom=/no/such/model", device="cpu")
    assert "/no/such/model" in str(caught.value)


def test_worker_when_its_directory_is_not_there_then_refused_as_it_would_wait_on_an_empty_database(refused, tmp_path):
    found = refused("worker", "--data-dir", tmp_path / "data")
    assert found == f"--data-dir {tmp_path / 'data'}: there is no such directory; name the one of `weft serve`."
    assert not (tmp_path / "data").exists()


def test_worker_when_the_extra_is_missing_then_reports_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "sqlalchemy", None)
    with pytest.raises(MissingExtraError) as caught:
        worker(data_dir=tmp_path / "data")
    assert install_command("serve") in str(caught.value)


def test_worker_when_the_database_comes_from_the_environment_or_a_file_then_it_is_that_one(weft, monkeypatch, tmp_path):
    url = "mysql://weft:secret@nowhere/weft"
    monkeypatch.setenv("WEFT_DB", url)
    found = weft("worker", "--data-dir", tmp_path / "data")
    assert found.code != 0
    assert "mysql is not supported" in found.err
    assert "secret" not in found.err
    monkeypatch.delenv("WEFT_DB")
    (tmp_path / "url").write_text(url + "\n")
    assert weft("worker", "--data-dir", tmp_path / "data", "--db", f"@{tmp_path / 'url'}") == found
    missing = weft("worker", "--data-dir", tmp_path / "data", "--db", "@/no/such/file")
    assert "--db: /no/such/file cannot be read (No such file or directory)" in missing.err
