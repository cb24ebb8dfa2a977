"""Microbatches that run side by side on devices that share every layer give jobs the bits that they have without."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from staged_models import objective_jobs
from tensor_models import tensor_executor
from test_stage_pool import SPEC
from test_staged_references import LAYERS, comparing, stored
from test_tensor import FEW, MODEL, jobs
from tiny_models import Job, Outcome, assert_same_bits, finish, job_spec, random_data, submit

from weft.engine import lookahead
from weft.engine.engine import Engine
from weft.engine.events import Event, StepDone
from weft.engine.lookahead import LookaheadPlanner
from weft.methods.registry import has_kernels
from weft.model.resolve import resolve
from weft.model.source import load_tokenizer
from weft.objectives.distillation import Distillation
from weft.objectives.preference import Dpo
from weft.parallel.stages.load_stages import find_parts
from weft.parallel.stages.stage_pool import StageProcesses
from weft.parallel.stages.staged import StagedExecutor
from weft.plan.cost.analytic import AnalyticCost
from weft.plan.cost.hardware import find_hardware
from weft.plan.cost.learned import MeasuredPairs, PairPace
from weft.plan.cost.shape import ModelShape, find_shape
from weft.plan.cost.types import LinearCost
from weft.plan.pipeline.build import PipelinePlanner, Schedule
from weft.plan.pipeline.pair import in_halves, side_by_side, two_groups
from weft.plan.planner import PlanFunction
from weft.plan.program import Program
from weft.plan.simulate.choose import FastestPipeline
from weft.plan.simulate.timeline import BESIDE, COMPUTE
from weft.plan.simulate.two_streams import PairTimes
from weft.plan.types import JobQueue, Limits, whole_batches

ALONE = PipelinePlanner(Schedule.EAGER, 1)
SHAPE = ModelShape.from_config(find_shape("tiny").config().to_dict())
COST = AnalyticCost(SHAPE, find_hardware("cpu"), 2, tensor_parallel=2)


def in_pairs(queues: Sequence[JobQueue], limits: Limits) -> Program:
    """All in two groups, side by side wherever that can be."""
    return side_by_side(two_groups(whole_batches(queues, limits, 1), limits.capacity)[1])


def trained(
    planner: PlanFunction,
    given: list[Job],
    on_event: Callable[[Engine, Event], None] | None = None,
    sizes: tuple[int, ...] = (2,),
    **options: Any,
) -> tuple[dict[str, Outcome], Engine]:
    """What became of the jobs on two devices."""
    executor = tensor_executor("llama", 2, sizes, **MODEL, **options)
    engine = Engine(executor, capacity=48, planner=planner)
    submit(engine, *given)
    found = finish(engine, on_event)
    engine.close()
    return found, engine


def num_beside(engine: Engine) -> int:
    return sum("beside" in span.args for span in engine.timeline.spans)


@pytest.mark.parametrize(
    ("names", "dtype", "kernels"),
    [
        (FEW, torch.float32, "reference"),
        (("lora", "high_rank"), torch.bfloat16, "reference"),
        (("lora", "high_rank", "bitfit"), torch.bfloat16, "fused"),
        *(pytest.param(None, torch.float32, kernels, marks=pytest.mark.slow) for kernels in ("reference", "fused")),
    ],
)
def test_jobs_when_in_pairs_then_have_the_bits_that_they_have_without(names, dtype, kernels):
    """Several methods, clipped, with dropout, one evaluated."""
    given = [job for job in jobs(names, num_steps=3) if kernels == "reference" or has_kernels(job[0].adapter)]
    alone, without = trained(ALONE, given, dtype=dtype, kernels=kernels)
    paired, engine = trained(in_pairs, given, dtype=dtype, kernels=kernels)
    assert num_beside(without) == 0 and num_beside(engine) >= 4 * 3
    assert alone["lora"].eval_losses
    for name, outcome in alone.items():
        assert_same_bits(paired[name], outcome)


STAGED = PipelinePlanner(Schedule.ONE_F_ONE_B, 2)


@pytest.mark.parametrize("kernels", ["reference", "fused"])
def test_jobs_when_pairs_go_through_stages_then_have_the_bits_that_they_have_without(kernels):
    """Both halves of a microbatch cross every border; clipped, with dropout, one evaluated."""
    given = jobs(("lora", "high_rank", "ia3"), num_steps=3)
    alone, without = trained(STAGED, given, sizes=(1, 1), kernels=kernels)
    paired, engine = trained(lambda *given: in_halves(STAGED(*given)), given, sizes=(1, 1), kernels=kernels)
    assert num_beside(without) == 0 and num_beside(engine) >= 4 * 3
    assert {span.stage for span in engine.timeline.spans if "beside" in span.args} == {0, 1}
    for name, outcome in alone.items():
        assert_same_bits(paired[name], outcome)


def test_pairs_when_they_have_run_then_the_timeline_has_both_passes_and_counts_their_time_once():
    _, engine = trained(in_pairs, jobs(("lora", "ia3"), num_steps=2))
    passes = [span for span in engine.timeline.measured().spans if span.name in ("forward", "backward")]
    assert {span.lane for span in passes} == {COMPUTE, BESIDE}
    for span in passes:
        is_second = span.args.get("beside", math.inf) < span.args["microbatch"]
        assert span.lane == (BESIDE if is_second else COMPUTE)
    assert engine.timeline.measured().bubble_ratio() >= 0


def test_job_when_it_turns_nan_beside_another_then_fails_alone():
    """It is in one group, and the other two are beside it and with it."""
    given = jobs(("lora", "high_rank", "ia3"), num_steps=4)
    expected, _ = trained(ALONE, given)

    def spoil(engine: Engine, event: Event) -> None:
        if isinstance(event, StepDone) and event.job == "lora" and event.step == 1:
            for column in engine.executor.stages.columns:  # type: ignore[attr-defined]
                weights = column.stages[0].weights_of("lora")
                for group in weights.adapter.groups.values():
                    group.params[0] = math.nan

    found, engine = trained(one_batch(in_pairs), given, on_event=spoil)
    assert num_beside(engine) and found.pop("lora").state == "failed"
    for name, outcome in found.items():
        assert_same_bits(outcome, expected[name])


def one_batch(planner: PlanFunction) -> PlanFunction:
    """Programs of one global batch of every job."""

    def plan(queues: Sequence[JobQueue], limits: Limits) -> Program:
        return planner([dataclasses.replace(q, batches=q.batches[:1], is_all=False) for q in queues], limits)

    return plan


def test_objectives_when_in_pairs_then_have_the_bits_that_they_have_without():
    """A head for labels beside samples that share a microbatch."""
    alone, _ = trained(ALONE, objective_jobs())
    paired, engine = trained(in_pairs, objective_jobs())
    assert num_beside(engine)
    for name, outcome in alone.items():
        assert_same_bits(paired[name], outcome)


def test_jobs_when_they_learn_from_one_teacher_side_by_side_then_both_get_its_output(tmp_path):
    """References run in front of a pair, whichever half needs them."""
    teacher = stored(tmp_path / "teacher", num_key_value_heads=4)
    given = [comparing(name, Distillation(), 5, teacher=teacher, adapter={"r": 3}) for name in ("a", "b")]
    given.append(comparing("c", Dpo(0.3), 2))
    alone, _ = trained(ALONE, given, sizes=(LAYERS,))
    paired, engine = trained(in_pairs, given, sizes=(LAYERS,))
    assert num_beside(engine)
    for name, outcome in alone.items():
        assert_same_bits(paired[name], outcome)


def test_jobs_when_programs_with_pairs_are_appended_then_have_the_bits_that_they_have_without(monkeypatch):
    """Over gloo, as `--layout tensor:2,stages:2` plans, if two take half as long side by side."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    step = {"max_steps": 6, "max_grad_norm": 0.1}
    given: list[Job] = [
        (job_spec("a", adapter={"r": 3, "lora_dropout": 0.1}, **step), random_data(1, num_samples=6)),
        (job_spec("b", adapter={"r": 4}, **step), random_data(2, num_samples=5)),
        (job_spec("c", adapter={"r": 2}, **step), random_data(3, num_samples=5)),
    ]
    known = MeasuredPairs(pairs={(name, stage): 0.5 for name in ("forward", "backward") for stage in range(2)})
    monkeypatch.setattr(PairPace, "learn", lambda *_: known)
    # However long it takes: no program is planned by anybody else.
    monkeypatch.setattr(lookahead, "SHORTEST_WAIT_S", 600.0)
    monkeypatch.setattr(LookaheadPlanner, "_plan_at_once", lambda self, due: self._plan(self.planner, due).program)
    alone = FastestPipeline(2, LinearCost())
    tokenizer: Any = load_tokenizer(SPEC.base_model)
    group = StageProcesses(SPEC, find_parts(resolve(SPEC), 2, tensor=2), tensor=(2,))
    try:
        found = []
        for planner in (alone, dataclasses.replace(alone, pairs=PairTimes(COST, known))):
            engine = Engine(StagedExecutor(group, tokenizer), capacity=48, planner=planner)
            submit(engine, *given)
            found.append(finish(engine))
            assert bool(num_beside(engine)) == (planner is not alone)
            for name in engine.jobs:
                engine.executor.drop(name)
        for name, outcome in found[0].items():
            assert_same_bits(found[1][name], outcome)
    finally:
        group.close()


