"""Several replicas train every job to the bits of one device, whichever of them runs which samples."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from covering import slow
from staged_models import objective_jobs, odd_jobs, shuffled, staged_executor, train_until
from tiny_models import Job, assert_same_bits, finish, job_spec, random_backbone, random_data, small_job, submit, train

from weft.engine.engine import Engine
from weft.engine.events import Event
from weft.engine.lookahead import LookaheadPlanner
from weft.parallel.stages.shares import JobShare, SpreadPart, combine_spread_sums
from weft.plan import spread
from weft.plan.check import violations
from weft.plan.cost.types import LinearCost
from weft.plan.layout import DispatchRule
from weft.plan.planner import PipelineChoice
from weft.plan.program import Measure, Program
from weft.plan.simulate.choose import FastestSpread
from weft.plan.spread import SpreadPlanner
from weft.plan.types import JobQueue, Limits

LAYERS = 2


def jobs() -> list[Job]:
    """Two that are spread, clipped and with dropout, and two at home, one of which is evaluated and stops early."""
    free: dict[str, Any] = {"gradient_sum": "any_order", "max_steps": 3, "max_grad_norm": 0.05}
    early = {"eval_data": 2, "eval_steps": 1, "early_stopping_patience": 1, "learning_rate": 0.5, "max_steps": 3}
    return [
        (job_spec("free", adapter={"lora_dropout": 0.1, "r": 3}, **free), random_data(1, num_samples=8)),
        (
            job_spec("judged", seed=3, gradient_sum="any_order", adapter={"lora_dropout": 0.2}, **early),
            random_data(3, num_eval=2),
        ),
        small_job("a", max_grad_norm=0.05, max_steps=2),
        small_job("b", 1, global_batch_size=7, max_steps=2),
    ]


@dataclass(frozen=True)
class AnyDispatch:
    """Plans as ever, but deals samples out at random."""

    planner: SpreadPlanner
    rng: random.Random

    def __call__(self, queues: Sequence[JobQueue], limits: Limits) -> Program:
        deal = spread.deal
        costs = [LinearCost(token_s=self.rng.choice([0.2, 1.0, 5.0])) for _ in self.planner.replica_sizes]
        spread.deal = lambda given, priced, rule: deal(  # type: ignore[assignment]
            given, [replace(each, cost=cost) for each, cost in zip(priced, costs, strict=True)], rule
        )
        try:
            return self.planner(queues, limits)
        finally:
            spread.deal = deal


def engine_of(*replicas: tuple[int, ...], seed: int | None = None, name: str = "llama", **options: Any) -> Engine:
    costs = tuple(LinearCost(fixed_s=4.0, token_s=1 / len(own)) for own in replicas)
    planner: Any = SpreadPlanner(tuple(len(own) for own in replicas), costs)
    if seed is not None:
        planner = AnyDispatch(planner, random.Random(seed))
    return Engine(staged_executor(name, *replicas, **options), capacity=48, planner=planner)


def test_jobs_when_spread_over_replicas_of_fused_kernels_then_have_the_bits_of_one_device():
    """Sums that kernels have made go to the deciding replica in the same words."""
    expected = train(random_backbone("llama", kernels="fused", num_hidden_layers=LAYERS), jobs(), capacity=48)
    engine = engine_of((2,), (1, 1), seed=1, kernels="fused")
    submit(engine, *jobs())
    for name, outcome in finish(engine).items():
        assert_same_bits(outcome, expected[name])


@pytest.mark.parametrize("dtype", [torch.float32, slow(torch.bfloat16)])
def test_jobs_when_spread_over_any_replicas_then_have_the_bits_of_one_device(dtype):
    """One, two and three, alike and not, however their samples are dealt out: adapters, losses and evaluations."""
    expected = train(random_backbone("llama", num_hidden_layers=LAYERS, dtype=dtype), jobs(), capacity=48)
    layouts: list[tuple[tuple[int, ...], ...]] = [((2,), (2,)), ((2,), (1, 1)), ((1, 1), (2,), (1, 1)), ((2,),) * 3]
    for seed, layout in enumerate(layouts if dtype is torch.float32 else layouts[1:2]):
        engine = engine_of(*layout, seed=seed, dtype=dtype)
        submit(engine, *jobs())
        for name, outcome in finish(engine).items():
            assert_same_bits(outcome, expected[name])


def test_adapters_when_dispatched_by_any_rule_then_have_the_bits_of_one_device():
    """Rules that deal the same samples to other replicas; each deals otherwise than the others."""
    own, dealt = jobs()[:3], dict[DispatchRule, list[list[int]]]()
    expected = train(random_backbone("llama", num_hidden_layers=LAYERS), own, capacity=48)
    costs = (LinearCost(fixed_s=4.0), LinearCost(fixed_s=4.0, token_s=0.4))
    for rule in DispatchRule:
        engine = Engine(
            staged_executor("llama", (2,), (1, 1)), capacity=48, planner=SpreadPlanner((1, 2), costs, dispatch=rule)
        )
        submit(engine, *own)
        for name, outcome in finish(engine).items():
            assert_same_bits(outcome, expected[name])
        spans = [span for span in engine.timeline.measured().spans if span.name == "forward"]
        dealt[rule] = [[sum(s.args["jobs"].values()) for s in spans if s.stage == k] for k in (0, 1)]
    assert len({str(own) for own in dealt.values()}) == len(DispatchRule)


def test_jobs_when_replicas_in_stages_group_their_own_then_have_the_bits_of_one_device(monkeypatch):
    """Who shares microbatches is chosen on each replica, and reported; here also for the first program."""
    monkeypatch.setattr(LookaheadPlanner, "_plan_at_once", lambda self, due: self._plan(self.planner, due).program)
    own = [small_job(name, seed, max_steps=2) for seed, name in enumerate("abcd")]
    expected = train(random_backbone("llama", num_hidden_layers=LAYERS), own, capacity=48)
    chosen: list[PipelineChoice] = []

    class Watched(FastestSpread):
        def choose(self, queues: Sequence[JobQueue], limits: Limits) -> PipelineChoice | None:
            choice = super().choose(queues, limits)
            chosen.extend([] if choice is None else [choice])
            return choice

    planner = Watched(SpreadPlanner((2, 2), (LinearCost(fixed_s=4.0),) * 2))
    engine = Engine(staged_executor("llama", (1, 1), (1, 1)), capacity=48, planner=planner)
    submit(engine, *own)
    for name, outcome in finish(engine).items():
        assert_same_bits(outcome, expected[name])
    assert chosen and sorted(job for group in chosen[0].groups for job in group) == [*"abcd"]
    assert chosen[0].num_replicas == 2


def test_samples_when_a_job_is_spread_then_run_on_all_replicas_and_others_at_home_on_one():
    engine = engine_of((2,), (2,))
    submit(engine, *jobs())
    finish(engine)
    ran: dict[str, set[int]] = {}
    for span in engine.timeline.measured().spans:
        for name in span.args.get("jobs", ()) if span.name == "forward" else ():
            ran.setdefault(name, set()).add(span.stage)
    assert ran["free"] == ran["judged"] == {0, 1}
    assert {len(ran["a"]), len(ran["b"])} == {1} and ran["a"] != ran["b"]


@pytest.mark.parametrize("make", [odd_jobs, objective_jobs])
def test_methods_optimizers_and_objectives_when_spread_then_have_the_bits_of_one_device(make):
    """Penalties are added once, heads are on the last stages, and what belongs together stays together."""
    own = [(replace(spec, gradient_sum="any_order"), data) for spec, data in make()]
    expected = train(random_backbone("llama_odd", num_hidden_layers=3), own, capacity=48)
    planner = SpreadPlanner((1, 2), (LinearCost(), LinearCost(token_s=0.5)))
    engine = Engine(staged_executor("llama_odd", (3,), (1, 2)), capacity=48, planner=planner)
    submit(engine, *own)
    for name, outcome in finish(engine).items():
        assert_same_bits(outcome, expected[name])


def test_run_when_resumed_under_any_layout_then_the_files_are_those_of_one_device(tmp_path):
    def whole() -> Engine:
        return Engine(random_backbone("llama", num_hidden_layers=LAYERS), capacity=48)

    own = [small_job("a", gradient_sum="any_order", max_steps=8, ema_decay=0.5), small_job("b", 1, max_steps=8)]
    train_until(whole(), tmp_path / "one", 8, own)
    layouts: list[tuple[tuple[int, ...], ...]] = [((2,), (2,)), (), ((1, 1),), ((1, 1), (2,))]
    for index, layout in enumerate(layouts):
        train_until(engine_of(*layout) if layout else whole(), tmp_path / "moved", 2 * index + 2, own)
    files = [path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*.safetensors")]
    assert len(files) >= 4
    for path in files:
        assert (tmp_path / "one" / path).read_bytes() == (tmp_path / "moved" / path).read_bytes(), path


def test_jobs_when_others_join_pause_and_leave_then_have_the_bits_of_one_device():
    """Homes change, and a spread job that was paused goes on."""
    own = jobs()
    expected = train(random_backbone("llama", num_hidden_layers=LAYERS), own, capacity=48)
    engine = engine_of((2,), (1, 1))
    submit(engine, own[0], own[2], small_job("leaves", 5, max_steps=50))
    received: list[Event] = []

    def change(engine: Engine, event: Event) -> None:
        received.append(event)
        if len(received) == 5:
            engine.pause("free")
            submit(engine, own[1])
        if len(received) == 12:
            engine.cancel("leaves")
            engine.resume("free")
            submit(engine, own[3])

    found = finish(engine, change)
    assert found["leaves"].state == "cancelled" and len(received) > 12
    for spec, _ in own:
        assert_same_bits(found[spec.name], expected[spec.name])


@pytest.mark.parametrize("is_planted", [True, False], ids=["not finite", "too large"])
def test_job_when_it_diverges_on_one_replica_then_ends_as_on_one_device_and_the_others_go_on(is_planted):
    """No replica takes a step that another one leaves out."""
    settings = {"max_steps": 8} if is_planted else {"max_steps": 3, "learning_rate": 1e9}
    own = [(job_spec("spoilt", gradient_sum="any_order", **settings), random_data(1)), small_job("good", max_steps=3)]
    one, several = Engine(random_backbone("llama", num_hidden_layers=LAYERS), capacity=48), engine_of((2,), (1, 1))
    found = []
    for engine in (one, several):
        submit(engine, *own)
        executor: Any = engine.executor
        for holder in (
            [executor] if engine is one else [executor.stages.stages[0].local, executor.stages.stages[2].local]
        ):
            if is_planted:
                holder.jobs["spoilt"].weights.adapter.groups["b"].params[-1] = math.nan
        found.append(finish(engine))
    assert (found[1]["spoilt"].state, found[1]["spoilt"].reason) == (
        found[0]["spoilt"].state,
        found[0]["spoilt"].reason,
    )
    assert found[0]["spoilt"].state == "failed"
    assert_same_bits(found[1]["good"], found[0]["good"])


def test_programs_when_mutated_at_random_then_are_refused_or_run_to_the_same_bits():
    """The validator lets nothing through that would train anything else, or wait for ever."""
    rng = random.Random(4)
    own = [small_job("a", max_steps=3, max_grad_norm=0.1, gradient_sum="any_order"), small_job("b", 1, max_steps=2)]
    expected = train(random_backbone("llama", num_hidden_layers=LAYERS), own, capacity=24)
    planner, counts = SpreadPlanner((1, 2), (LinearCost(), LinearCost(token_s=0.5))), Counter[bool]()

    def plan(queues: Sequence[JobQueue], limits: Limits) -> Program:
        made = planner(queues, limits)
        mutants = [mutant for _ in range(40) if (mutant := shuffled(made, rng)) != made]
        may_run = [mutant for mutant in mutants if not violations(mutant, queues, limits)]
        counts.update({True: len(may_run), False: len(mutants) - len(may_run)})
        return rng.choice(may_run) if may_run else made

    engine = Engine(staged_executor("llama", (2,), (1, 1)), capacity=24, planner=plan)
    submit(engine, *own)
    for name, outcome in finish(engine).items():
        assert_same_bits(outcome, expected[name])
    assert min(counts[True], counts[False]) > 4


def test_steps_when_replicas_measure_them_in_unlike_orders_then_have_the_bits_of_one_device():
    """Messages have no names: the deciding replica knows in which order another replica sends."""
    own = [
        small_job(name, seed, max_steps=3, gradient_sum="any_order", max_grad_norm=0.1)
        for seed, name in enumerate("abc")
    ]
    expected = train(random_backbone("llama", num_hidden_layers=LAYERS), own, capacity=48)
    planner, num_unlike = SpreadPlanner((1, 2), (LinearCost(), LinearCost(token_s=0.5))), 0

    def plan(queues: Sequence[JobQueue], limits: Limits) -> Program:
        nonlocal num_unlike
        made = planner(queues, limits)
        turned = turned_measures(made)
        assert not violations(turned, queues, limits)
        num_unlike += turned != made
        return turned

    engine = Engine(staged_executor("llama", (2,), (1, 1)), capacity=48, planner=plan)
    submit(engine, *own)
    for name, outcome in finish(engine).items():
        assert_same_bits(outcome, expected[name])
    assert num_unlike


def turned_measures(program: Program) -> Program:
    """The program with runs of measures turned around on the second replica."""
    stages = [program.stages[0]]
    for instructions in program.stages[1:]:
        runs = [list(run) for _, run in itertools.groupby(instructions, lambda i: isinstance(i, Measure))]
        turned = [run[::-1] if isinstance(run[0], Measure) else run for run in runs]
        stages.append(tuple(itertools.chain.from_iterable(turned)))
    return replace(program, stages=tuple(stages))


@pytest.mark.parametrize("flags", [(True, False), (False, True)])
def test_gradient_when_one_replica_has_a_loss_that_is_not_finite_then_no_replica_steps(flags):
    """Also where the gradients themselves are finite."""
    share = JobShare(sizes={}, trained=(), modules=(), target_names=(), shared={})
    replicas = [([SpreadPart(is_finite, {}, None)], [share]) for is_finite in flags]
    decision, _ = combine_spread_sums(replicas, lambda gradient: torch.tensor(1.0))
    assert not decision.is_finite
