"""When one of several replicas is lost the others go on, and its jobs end with the bits they would have had."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_models import flat, job_spec, random_data, submit, train

from weft.data.dataset import JobData
from weft.engine.engine import Engine
from weft.engine.events import Event, JobWarning, StepDone
from weft.model.load import load_backbone
from weft.model.resolve import resolve
from weft.objectives.preference.dpo import Dpo
from weft.parallel.stages.load_stages import find_parts
from weft.parallel.stages.stage_pool import StageLostError, StageProcesses
from weft.parallel.stages.staged import StagedExecutor
from weft.plan.cost.types import LinearCost
from weft.plan.spread.planner import SpreadPlanner
from weft.spec import BackboneSpec

SPEC = BackboneSpec("tiny", device="cpu")
SETTINGS: dict[str, Any] = {"max_steps": 6, "save_steps": 2, "max_grad_norm": 0.1, "adapter": {"lora_dropout": 0.1}}


def some_jobs(sums: dict[str, str]) -> list[Any]:
    """Every other one learns from pairs, beside the bare backbone."""
    found = []
    for seed, (name, kind) in enumerate(sums.items()):
        data = random_data(seed, num_samples=9 + seed % 2, lengths=(3, 16))
        if seed % 2:
            data = JobData(replace(data.train, objective=Dpo(0.3)), None)
        found.append((job_spec(name, sums=kind, **SETTINGS), data))
    return found


@pytest.fixture(scope="module")
def replicas() -> Iterator[StageProcesses]:
    """Two whole replicas, each in a process; tests leave them without jobs."""
    group = StageProcesses(SPEC, find_parts(resolve(SPEC), 1), find_parts(resolve(SPEC), 1))
    yield group
    group.close()


class Disturbed:
    """A run over two replicas of which something happens to one, and what is told of it."""

    def __init__(self, group: StageProcesses, jobs: list[Any], out: Path, shards: tuple[int, ...] = ()) -> None:
        tokenizer: Any = None
        sizes = tuple(group.replica_sizes)
        costs = tuple(LinearCost() for _ in sizes)
        executor = StagedExecutor(group, tokenizer, shards=shards)
        self.engine = Engine(executor, capacity=32, planner=SpreadPlanner(sizes, costs, shards=shards))
        submit(self.engine, *jobs)
        self.engine.keep_in(out)
        self.taken: Counter[tuple[str, int]] = Counter()
        self.warnings: list[JobWarning] = []
        self.homes = {name: job.home for name, job in self.engine.jobs.items()}

    def run(self, on_event: Any) -> None:
        for event in self.engine.events():
            if isinstance(event, StepDone):
                self.taken[event.job, event.step] += 1
            elif isinstance(event, JobWarning):
                self.warnings.append(event)
            on_event(event)
            for name, job in self.engine.jobs.items():
                self.homes[name] = job.home

    def twice(self) -> set[str]:
        """Jobs that took a step again."""
        return {job for (job, _), count in self.taken.items() if count > 1}


def kill(process: Any) -> None:
    os.kill(process.pid, signal.SIGKILL)


@pytest.mark.slow
def test_job_at_home_elsewhere_when_a_replica_is_killed_then_repeats_no_step(replicas, tmp_path):
    """The replica that lives is not started anew, and all bits are those of one device."""
    jobs = some_jobs({"a": "ordered", "b": "ordered", "c": "ordered", "d": "ordered"})
    expected = train(load_backbone(SPEC), jobs, capacity=32)
    run = Disturbed(replicas, jobs, tmp_path / "run")
    living, lost = replicas.processes[0].pid, set[str]()

    def on_event(event: Event) -> None:
        if isinstance(event, StepDone) and event.step == 3 and not lost:
            lost.update(name for name, home in run.homes.items() if home == 1)
            kill(replicas.processes[1])

    run.run(on_event)
    assert replicas.processes[0].pid == living
    assert lost and [set(warning.jobs) for warning in run.warnings] == [set(), lost]
    assert "replica 1: was ended by signal 9. It is started anew." in run.warnings[0].message
    assert run.twice() <= lost
    for name, outcome in expected.items():
        found = flat(run.engine.executor.adapter_of(name))
        assert all(x.equal(y) for x, y in zip(found, flat(outcome.adapter), strict=True)), name
    for name in list(run.engine.jobs):
        run.engine.forget(name)


def test_spread_job_when_a_replica_is_killed_with_programs_under_way_then_goes_back_to_its_checkpoint(
    replicas, tmp_path
):
    """Whoever waits for the one that is gone hears of it, nobody hangs, and jobs at home elsewhere repeat no step."""
    jobs = some_jobs({"a": "free", "b": "free", "c": "ordered", "d": "ordered"})
    expected = train(load_backbone(SPEC), jobs, capacity=32)
    run = Disturbed(replicas, jobs, tmp_path / "run")
    living, told = replicas.processes[1].pid, replicas.append
    num_programs, lost = 0, {"a", "b"}

    def append(*given: Any) -> int:
        nonlocal num_programs
        num_programs += 1
        if num_programs == 3:
            lost.update(name for name, home in run.homes.items() if home == 0)
            # It hears nothing before it dies, so the other one waits for it.
            os.kill(replicas.processes[0].pid, signal.SIGSTOP)
            threading.Timer(0.5, kill, [replicas.processes[0]]).start()
        return told(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replicas, "append", append)
        run.run(lambda event: None)
    assert replicas.processes[1].pid == living
    assert len(lost) == 3 and [set(warning.jobs) for warning in run.warnings] == [set(), lost]
    assert run.twice() <= lost
    for name, outcome in expected.items():
        found = flat(run.engine.executor.adapter_of(name))
        assert all(x.equal(y) for x, y in zip(found, flat(outcome.adapter), strict=True)), name
    for name in list(run.engine.jobs):
        run.engine.forget(name)


@pytest.mark.slow
def test_job_when_the_replica_that_it_moves_to_is_killed_then_repeats_no_step(replicas, tmp_path):
    """It leaves its old home only when it is whole on the new one."""
    settings: dict[str, Any] = {"a": {"max_steps": 6}, "b": {"max_steps": 6}, "c": {"max_steps": 1}}
    sizes = {"a": 4, "b": 4, "c": 9}
    jobs = [
        (job_spec(name, save_steps=2, global_batch_size=sizes[name], **own), random_data(seed, num_samples=9))
        for seed, (name, own) in enumerate(settings.items())
    ]
    expected = train(load_backbone(SPEC), jobs, capacity=32)
    run, asked = Disturbed(replicas, jobs, tmp_path / "run"), replicas.ask_each
    is_moving, killed = False, list[int]()

    def ask_each(what: str, given: Any) -> list[Any]:
        nonlocal is_moving
        # Before the first step nothing is worth keeping; and a checkpoint asks for the tensors of a step.
        is_moving |= what == "tensors" and bool(run.taken) and all(len(own) == 1 for own in given.values())
        if is_moving and what == "restore" and not killed:
            killed.extend(given)
            kill(replicas.processes[killed[0]])
        return asked(what, given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replicas, "ask_each", ask_each)
        run.run(lambda event: None)
    assert killed and f"replica {killed[0]}: was ended by signal 9" in run.warnings[0].message
    assert not run.twice()
    for name in "ab":
        found = flat(run.engine.executor.adapter_of(name))
        assert all(x.equal(y) for x, y in zip(found, flat(expected[name].adapter), strict=True)), name
    for name in list(run.engine.jobs):
        run.engine.forget(name)


def test_replica_when_it_is_lost_too_often_then_all_end(replicas, monkeypatch, tmp_path):
    monkeypatch.setattr("weft.parallel.stages.stage_pool.RESTARTS", 0)
    run = Disturbed(replicas, some_jobs({"a": "ordered"}), tmp_path / "run")

    def on_event(event: Event) -> None:
        if isinstance(event, StepDone):
            kill(replicas.processes[0])

    with pytest.raises(StageLostError, match="replica 0: was ended by signal 9, so all replicas were ended"):
        run.run(on_event)
    assert all(process.poll() is not None for process in replicas.processes)
