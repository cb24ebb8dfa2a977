"""An actor passes on what a controller says in its order, and keeps what the rank tells until it is asked."""

from __future__ import annotations

import os
import types
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Any

import pytest

from weft.parallel.ray import rank_actor
from weft.parallel.ray.rank_actor import RankActor
from weft.parallel.replicas import rank as rank_module
from weft.parallel.replicas.messages import CancelJob, Command, EndRank, JobReleased, Report


@pytest.fixture
def actor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., RankActor]:
    """Starts an actor whose rank is the given function."""
    monkeypatch.chdir(tmp_path)

    def start(serve: Callable[[Any], None], **variables: str | None) -> RankActor:
        monkeypatch.setattr(rank_module, "run_rank", serve)
        return RankActor(variables, tmp_path)

    return start


def told(actor: RankActor) -> tuple[list[Report], str]:
    """All that a rank tells until its end, and that."""
    reports: list[Report] = []
    while True:
        batch = actor.next_reports()
        reports += batch.reports
        if batch.ending is not None:
            return reports, batch.ending


def echo(connection: Any) -> None:
    """A rank that tells which jobs it is to cancel."""
    command: Command = connection.recv()
    while not isinstance(command, EndRank):
        connection.send(JobReleased(command.job, 0))
        command = connection.recv()


def test_commands_when_calls_arrive_in_another_order_then_are_obeyed_in_theirs(actor):
    """Ray runs several calls of an actor at a time."""
    serving = actor(echo)
    for number in (2, 0, 3, 1):
        serving.apply(number, EndRank() if number == 3 else CancelJob(f"job{number}"))
    reports, ending = told(serving)
    assert [report.job for report in reports] == ["job0", "job1", "job2"]
    assert ending == "ended"


def test_rank_when_it_fails_then_all_it_told_comes_first_and_then_how(actor):
    def fail(connection: Any) -> None:
        for number in range(100):
            connection.send(JobReleased(f"job{number}", 0))
        raise ValueError("no such thing")

    reports, ending = told(actor(fail))
    assert len(reports) == 100
    assert ending == "ended with ValueError: no such thing"


def test_environment_when_the_controller_has_no_such_variable_then_the_actor_has_none_either(actor, monkeypatch):
    """Ray sets the number of threads, which decides bits."""
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    actor(lambda connection: None, OMP_NUM_THREADS=None, OMP_WAIT_POLICY="PASSIVE")
    assert "OMP_NUM_THREADS" not in os.environ
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"


def test_rank_when_nobody_asks_for_long_then_its_process_ends(actor, monkeypatch):
    """Its controller is gone, and another one may go on with the run."""
    ended: list[int] = []
    now_s = iter([0.0, 10.0, 59.0, 61.0])
    # Only what the actor sees: threads of other tests may still look at the clock.
    clock = types.SimpleNamespace(monotonic=lambda: next(now_s), sleep=lambda seconds: None)
    monkeypatch.setattr(rank_actor, "time", clock)
    monkeypatch.setattr(rank_actor.os, "_exit", ended.append)
    started: list[Any] = []
    threads = types.SimpleNamespace(Thread=lambda target, **_: started.append(target) or NotStarted(), Lock=Lock)
    monkeypatch.setattr(rank_actor, "threading", threads)
    actor(echo)
    (forsaken,) = [target for target in started if target.__name__ == "_end_forsaken"]
    forsaken()
    assert ended == [1]
    assert next(now_s, None) is None, "it looked until then"


class NotStarted:
    """A thread that somebody else runs."""

    def start(self) -> None: ...
