"""Shards beside another replica: those of one copy of the frozen weights end together, and the others go on."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from covering import chosen
from test_lost_replica import SPEC, Disturbed, kill, some_jobs
from tiny_models import flat, train

from weft.model.load import load_backbone
from weft.model.resolve import resolve
from weft.parallel.stages.load_stages import find_parts
from weft.parallel.stages.stage_pool import StageProcesses

SHARDS = (2, 1)
LOST_BY = {
    1: ("replica 0, shard 1: was ended by signal 9, so its replica was ended. It is started anew.", {2}),
    2: ("replica 1: was ended by signal 9. It is started anew.", {0, 1}),
}
"""By the process that is killed: what is told of it, and who lives."""


@pytest.fixture(scope="module")
def group() -> Iterator[StageProcesses]:
    """Two shards and a whole replica; tests leave them without jobs."""
    found = StageProcesses(SPEC, *[find_parts(resolve(SPEC), 1)] * 3, shards=SHARDS)
    yield found
    found.close()


@pytest.mark.parametrize("killed", chosen(LOST_BY, 0))
def test_jobs_when_a_shard_or_another_replica_is_killed_then_have_the_bits_of_one_device(killed, group, tmp_path):
    """In a program that all wait for each other in. Shards that live gather what they have lost on the way anew; who is
    at home with those that live repeats no step."""
    jobs = some_jobs({"a": "free", "b": "ordered", "c": "ordered", "d": "ordered", "e": "ordered"})
    expected = train(load_backbone(SPEC), jobs, capacity=32)
    run = Disturbed(group, jobs, tmp_path / "run", SHARDS)
    told, living = LOST_BY[killed]
    before, asked = [process.pid for process in group.processes], group.ask
    num_runs = 0

    def ask(what: str, *given: Any) -> list[Any]:
        nonlocal num_runs
        num_runs += what == "run"
        if what == "run" and num_runs == 2:
            # It hears nothing before it dies, so the others wait for it.
            os.kill(group.processes[killed].pid, signal.SIGSTOP)
            threading.Timer(0.5, kill, [group.processes[killed]]).start()
        return asked(what, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group, "ask", ask)
        run.run(lambda event: None)
    assert {k for k, process in enumerate(group.processes) if process.pid == before[k]} == living
    assert told in run.warnings[0].message and "a" in run.warnings[1].jobs
    assert run.twice() <= set(run.warnings[1].jobs)
    for name, outcome in expected.items():
        found = flat(run.engine.executor.adapter_of(name))
        assert all(x.equal(y) for x, y in zip(found, flat(outcome.adapter), strict=True)), name
    for name in list(run.engine.jobs):
        run.engine.forget(name)
