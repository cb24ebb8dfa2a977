"""A run changes its layout when jobs come and go, and no bit of any job depends on it."""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from named_layouts import AtOnce, Names
from replicated_runs import files_of, run_spec, write_data
from replicated_runs import train as train_alone
from thread_ranks import ThreadRanks

from weft.engine.events import Event, LayoutDecided, StepDone
from weft.engine.resume import plan_resume
from weft.engine.train import execute_run, prepare_run
from weft.model.source import load_tokenizer
from weft.parallel.replicas.following_engine import FollowingEngine, LayoutKeeper
from weft.parallel.replicas.hosts import rank_order
from weft.parallel.replicas.rank_group import RankGroup
from weft.plan.layout import Layout, parse_layout
from weft.plan.replan import LayoutForecast, MoveCost, Prediction, RemainingJob
from weft.report.read_run import read_run
from weft.spec import RunSpec
from weft.store.faults import FaultPlan, arm, disarm
from weft.store.run_dir import RunDirectory
from weft.store.wall_clock import Activity

CLOCK = datetime.datetime(2026, 1, 2)
JOBS = ("urgent", "dropout", "rare", "stops")
"""In the order in which they may end."""


@dataclasses.dataclass
class Followed:
    """A run over ranks of one device each whose number follows the jobs, and what happened in it."""

    spec: RunSpec
    forecast: Names
    events: list[Event] = dataclasses.field(default_factory=list)
    engine: FollowingEngine | None = None
    num_opened: int = 0
    fails: Callable[[int], bool] = lambda number: False
    """Whether the ranks that are opened as the n-th fail to open."""

    def train(self, data: Path, out: Path, first: str, planned_for: Sequence[str] = JOBS) -> None:
        """Trains into a directory, or goes on with the run there."""
        resume = RunDirectory.holds_run(out)
        with RunDirectory.open(out, resume=resume) as directory:
            done = plan_resume(self.spec, directory).done if resume else frozenset[str]()

            def load(spec: RunSpec, jobs: Any, wall: Any) -> Any:
                begin = Prediction(parse_layout(first), 0.0, 0.0)

                def open_ranks(wanted: Prediction, jobs: Any, capacity: int) -> RankGroup:
                    self.num_opened += 1
                    if self.fails(self.num_opened):
                        raise OSError("no room here")
                    ranks = ThreadRanks(dataclasses.replace(rank_order(spec, spec.jobs), capacity=capacity))
                    return RankGroup(ranks, len(wanted.layout.replicas))

                layouts = LayoutKeeper(begin, self.forecast, open_ranks, planned_for=planned_for, workers=AtOnce())
                ranks = open_ranks(begin, jobs, 96)
                tokenizer = load_tokenizer(spec.base_model)
                self.engine = FollowingEngine(ranks, tokenizer, layouts=layouts, clock=CLOCK, wall=wall)
                return spec, self.engine, ()

            run = prepare_run(self.spec, base_dir=data, skip=done, clock=CLOCK, open_engine=load)
            try:
                execute_run(run, directory, on_event=self.events.append)
            finally:
                run.engine.close()

    @property
    def decided(self) -> list[LayoutDecided]:
        return [event for event in self.events if isinstance(event, LayoutDecided)]


def spec_of() -> RunSpec:
    """Four jobs that end one after another: with dropout, early stopping, frequent and rare checkpoints."""
    spec = run_spec()
    steps = {"urgent": 2, "dropout": 6, "rare": 9}
    jobs = [dataclasses.replace(j, max_steps=steps.get(j.name, j.max_steps)) for j in spec.jobs if j.name in JOBS]
    return dataclasses.replace(spec, jobs=tuple(jobs))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data")
    write_data(path)
    return path


