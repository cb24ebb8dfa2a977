"""A replica of several stages trains every job to the bits of one device, whatever the cut and the schedule."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from staged_models import objective_jobs, odd_jobs, shuffled, staged_executor, train_until
from tiny_models import (
    Job,
    assert_same_bits,
    finish,
    job_spec,
    random_backbone,
    random_data,
    small_job,
    submit,
    train,
)

from benchmarks.pipeline.in_process import LocalStages
from weft.engine.engine import Engine
from weft.engine.events import EvalSliceDone, Event, JobsGrouped, MicrobatchDone
from weft.engine.jobs import evaluations
from weft.errors import ConfigError
from weft.plan.check import violations
from weft.plan.cost.learned import AdapterTimes
from weft.plan.cost.types import LinearCost
from weft.plan.pack.lorafusion import LoraFusionPlanner
from weft.plan.pipeline.build import PipelinePlanner, Schedule
from weft.plan.program import Program, Send
from weft.plan.simulate.choose import FastestPipeline
from weft.plan.simulate.interpret import simulate
from weft.plan.simulate.timeline import COMPUTE, Timeline
from weft.plan.spread import SpreadPlanner
from weft.plan.types import JobQueue, Limits

SCHEDULES = list(Schedule)


def staged(name: str, sizes: tuple[int, ...], schedule: Schedule = Schedule.MULTI_ADAPTER, **options: Any) -> Engine:
    planner = PipelinePlanner(schedule, len(sizes))
    return Engine(staged_executor(name, sizes, **options), capacity=48, planner=planner)


def jobs() -> list[Job]:
    """Clipped and not, with dropout; one is evaluated between steps and stops early."""
    early = {"eval_data": 2, "eval_steps": 1, "early_stopping_patience": 1, "learning_rate": 0.5, "max_steps": 3}
    evaluated = (job_spec("evaluated", seed=3, adapter={"lora_dropout": 0.2}, **early), random_data(3, num_eval=2))
    clipped, free = {"max_grad_norm": 0.05, "max_steps": 2}, {"max_grad_norm": 0.0, "max_steps": 2}
    return [small_job("a", **clipped), small_job("b", 1, global_batch_size=7, **free), evaluated]


def check_bits(schedules: Sequence[Schedule], dtype: torch.dtype) -> None:
    expected = train(random_backbone("llama", num_hidden_layers=4, dtype=dtype), jobs(), capacity=48)
    cuts = [(1, 3), (2, 2), (1, 1, 1, 1)]
    for index, schedule in enumerate(schedules):
        engine = staged("llama", cuts[index % len(cuts)], schedule, dtype=dtype)
        submit(engine, *jobs())
        for name, outcome in finish(engine).items():
            assert_same_bits(outcome, expected[name])


def test_jobs_when_trained_by_any_schedule_and_cut_then_have_the_bits_of_one_device():
    """Adapters, losses and evaluations."""
    check_bits(SCHEDULES, torch.float32)


def test_evaluation_when_long_then_runs_in_slices_with_the_bits_of_one_device(monkeypatch):
    """On replicas of stages and on one; other jobs train between the slices."""
    monkeypatch.setattr(evaluations, "SLICE_MICROBATCHES", 1)
    settings = {"eval_data": 12, "eval_steps": 2, "max_steps": 2, "adapter": {"lora_dropout": 0.2}}
    evaluated = (job_spec("evaluated", seed=3, **settings), random_data(3, num_eval=12))
    jobs = [small_job("a", max_steps=9), evaluated]
    expected = train(random_backbone("llama", num_hidden_layers=4), jobs, capacity=48)
    planner = SpreadPlanner((2, 1), (LinearCost(), LinearCost()))
    for engine in (
        staged("llama", (1, 3), Schedule.EAGER),
        Engine(staged_executor("llama", (2, 2), (4,)), capacity=48, planner=planner),
    ):
        events = list[Event]()
        submit(engine, *jobs)
        for name, outcome in finish(engine, lambda _, event, events=events: events.append(event)).items():
            assert_same_bits(outcome, expected[name])
        assert sum(isinstance(event, EvalSliceDone) for event in events) > 1


@pytest.mark.slow
def test_jobs_when_the_fastest_plan_is_sought_then_have_the_bits_of_one_device():
    """And programs are planned beside the one that runs."""
    many = [small_job("a", max_steps=20), small_job("b", 1, max_steps=20, global_batch_size=7)]
    expected = train(random_backbone("llama", num_hidden_layers=3), many, capacity=48)
    engine = Engine(staged_executor("llama", (1, 2)), capacity=48, planner=FastestPipeline(2, LinearCost(fixed_s=1.0)))
    submit(engine, *many)
    for name, outcome in finish(engine).items():
        assert_same_bits(outcome, expected[name])
    assert any(span.name == "plan_ahead" for span in engine.timeline.spans)


class PatientLoraFusion(LoraFusionPlanner):
    """Always has time for the solver."""

    def within(self, budget_s: float) -> LoraFusionPlanner:
        return self


def test_jobs_when_lorafusion_plans_then_have_the_bits_of_one_device():
    """Two groups that take turns; the solver packs, and microbatches are merged."""
    many = [small_job(name, seed, max_steps=5, global_batch_size=3 + seed) for seed, name in enumerate("abc")]
    expected = train(random_backbone("llama", num_hidden_layers=3), many, capacity=48)
    planner = PipelinePlanner(Schedule.MULTI_ADAPTER, 2, PatientLoraFusion(2))
    engine = Engine(staged_executor("llama", (1, 2)), capacity=48, planner=planner)
    submit(engine, *many)
    microbatches: list[MicrobatchDone] = []
    outcomes = finish(
        engine, lambda _, event: microbatches.append(event) if isinstance(event, MicrobatchDone) else None
    )
    for name, outcome in outcomes.items():
        assert_same_bits(outcome, expected[name])
    assert len({frozenset(event.jobs) for event in microbatches}) > 1


def test_jobs_when_fusion_groups_them_then_have_the_bits_of_one_device_and_it_is_reported():
    """Adapters that are assumed to cost much by the job: each job gets microbatches of its own."""
    many = [small_job(name, seed, max_steps=20) for seed, name in enumerate("abc")]
    expected = train(random_backbone("llama", num_hidden_layers=3), many, capacity=48)
    planner = FastestPipeline(2, LinearCost(), AdapterTimes(1000.0, 0.0))
    engine = Engine(staged_executor("llama", (1, 2)), capacity=48, planner=planner)
    submit(engine, *many)
    groupings: list[JobsGrouped] = []
    outcomes = finish(engine, lambda _, event: groupings.append(event) if isinstance(event, JobsGrouped) else None)
    for name, outcome in outcomes.items():
        assert_same_bits(outcome, expected[name])
    assert sorted(groupings[0].groups) == [("a",), ("b",), ("c",)] and groupings[0].num_measured == 0
    assert groupings[0].text.startswith("3 groups of jobs: ") and "faster than one group" in groupings[0].text


def test_jobs_when_the_weights_are_bfloat16_then_have_the_bits_of_one_device():
    check_bits([Schedule.ONE_F_ONE_B], torch.bfloat16)


@pytest.mark.parametrize("make", [odd_jobs, objective_jobs])
def test_methods_optimizers_and_objectives_when_cut_then_have_the_bits_of_one_device(make):
    expected = train(random_backbone("llama_odd", num_hidden_layers=3), make(), capacity=48)
    engine = staged("llama_odd", (1, 2))
    submit(engine, *make())
    for name, outcome in finish(engine).items():
        assert_same_bits(outcome, expected[name])


@pytest.mark.parametrize("schedule", [Schedule.ONE_F_ONE_B, Schedule.LORAPP])
def test_timeline_when_recorded_then_each_stage_did_what_the_simulator_predicts_in_its_order(schedule):
    """One program, two interpreters."""
    planned: list[Program] = []

    def plan(queues: Sequence[JobQueue], limits: Limits) -> Program:
        planned.append(PipelinePlanner(schedule, 3)(queues, limits))
        return planned[-1]

    engine = Engine(staged_executor("llama", (1, 1, 1)), capacity=48, planner=plan)
    submit(engine, small_job("a", max_steps=2), small_job("b", 1, max_steps=3))
    finish(engine)
    measured = engine.timeline.measured()
    simulated = [simulate(program, LinearCost()) for program in planned]
    assert measured.num_stages == 3 and planned
    for stage in range(3):
        expected = [did for timeline in simulated for did in done(timeline, stage)]
        assert done(measured, stage) == expected


def done(timeline: Timeline, stage: int) -> list[tuple[str, Any]]:
    """What a stage computed, in its order."""
    own = [span for span in timeline.spans if span.stage == stage and span.lane == COMPUTE]
    return [(span.name, span.args.get("microbatch", span.args["jobs"])) for span in own]


def test_run_when_resumed_with_another_number_of_stages_then_the_files_are_those_of_one_device(tmp_path):
    """Checkpoints do not record how many stages wrote them."""
    train_until(whole(), tmp_path / "one", 9, resumed_jobs())
    for until, engine in ((2, staged("llama_odd", (1, 2))), (4, whole()), (9, staged("llama_odd", (1, 1, 1)))):
        train_until(engine, tmp_path / "moved", until, resumed_jobs())
    files = [path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*.safetensors")]
    assert len(files) >= 4
    for path in files:
        assert (tmp_path / "one" / path).read_bytes() == (tmp_path / "moved" / path).read_bytes(), path


def whole() -> Engine:
    return Engine(random_backbone("llama_odd", num_hidden_layers=3), capacity=48)


def resumed_jobs() -> list[Job]:
    specs = [job_spec("a", ema_decay=0.5, adapter={"lora_dropout": 0.1, "r": 3}), job_spec("b", optim="muon")]
    return [(spec, random_data(index)) for index, spec in enumerate(specs)]


@pytest.mark.parametrize("is_planted", [True, False], ids=["not finite", "too large"])
def test_job_when_it_diverges_then_ends_as_on_one_device_and_the_neighbours_go_on(is_planted):
    """No stage takes a step that another one leaves out."""
    settings = {"max_steps": 8} if is_planted else {"max_steps": 3, "learning_rate": 1e9}
    jobs = [(job_spec("spoilt", **settings), random_data(1)), small_job("good", max_steps=3)]
    one, several = Engine(random_backbone("llama"), capacity=48), staged("llama", (1, 1))
    found = []
    for engine in (one, several):
        submit(engine, *jobs)
        holders: Any = engine.executor if engine is one else engine.executor.stages.stages[-1].local  # type: ignore[attr-defined]
        if is_planted:
            holders.jobs["spoilt"].weights.adapter.groups["b"].params[-1] = math.nan
        found.append(finish(engine))
    expected, spoilt = found[0]["spoilt"], found[1]["spoilt"]
    assert (spoilt.state, spoilt.reason) == (expected.state, expected.reason)
    assert expected.state == "failed"
    assert_same_bits(found[1]["good"], found[0]["good"])


@pytest.mark.parametrize(
    ("job", "where"),
    [
        (job_spec("job", optim="adamw_8bit"), "optim"),
        (job_spec("job", adapter={"r": 2, "target_modules": ("nothing",)}), "adapter.target_modules"),
        (job_spec("job", learning_rate_pattern={"nothing": 2.0}), "learning_rate_pattern"),
    ],
    ids=["blocks of numbers", "no such module", "no such rate"],
)
def test_job_when_it_does_not_fit_stages_then_refused_and_forgotten(job, where):
    engine = staged("llama", (1, 1))
    with pytest.raises(ConfigError) as found:
        engine.submit(job, random_data(0))
    assert found.value.where == where
    submit(engine, small_job("job", max_steps=1))
    assert finish(engine)["job"].state == "succeeded"


def test_programs_when_mutated_at_random_then_are_refused_or_run_to_the_same_bits():
    """The validator lets nothing through that would train anything else."""
    rng = random.Random(4)
    jobs = [small_job("a", max_steps=2, max_grad_norm=0.1), small_job("b", 1, max_steps=2)]
    expected = train(random_backbone("llama"), jobs, capacity=24)
    executor, counts = staged_executor("llama", (1, 1)), Counter[bool]()

    def plan(queues: Sequence[JobQueue], limits: Limits) -> Program:
        made = PipelinePlanner(Schedule.EAGER, 2)(queues, limits)
        mutants = [mutant for _ in range(40) if (mutant := shuffled(made, rng)) != made]
        may_run = [mutant for mutant in mutants if not violations(mutant, queues, limits)]
        counts.update({True: len(may_run), False: len(mutants) - len(may_run)})
        return rng.choice(may_run) if may_run else made

    for _ in range(2):
        engine = Engine(executor, capacity=24, planner=plan)
        submit(engine, *jobs)
        found = finish(engine)
        for name, outcome in found.items():
            assert_same_bits(outcome, expected[name])
            engine.forget(name)
    assert min(counts[True], counts[False]) > 4


@pytest.mark.parametrize("schedule", [Schedule.GPIPE, Schedule.EAGER])
def test_stages_when_a_program_failed_in_the_middle_then_the_next_one_gets_nothing_of_it(monkeypatch, schedule):
    """What it had sent is gone, whichever jobs train there next."""
    own = [small_job("a", max_steps=2), small_job("b", 1, max_steps=2)]
    executor: Any = staged_executor("llama", (1, 1))
    first = executor.stages.stages[0].runner
    backward = first.backward

    def fails(*given: Any) -> Any:
        raise RuntimeError("planted")

    for is_failing in (True, False):
        monkeypatch.setattr(first, "backward", fails if is_failing else backward)
        engine = Engine(executor, capacity=24, planner=PipelinePlanner(schedule, 2))
        submit(engine, *own)
        if is_failing:
            with pytest.raises(RuntimeError, match="planted"):
                engine.run()
            for name in engine.jobs:
                executor.unseat(name)
                executor.drop(name)
    expected = train(random_backbone("llama"), own, capacity=24)
    for name, outcome in finish(engine).items():
        assert_same_bits(outcome, expected[name])


@pytest.mark.parametrize("schedule", [Schedule.GPIPE, Schedule.EAGER])
def test_stages_when_one_never_sends_what_another_waits_for_then_the_error_names_the_waiting_stage(
    monkeypatch, schedule
):
    """A list that was not checked: stages of one process end with an error instead of never."""

    def without_gradients(lists: Any) -> Any:
        return tuple(tuple(i for i in own if not (isinstance(i, Send) and i.is_gradient)) for own in lists)

    def plan(queues: Sequence[JobQueue], limits: Limits) -> Program:
        program = PipelinePlanner(schedule, 2)(queues, limits)
        return replace(program, stages=without_gradients(program.stages))

    append = LocalStages.append
    broken: Any = lambda own, work, lists, due: append(own, work, without_gradients(lists), due)  # noqa: E731
    monkeypatch.setattr(LocalStages, "append", broken)
    monkeypatch.setattr("weft.engine.lookahead.violations", lambda *given: [])
    planner = PipelinePlanner(schedule, 2) if schedule is Schedule.EAGER else plan
    engine = Engine(staged_executor("llama", (1, 1)), capacity=48, planner=planner)
    submit(engine, small_job("a", max_steps=2))
    with pytest.raises(RuntimeError, match="wait for each other for ever: 0 for gradient of 1"):
        engine.run()
