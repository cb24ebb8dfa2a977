"""A run changes its layout when jobs come and go, and no bit of any job depends on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor as Workers
from concurrent.futures import Future
from typing import Any

import pytest
from staged_models import staged_executor
from tiny_models import (
    Job,
    assert_same_bits,
    finish,
    flat,
    job_spec,
    random_backbone,
    random_data,
    small_job,
    submit,
    train,
)

from weft.engine.engine import Engine
from weft.engine.events import Event, LayoutDecided, MicrobatchDone, StepDone
from weft.engine.execute.local import LocalExecutor
from weft.engine.execute.movable import MovableExecutor, OpenReplicas
from weft.engine.execute.protocol import Executor, ReplicaLostError
from weft.engine.layout_keeper import LayoutKeeper
from weft.engine.train import PreparedRun, execute_run, write_settings
from weft.errors import JobError, PlanError
from weft.faults import FaultPlan, arm, disarm
from weft.plan.cost.types import LinearCost
from weft.plan.layout import Layout, parse_layout
from weft.plan.pack import pack
from weft.plan.program import Planner
from weft.plan.replan import LayoutForecast, MoveCost, Prediction, RemainingJob
from weft.plan.spread.planner import SpreadPlanner
from weft.report.read_run import read_run
from weft.spec import RunSpec
from weft.store.run_dir import RunDirectory
from weft.wall_clock import Activity

LAYERS = 2
ONE = "stages:1"


class AtOnce(Workers):
    """Does what it is given when it is given it, so that no test depends on a clock."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except Exception as error:
            done.set_exception(error)
        return done


class Says:
    """A forecaster that names one layout for each number of jobs, and says how much is saved in the end."""

    def __init__(self, layouts: dict[int, str], saved_s: float = 1e9, step_s: float = 1.0) -> None:
        self.layouts, self.saved_s, self.step_s = layouts, saved_s, step_s
        self.heard: list[tuple[list[RemainingJob], str]] = []

    def __call__(self, jobs: Sequence[RemainingJob], now: Layout) -> LayoutForecast:
        self.heard.append((list(jobs), str(now)))
        if len(jobs) not in self.layouts:
            raise PlanError("nobody knows.")
        planned = Prediction(parse_layout(self.layouts[len(jobs)]), self.step_s, 1.0)
        tokens = sum(job.step_tokens for job in jobs)
        return LayoutForecast(Prediction(now, self.step_s, 1.0 + self.saved_s), planned, tokens, 64)


def replicas_of(layout: Layout) -> list[tuple[int, ...]]:
    return [(LAYERS,) if replica.stages == 1 else (1,) * LAYERS for replica in layout.replicas]


def opener(planned: Prediction) -> tuple[OpenReplicas, Planner]:
    """Tiny replicas of this process."""
    layout = planned.layout
    if layout.is_one_device:
        return lambda: LocalExecutor(random_backbone("llama", num_hidden_layers=LAYERS)), pack
    sizes = tuple(len(own) for own in replicas_of(layout))
    costs = tuple(LinearCost(fixed_s=4.0, token_s=1 / size) for size in sizes)
    return lambda: staged_executor("llama", *replicas_of(layout)), SpreadPlanner(sizes, costs)


def engine_in(text: str, forecast: Says, jobs: Sequence[Job], opens: Any = opener) -> tuple[Engine, MovableExecutor]:
    """An engine that begins in a layout, with jobs that it was planned for."""
    layout = parse_layout(text)
    open_replicas, planner = opener(Prediction(layout, 1.0, 1.0))
    executor = MovableExecutor(open_replicas)
    engine = Engine(executor, capacity=48, planner=planner)
    names = [spec.name for spec, _ in jobs]
    engine.keep_layout(LayoutKeeper(executor, layout, forecast, opens, planned_for=names, workers=AtOnce()))
    submit(engine, *jobs)
    return engine, executor


def jobs() -> list[Job]:
    """Three that end one after another: one is spread, with dropout; one is judged and keeps its best weights."""
    several = {"max_steps": 6, "save_steps": 1, "global_batch_size": 8}
    judged = {
        "eval_data": 2,
        "eval_steps": 1,
        "early_stopping_patience": 2,
        "learning_rate": 0.5,
        "save_steps": 1,
        "max_steps": 4,
    }
    return [
        small_job("short", max_steps=1),
        (job_spec("judged", adapter={"lora_dropout": 0.2}, **judged), random_data(3, num_eval=2)),
        (job_spec("free", sums="free", **several, max_grad_norm=0.05), random_data(1, num_samples=8)),
    ]


def decided(told: Sequence[Event]) -> list[LayoutDecided]:
    return [event for event in told if isinstance(event, LayoutDecided)]


@pytest.fixture(scope="module")
def alone() -> Any:
    """What one device makes of the jobs."""
    return train(random_backbone("llama", num_hidden_layers=LAYERS), jobs(), capacity=48)


