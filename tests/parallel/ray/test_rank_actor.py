"""An actor passes on a controller's commands in order, and keeps the rank's reports until they are requested."""

from __future__ import annotations

import ast
import os
import types
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Any

import pytest

import weft
from weft.parallel.ray import rank_actor
from weft.parallel.ray.rank_actor import RankActor
from weft.parallel.replicas import rank as rank_module
from weft.parallel.replicas.connections import Inbox, RankEnded
from weft.parallel.replicas.messages import CancelJob, Command, EndRank, JobReleased, Report


@pytest.fixture
def actor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., RankActor]:
    """Starts an actor whose rank is the given function."""
    monkeypatch.chdir(tmp_path)

    def start(serve: Callable[[Any], None], **variables: str | None) -> RankActor:
        monkeypatch.setattr(rank_module, "run_rank", serve)
        return RankActor(variables, tmp_path)

    return start


def all_reports(actor: RankActor) -> tuple[list[Report], str]:
    """All reports of a rank until its end, and that."""
    reports: list[Report] = []
    while True:
        batch = actor.next_reports()
        reports += batch.reports
        if batch.ending is not None:
            return reports, batch.ending


def echo(connection: Any) -> None:
    """A rank that reports which jobs it is to cancel."""
    command: Command = connection.recv()
    while not isinstance(command, EndRank):
        connection.send(JobReleased(command.job, 0))
        command = connection.recv()


def test_commands_when_calls_arrive_in_another_order_then_are_applied_in_their_own(actor):
    """Ray runs several calls of an actor at a time."""
    serving = actor(echo)
    for number in (2, 0, 3, 1):
        serving.apply(number, EndRank() if number == 3 else CancelJob(f"job{number}"))
    reports, ending = all_reports(serving)
    assert [report.job for report in reports] == ["job0", "job1", "job2"]
    assert ending == "ended"


def test_rank_when_it_fails_then_all_it_reported_comes_first_and_then_how(actor):
    def fail(connection: Any) -> None:
        for number in range(100):
            connection.send(JobReleased(f"job{number}", 0))
        raise ValueError("no such thing")

    reports, ending = all_reports(actor(fail))
    assert len(reports) == 100
    assert ending == "ended with ValueError: no such thing"


def test_environment_when_the_controller_has_no_such_variable_then_the_actor_has_none_either(actor, monkeypatch):
    """Ray sets the number of threads, which decides bits."""
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    actor(lambda connection: None, OMP_NUM_THREADS=None, OMP_WAIT_POLICY="PASSIVE")
    assert "OMP_NUM_THREADS" not in os.environ
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"


def test_rank_when_no_request_comes_for_long_then_its_process_ends(actor, monkeypatch):
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


def parsed(module: str) -> ast.Module:
    return ast.parse((Path(weft.__file__).parent / module).read_text())


@pytest.mark.parametrize(
    ("callers", "module", "actor"),
    [
        (("parallel/ray/ray_ranks.py",), "parallel/ray/rank_actor.py", "RankActor"),
        (("serve/supervise.py",), "serve/supervise.py", "WorkerActor"),
        (
            ("sweeps/ray_tune/__init__.py", "sweeps/ray_tune/trial_server.py"),
            "sweeps/ray_tune/trial_server.py",
            "TrialServer",
        ),
    ],
)
def test_calls_of_an_actor_when_made_then_are_methods_that_it_has(callers: tuple[str, ...], module: str, actor: str):
    """`actor.name.remote(…)`: no type checker sees the name, and only clusters call it."""
    (found,) = [node for node in parsed(module).body if isinstance(node, ast.ClassDef) and node.name == actor]
    methods = {node.name for node in found.body if isinstance(node, ast.FunctionDef)}
    called = {
        node.value.attr
        for caller in callers
        for node in ast.walk(parsed(caller))
        if isinstance(node, ast.Attribute) and node.attr == "remote" and isinstance(node.value, ast.Attribute)
    }
    assert called
    assert called <= methods


def test_reader_when_it_fails_then_the_controller_learns_that_the_rank_is_gone():
    """Else it would wait for the next report for ever."""
    from weft.parallel.ray.ray_ranks import RayRank, RayRanks

    ranks = RayRanks.__new__(RayRanks)
    ranks.inbox, ranks._connection = Inbox(), types.SimpleNamespace(is_lost=True)
    rank = RayRank(0, actor=object())
    with pytest.raises(AttributeError):
        ranks._read(rank)
    _, report = ranks.inbox.get(timeout=0)
    assert isinstance(report, RankEnded) and report.is_accident
    assert rank.is_gone.is_set()


class NotStarted:
    """A thread that another program runs."""

    def start(self) -> None: ...