@pytest.fixture(scope="module")
def alone(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one device makes of the jobs."""
    out = tmp_path_factory.mktemp("alone") / "out"
    train_alone(spec_of(), data, out, 0)
    return out


def assert_same(out: Path, alone: Path) -> None:
    for name in JOBS:
        assert files_of(out, name) == files_of(alone, name), name


def test_run_when_jobs_end_then_moves_from_layout_to_layout_and_keeps_every_bit(data, alone, tmp_path):
    """Weights, moments, best weights, cursors and dropout move with the jobs; run.json names all layouts."""
    run = Followed(spec_of(), Names({4: "spread:2", 3: "stages:1", 2: "spread:3", 1: "spread:3"}))
    run.train(data, tmp_path / "out", "spread:2")
    assert_same(tmp_path / "out", alone)
    assert [event.layout for event in run.decided if event.has_moved] == ["stages:1", "spread:3"]
    assert "saves about" in run.decided[0].text and "moving takes" in run.decided[0].text
    assert run.forecast.requests[1][1] == "spread:2" and len(run.forecast.requests[1][0]) == 3
    spans = json.loads((tmp_path / "out/timeline.json").read_text())["traceEvents"]
    assert [span["args"]["layout"] for span in spans if span["name"] == "move"] == ["stages:1", "spread:3"]
    assert {span["pid"] for span in spans if span["name"] == "forward_backward"} >= {1, 2}
    assert read_run(tmp_path / "out").layout == "spread:2, then one device, then spread:3"


def test_run_when_a_move_does_not_pay_then_it_stays_and_reports_it_once_for_each_change(data, alone, tmp_path):
    """Meanwhile it is measured how much faster steps are than the days that were predicted."""
    named = {4: "stages:1", 3: "stages:1", 2: "spread:2", 1: "spread:2"}
    run = Followed(spec_of(), Names(named, saved_s=0.0, step_s=1e6))
    run.train(data, tmp_path / "out", "spread:2")
    assert_same(tmp_path / "out", alone)
    assert [(event.layout, event.has_moved) for event in run.decided[:2]] == [("spread:2", False)] * 2
    assert run.decided[0].text.startswith("spread:2 is kept: stages:1 would save nothing, and moving takes")
    assert run.decided[1].text == "spread:2 is kept: it is still the best for the jobs that are left"
    assert run.engine is not None and 0 < run.engine._layouts.pace < 1e-3 and run.num_opened == 1


def test_run_when_moving_would_have_paid_after_all_then_it_moves_without_another_change(
    data, alone, tmp_path, monkeypatch
):
    """What a first forecast rests on was measured with other jobs."""
    monkeypatch.setattr(FollowingEngine, "cost", property(lambda _: MoveCost(0.0, 0.0)))

    class Later(Names):
        def __call__(self, jobs: Sequence[RemainingJob], now: Layout) -> LayoutForecast:
            self.saved_s = 0.0 if len(self.requests) < 2 else 1.0
            return super().__call__(jobs, now)

    run = Followed(spec_of(), Later(dict.fromkeys(range(1, 5), "stages:1")))
    run.train(data, tmp_path / "out", "spread:2")
    assert_same(tmp_path / "out", alone)
    assert [event.has_moved for event in run.decided][:2] == [False, True]
    assert len(run.forecast.requests[2][0]) == len(run.forecast.requests[1][0]) == 3


def test_run_when_it_is_resumed_without_some_jobs_then_that_is_a_change(data, tmp_path):
    """Its layout was chosen for all jobs of the file."""
    run = Followed(spec_of(), Names(dict.fromkeys(range(1, 5), "stages:1")))
    run.train(data, tmp_path / "out", "spread:2", planned_for=[*JOBS, "gone"])
    first = next(event for event in run.events if isinstance(event, LayoutDecided | StepDone))
    assert isinstance(first, LayoutDecided) and first.layout == "stages:1"


@pytest.mark.parametrize("is_opened", [False, True])
def test_run_when_the_new_replicas_fail_then_it_goes_on_in_the_old_layout_and_loses_nothing(
    data, alone, tmp_path, is_opened
):
    """They cannot be started, or the second job cannot be taken off the old ones; the next change tries again."""
    run = Followed(spec_of(), Names({4: "spread:2", 3: "stages:1", 2: "stages:1", 1: "stages:1"}))
    if is_opened:
        arm(FaultPlan("raise", 2, "replicas.move"))
    else:
        run.fails = lambda number: number == 2
    try:
        run.train(data, tmp_path / "out", "spread:2")
    finally:
        disarm()
    assert_same(tmp_path / "out", alone)
    texts = [event.text for event in run.decided]
    why = "planned fault at replicas.move" if is_opened else "no room here"
    assert texts[0].startswith("spread:2 is kept: stages:1 could not be loaded:") and why in texts[0]
    assert texts[1].startswith("stages:1 instead of spread:2")
    assert run.engine is not None
    spans = [span for span in run.engine.timeline.spans if span.name == "move"]
    assert [span.args.get("failed", "") != "" for span in spans] == [True, False]
    assert run.engine.time_split.seconds(Activity.LOADING) > 0


def test_run_when_planning_raises_then_it_is_reported_and_trains_on(data, alone, tmp_path):
    run = Followed(spec_of(), Names({}))
    run.train(data, tmp_path / "out", "spread:2")
    assert_same(tmp_path / "out", alone)
    texts = {event.text for event in run.decided}
    assert texts == {"spread:2 is kept: another one could not be planned: no layout is known."}