def test_run_when_jobs_end_then_moves_from_layout_to_layout_and_keeps_every_bit(alone):
    """Unlike replicas, then stages, then one device: weights, moments, best weights, cursors and dropout all move."""
    forecast, told = Says({3: "stages:1+stages:2", 2: "stages:2", 1: ONE}), list[Event]()
    engine, executor = engine_in("stages:1+stages:2", forecast, jobs())
    for name, outcome in finish(engine, lambda _, event: told.append(event)).items():
        assert_same_bits(outcome, alone[name])
    moves = decided(told)
    assert [event.layout for event in moves] == ["stages:2", ONE] and all(event.has_moved for event in moves)
    assert "saves about" in moves[0].text and "moving takes" in moves[0].text
    assert isinstance(executor.facts.replica_sizes, tuple) and executor.facts.replica_sizes == (1,)
    heard = [([job.name for job in left], now) for left, now in forecast.heard]
    assert heard[1] == (["judged", "free"], "stages:1+stages:2") and heard[2] == (["free"], "stages:2")
    spans = [span for span in engine.timeline.spans if span.name == "move"]
    assert [span.args["layout"] for span in spans] == ["stages:2", ONE]


def test_run_when_it_moves_then_its_directory_names_all_layouts(tmp_path, monkeypatch):
    """In their order, and also those of a run that goes on in another one."""
    monkeypatch.setattr("weft.engine.train.template_digest", lambda _: "tiny backbones have no template")
    own, path = jobs()[::2], tmp_path / "run"
    spec = RunSpec(base_model="tiny", jobs=tuple(spec for spec, _ in own), capacity=48)
    moving, _ = engine_in("spread:2", Says({2: "spread:2", 1: ONE}), own)
    with RunDirectory.open(path, resume=False) as directory:
        execute_run(PreparedRun(spec, moving), directory, on_event=lambda _: None)
    assert RunDirectory.record_of(path).layouts == ("spread:2", ONE)
    for layout in (ONE, "stages:2"):
        engine, _ = engine_in(layout, Says({}), own)
        with RunDirectory.open(path, resume=True) as directory:
            write_settings(PreparedRun(spec, engine), directory)
    assert RunDirectory.record_of(path).layouts == ("spread:2", ONE, "stages:2")
    assert read_run(path).layout == "spread:2, then one device, then stages:2"


def test_run_when_jobs_arrive_and_are_cancelled_then_the_layout_follows_from_one_device_and_back(alone):
    """A job submitted in the middle of another's global batch joins it in a new layout; cancelled, it gives that up."""
    _, judged, free = jobs()
    forecast, told = Says({1: ONE, 2: "spread:2"}), list[Event]()
    engine, _ = engine_in(ONE, forecast, [free])

    def react(engine: Engine, event: Event) -> None:
        told.append(event)
        if isinstance(event, MicrobatchDone) and "judged" not in engine.jobs:
            assert not any(isinstance(event, StepDone) for event in told), "the first global batch has several"
            submit(engine, judged)
        if isinstance(event, StepDone) and (event.job, event.step) == ("judged", 2):
            engine.cancel("judged")

    found = finish(engine, react)
    assert_same_bits(found["free"], alone["free"])
    assert [event.layout for event in decided(told)] == ["spread:2", ONE]
    assert engine.jobs["judged"].state == "cancelled"


def test_run_when_a_move_does_not_pay_then_it_is_kept_and_said_once_for_each_change():
    """Meanwhile it is measured how much faster steps are than the days that were predicted."""
    told: list[Event] = []
    engine, _ = engine_in("stages:2", Says({3: ONE, 2: ONE, 1: "stages:2"}, saved_s=0.0, step_s=1e6), jobs())
    finish(engine, lambda _, event: told.append(event))
    assert [(event.layout, event.has_moved) for event in decided(told)] == [("stages:2", False)] * 2
    first, second = (event.text for event in decided(told))
    assert first.startswith("stages:2 is kept: stages:1 would save nothing, and moving takes")
    assert second == "stages:2 is kept: it is still the best for the jobs that are left"
    assert engine._layouts is not None and 0 < engine._layouts.pace < 1e-3


def test_run_when_moving_would_have_paid_after_all_then_it_moves_without_another_change(alone, monkeypatch):
    """What a first forecast rests on was measured with other jobs; it is asked again, and told only if that moves."""
    monkeypatch.setattr(MovableExecutor, "cost", property(lambda _: MoveCost(0.0, 0.0)))

    class Later(Says):
        def __call__(self, jobs: Sequence[RemainingJob], now: Layout) -> LayoutForecast:
            self.saved_s = 0.0 if len(self.heard) < 2 else 1.0
            return super().__call__(jobs, now)

    forecast, told = Later({3: ONE, 2: ONE, 1: ONE}), list[Event]()
    engine, _ = engine_in("stages:2", forecast, jobs())
    for name, outcome in finish(engine, lambda _, event: told.append(event)).items():
        assert_same_bits(outcome, alone[name])
    assert [event.has_moved for event in decided(told)][:2] == [False, True]
    assert len(forecast.heard[2][0]) == len(forecast.heard[1][0]) == 2