@pytest.mark.slow
def test_processes_when_they_run_pairs_then_jobs_have_the_bits_that_they_have_without(monkeypatch):
    """Over gloo, on the embedded backbone; twice the same."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    step = {"max_steps": 2, "max_grad_norm": 0.1}
    evaluated = {"eval_steps": 1, "eval_data": 2, "adapter": {"r": 3, "lora_dropout": 0.1}}
    given: list[Job] = [
        (job_spec("a", **evaluated, **step), random_data(1, num_samples=6, num_eval=2)),
        (job_spec("b", adapter={"r": 4}, **step), random_data(2, num_samples=5)),
    ]
    tokenizer: Any = load_tokenizer(SPEC.base_model)
    group = StageProcesses(SPEC, find_parts(resolve(SPEC), 1, tensor=2), tensor=(2,))
    try:
        found = []
        for planner in (ALONE, in_pairs, in_pairs):
            engine = Engine(StagedExecutor(group, tokenizer), capacity=48, planner=planner)
            submit(engine, *given)
            found.append(finish(engine))
            assert bool(num_beside(engine)) == (planner is in_pairs)
            for name in engine.jobs:
                engine.executor.drop(name)
        for other in found[1:]:
            for name, outcome in found[0].items():
                assert_same_bits(other[name], outcome)
    finally:
        group.close()


def test_program_when_the_executor_comes_back_with_it_then_the_next_is_planned_meanwhile(monkeypatch):
    """A plan that is requested after it would never be ready."""
    calls: list[str] = []
    start, foresee = StagedExecutor.start, LookaheadPlanner.foresee
    monkeypatch.setattr(
        StagedExecutor, "start", lambda *given: (calls.append(type(given[1]).__name__), start(*given))[1]
    )
    monkeypatch.setattr(LookaheadPlanner, "foresee", lambda *given: (calls.append("foresee"), foresee(*given))[1])
    planner = FastestPipeline(1, LinearCost())
    trained(planner, jobs(("ia3",), num_steps=12), sizes=(1,))
    work = [each for each in calls if each in ("foresee", "StagedWork")]
    assert work[:2] == ["foresee", "StagedWork"] and work.count("foresee") == work.count("StagedWork") > 1


def test_stage_when_programs_have_pairs_then_captures_nothing_until_some_had_none():
    """Graphs are given back when pairs begin; one program in between that has none does not bring them back."""
    executor = tensor_executor("llama", 2, (2,), kernels="fused", **MODEL)
    stage = executor.stages.columns[0].stages[0]  # type: ignore[attr-defined]
    forgotten: list[bool] = []
    stage.backbone.path.forget = lambda: forgotten.append(True)
    alone, paired = Program((), ((),)), Program((), ((),), pairs=((0, 1),))
    seen = []
    for program in (alone, paired, alone, paired, *([alone] * 4), paired):
        stage.expect(program)
        seen.append((stage.backbone.devices.runs_pairs, len(forgotten)))
    assert seen == [(False, 0), *([(True, 1)] * 6), (False, 1), (True, 2)]
