"""Programs that are appended to one another train every job to the bits of one device, and files are of their step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from staged_models import staged_executor, train_until
from test_staged import done
from tiny_models import Job, assert_same_bits, finish, job_spec, random_backbone, random_data, small_job, submit, train

from weft.engine.engine import Engine
from weft.engine.events import Event, StepDone
from weft.parallel.staged_run import StagedRun
from weft.plan.cost.types import LinearCost
from weft.plan.pipeline.append import joined
from weft.plan.pipeline.build import PipelinePlanner, Schedule
from weft.plan.planner import Planner
from weft.plan.program import Program
from weft.plan.simulate.interpret import simulate


class Watched:
    """An engine on stages whose programs go on, three by default, and what was under way when programs were counted."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        planner: Planner | None = None,
        replicas: Sequence[tuple[int, ...]] = ((1, 1, 1),),
    ) -> None:
        self.planned: list[Program] = []
        self.num_under_way: list[int] = []
        begin, count = StagedRun._begin, StagedRun._count

        def begun(run: StagedRun, program: Program) -> None:
            self.planned.append(program)
            begin(run, program)

        def counted(run: StagedRun) -> list[Event]:
            self.num_under_way.append(len(run._begun))
            return count(run)

        monkeypatch.setattr(StagedRun, "_begin", begun)
        monkeypatch.setattr(StagedRun, "_count", counted)
        planner = planner or PipelinePlanner(Schedule.EAGER, 3)
        self.engine = Engine(staged_executor("llama", *replicas), capacity=48, planner=planner)


def short(name: str, seed: int = 0, **settings: Any) -> Job:
    """A job whose programs are of two steps."""
    return small_job(name, seed, save_steps=2, **settings)


def one_device(jobs: Sequence[Job]) -> dict[str, Any]:
    return train(random_backbone("llama", num_hidden_layers=3), jobs, capacity=48)


def test_jobs_when_programs_go_on_then_have_the_bits_of_one_device_and_the_simulator_s_order(monkeypatch):
    """Clipped, with dropout; one job ends while the other goes on."""
    clipped = {"max_grad_norm": 0.05, "max_steps": 7}
    jobs = [short("a", **clipped), short("b", 1, max_steps=5, global_batch_size=7)]
    watched = Watched(monkeypatch)
    submit(watched.engine, *jobs)
    expected = one_device(jobs)
    for name, outcome in finish(watched.engine).items():
        assert_same_bits(outcome, expected[name])
    assert watched.num_under_way == [2] * (len(watched.planned) - 1) + [1] and len(watched.planned) > 2
    whole = simulate(joined([program.microbatches for program in watched.planned], 3, LinearCost()), LinearCost())
    numbers = [number for program in watched.planned for number in range(len(program.microbatches))]
    measured = watched.engine.timeline.measured()
    for stage in range(3):
        # What is recorded counts microbatches program by program.
        expected = [(name, numbers[what] if isinstance(what, int) else what) for name, what in done(whole, stage)]
        assert done(measured, stage) == expected


def test_checkpoints_when_jobs_are_further_already_then_are_of_their_step(tmp_path, monkeypatch):
    """Every file that was ever there is that of one device."""
    settings = {"save_steps": 1, "save_total_limit": 9, "max_steps": 4, "ema_decay": 0.5}
    jobs = [(job_spec("a", **settings), random_data(0)), (job_spec("b", **settings), random_data(1))]
    whole = Engine(random_backbone("llama", num_hidden_layers=3), capacity=48)
    train_until(whole, tmp_path / "one", 4, jobs)
    watched = Watched(monkeypatch)
    train_until(watched.engine, tmp_path / "going", 4, jobs)
    assert max(watched.num_under_way) >= 2
    assert_same_files(tmp_path / "one", tmp_path / "going", at_least=10)


def test_checkpoint_when_an_evaluation_comes_before_it_then_has_the_best_weights_of_that(tmp_path, monkeypatch):
    """The copy after a step is older than what the evaluation finds; nothing is ahead of it, so none is needed."""
    evaluated = {"eval_data": 2, "eval_steps": 2, "early_stopping_patience": 3, "save_steps": 2, "save_total_limit": 9}
    jobs = [(job_spec("evaluated", max_steps=4, **evaluated), random_data(3, num_eval=2)), short("b", 1, max_steps=4)]
    train_until(Engine(random_backbone("llama", num_hidden_layers=3), capacity=48), tmp_path / "one", 4, jobs)
    train_until(Watched(monkeypatch).engine, tmp_path / "going", 4, jobs)
    assert_same_files(tmp_path / "one", tmp_path / "going", at_least=5)


def assert_same_files(one: Path, other: Path, at_least: int) -> None:
    files = [path.relative_to(one) for path in one.rglob("*.safetensors")]
    assert len(files) >= at_least
    for path in files:
        assert (one / path).read_bytes() == (other / path).read_bytes(), path


def test_evaluation_when_due_then_nothing_is_appended_and_it_is_of_its_step(monkeypatch):
    early = {"eval_data": 2, "eval_steps": 1, "max_steps": 2, "early_stopping_patience": 2}
    jobs = [(job_spec("evaluated", **early), random_data(3, num_eval=2)), short("b", 1, max_steps=7)]
    watched = Watched(monkeypatch)
    submit(watched.engine, *jobs)
    expected = one_device(jobs)
    for name, outcome in finish(watched.engine).items():
        assert_same_bits(outcome, expected[name])
    assert {1, 2} == {*watched.num_under_way}


def test_jobs_when_they_come_and_go_while_programs_go_on_then_have_the_bits_of_one_device(monkeypatch):
    """One comes without a drain; one is cancelled and one paused, at a step boundary of their own."""
    first = [short("a", max_steps=10), short("gone", 1, max_steps=10), short("paused", 2, max_steps=8)]
    late = short("late", 3, max_steps=4)
    watched = Watched(monkeypatch)
    submit(watched.engine, *first)
    requested: set[str] = set()

    def request(engine: Engine, event: Event) -> None:
        steps = {"late": 2, "gone": 4, "paused": 4}
        for what, step in steps.items():
            if isinstance(event, StepDone) and event.job == "a" and event.step == step and what not in requested:
                requested.add(what)
                if what == "late":
                    submit(engine, late)
                else:
                    (engine.cancel if what == "gone" else engine.pause)(what)
                    if what == "paused":
                        engine.resume(what)

    found = finish(watched.engine, request)
    expected = one_device([first[0], first[2], late])
    for name in ("a", "paused", "late"):
        assert_same_bits(found[name], expected[name])
    assert found["gone"].state == "cancelled" and requested == {"late", "gone", "paused"}


def test_job_when_it_diverges_while_the_next_program_is_under_way_then_ends_as_on_one_device(monkeypatch):
    spoilt = job_spec("spoilt", max_steps=8, save_steps=2, learning_rate=1e9)
    jobs = [(spoilt, random_data(1)), short("good", max_steps=6)]
    watched = Watched(monkeypatch)
    submit(watched.engine, *jobs)
    found, expected = finish(watched.engine), one_device(jobs)
    assert (found["spoilt"].state, found["spoilt"].reason) == (expected["spoilt"].state, expected["spoilt"].reason)
    assert expected["spoilt"].state == "failed" and max(watched.num_under_way) == 2
    assert_same_bits(found["good"], expected["good"])