def test_run_when_it_is_resumed_without_some_jobs_then_that_is_a_change():
    """Its layout was chosen for all jobs of the file."""
    engine, executor = engine_in("stages:2", Says({2: "stages:2"}), jobs()[1:])
    layouts = LayoutKeeper(
        executor, parse_layout("stages:2"), Says({2: ONE}), opener, planned_for=["gone"], workers=AtOnce()
    )
    engine.keep_layout(layouts)
    first = next(event for event in engine.events() if isinstance(event, LayoutDecided | StepDone))
    assert isinstance(first, LayoutDecided) and first.layout == ONE == str(layouts.layout)


def opens_nothing(planned: Prediction) -> tuple[OpenReplicas, Planner]:
    """No replicas are to be had but the first."""

    def refuse() -> Executor:
        raise OSError("no room here")

    return refuse, opener(planned)[1]


@pytest.mark.parametrize("is_opened", [False, True])
def test_run_when_the_new_replicas_fail_then_it_goes_on_in_the_old_layout_and_loses_nothing(alone, is_opened):
    """They cannot be opened, or the second job cannot be made there; the next change asks again."""
    told: list[Event] = []
    opens = opener if is_opened else opens_nothing
    engine, _ = engine_in("stages:2", Says({3: "stages:2", 2: ONE, 1: ONE}), jobs(), opens)
    if is_opened:
        arm(FaultPlan("raise", 2, "replicas.move"))
    try:
        found = finish(engine, lambda _, event: told.append(event))
    finally:
        disarm()
    for name, outcome in found.items():
        assert_same_bits(outcome, alone[name])
    texts = [event.text for event in decided(told)]
    why = "planned fault at replicas.move" if is_opened else "no room here"
    assert texts[0].startswith("stages:2 is kept: stages:1 could not be had:") and why in texts[0]
    assert texts[1].startswith("stages:1 instead of stages:2" if is_opened else "stages:2 is kept") and len(texts) == 2
    spans = [span for span in engine.timeline.spans if span.name == "move"]
    assert [span.args.get("failed", "") != "" for span in spans] == [True, not is_opened] and why in spans[0].args[
        "failed"
    ]
    assert engine.time_split.seconds(Activity.LOADING) >= sum(span.duration_s for span in spans) * 0.999


def test_adapter_of_a_job_when_it_was_lost_after_its_end_and_the_others_moved_then_a_sentence_says_so(alone, tmp_path):
    """Its files are there; of those that trained on, nothing is missed."""
    told, moves = list[Event](), Says({3: "spread:2", 2: "spread:2", 1: ONE})
    engine, executor = engine_in("spread:2", moves, jobs())
    engine.keep_in(tmp_path / "run")
    stages: Any = executor._now.stages  # type: ignore[attr-defined]
    asked, lost = stages.outcomes, list[int]()

    def outcomes(number: int) -> list[Any]:
        """The replica where the job was is lost, with all that it had, once the job has ended."""
        if engine.jobs["short"].state == "succeeded" and not lost:
            raise ReplicaLostError("it is gone.")
        return asked(number)

    def recover() -> list[int]:
        lost.append(engine.jobs["short"].home or 0)
        for name in engine.jobs:
            stages.ask_each("remove", {lost[0]: (name,)})
        return lost

    stages.outcomes, stages.recover = outcomes, recover
    told.extend(engine.events())
    for name in ("judged", "free"):
        pairs = zip(flat(engine.adapter_of(name)), flat(alone[name].adapter), strict=True)
        assert all(x.equal(y) for x, y in pairs), name
    assert lost and [event.layout for event in decided(told) if event.has_moved] == [ONE]
    for use in (engine.adapter_of, engine.evaluate, lambda name: engine.export_adapter(name, tmp_path / "again")):
        with pytest.raises(JobError, match="job short: its replica was lost after it had ended"):
            use("short")
    assert (tmp_path / "run/short/adapter/adapter_model.safetensors").is_file()
    engine.forget("short")


def test_run_when_planning_raises_then_it_says_so_and_trains_on(alone):
    told: list[Event] = []
    engine, _ = engine_in("stages:2", Says({}), jobs())
    for name, outcome in finish(engine, lambda _, event: told.append(event)).items():
        assert_same_bits(outcome, alone[name])
    texts = {event.text for event in decided(told)}
    assert texts == {"stages:2 is kept: another one could not be planned: nobody knows."} and len(decided(told)) == 2
