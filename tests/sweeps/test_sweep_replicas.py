"""A sweep over several replicas finds what it finds over one, whatever the timing and whichever process dies."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from covering import slow

from tests.parallel.replicas.named_layouts import AtOnce, Names
from tests.parallel.replicas.thread_ranks import ThreadRanks
from weft.engine.train import load_engine
from weft.errors import JobError
from weft.model.source import load_tokenizer
from weft.parallel.replicas.following_engine import FollowingSweep, LayoutKeeper
from weft.parallel.replicas.hosts import rank_order
from weft.parallel.replicas.rank_group import RankGroup
from weft.parallel.replicas.steered_engine import SweepReplicas
from weft.plan.cost.analytic import AnalyticCost
from weft.plan.cost.hardware import find_hardware
from weft.plan.cost.shape import ModelShape, find_shape
from weft.plan.layout import parse_layout
from weft.plan.replan import Forecaster, MoveCost, Prediction
from weft.plan.sweep.forecast import PackForecaster
from weft.spec.load_sweep import sweep_from_mapping
from weft.sweeps.api import begun_at, check_folder, conclude, open_run, prepare_sweep

ASHA = {"rule": "asha", "factor": 3, "grace": 3, "unit": "steps", "min_trials": 3}
NINE = {"lr": [3e-2, 1e-5, 1e-3, 1.6e-2, 1e-4, 8e-3, 5e-4, 4e-3, 2e-3]}
ANSWERING = {"objective": "exact_match", "job": {"save_steps": 2, "eval_steps": 3}}
TIMES = ("seconds", "started_s", "ended_s")


def run_sweep(
    given: dict[str, Any],
    out: str,
    num_ranks: int,
    *,
    life: Callable[[int], int | None] = lambda index: None,
    resume: bool = False,
    until: Callable[[Any], bool] = lambda run: False,
    forecast: Forecaster | None = None,
) -> int:
    """Over thread ranks; none: in this process. With a forecast their number follows the trials. Returns how many were
    started."""
    pools: list[ThreadRanks] = []
    folder = Path(out)
    spec = check_folder(sweep_from_mapping({**given, "output_dir": out}, base_dir=Path()), folder, resume=resume)

    def opened(spec, jobs, wall):
        if not num_ranks:
            return load_engine(spec, jobs, wall)

        def ranks(wanted: Any, jobs: Any, capacity: int) -> RankGroup:
            order = replace(rank_order(spec, jobs, is_controlled=True), capacity=capacity)
            pools.append(ThreadRanks(order, life=life))
            return RankGroup(pools[-1], len(wanted.layout.replicas))

        first, tokenizer = Prediction(parse_layout(f"spread:{num_ranks}"), 0.0, 0.0), load_tokenizer(spec.base_model)
        engine: SweepReplicas
        if forecast is None:
            engine = SweepReplicas(ranks(first, jobs, spec.capacity), tokenizer)
        else:
            keeper = LayoutKeeper(first, forecast, ranks, planned_for=(), workers=AtOnce())
            engine = FollowingSweep(ranks(first, jobs, spec.capacity), tokenizer, layouts=keeper)
        return replace(spec, capacity=engine.limits.capacity), engine, engine.notes

    prepared = prepare_sweep(spec, Path(), begun_at(folder) if resume else None, open_engine=opened)
    with closing(prepared.engine), open_run(prepared, folder, resume=resume) as run:
        run.train(should_stop=lambda: until(run))
        conclude(run)
    return sum(len(pool.started) for pool in pools)


def found(out: str) -> dict[str, Any]:
    """What a sweep found, without times."""
    board = json.loads(Path(out, "leaderboard.json").read_text())
    rows = [{k: v for k, v in row.items() if k not in TIMES} for row in board["trials"]]
    for row in rows:
        row["points"] = [{k: v for k, v in point.items() if k != "at_s"} for point in row["points"]]
    return {"tokens": board["tokens"], "trials": rows, "best": Path(out, "best/adapter_model.safetensors").read_bytes()}


@pytest.fixture(scope="module")
def kept() -> dict[str, dict[str, Any]]:
    """What sweeps have found in one process, by their settings."""
    return {}


@pytest.fixture
def found_by_one(kept: dict[str, dict[str, Any]]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """What a sweep finds in one process, which trains it for the first test that needs it."""

    def find(given: dict[str, Any]) -> dict[str, Any]:
        key = json.dumps(given)
        if key not in kept:
            run_sweep(given, "one", 0)
            kept[key] = found("one")
        return kept[key]

    return find


def deaths(*lives: int | None) -> Callable[[int], int | None]:
    """The first ranks that are started die after so many uses of their connection, if that is given; others live."""
    left = list(lives)
    return lambda index: left.pop(0) if left else None


@pytest.mark.parametrize("num_ranks", [slow(1), 2, slow(3)])
def test_asha_when_over_replicas_then_the_leaderboard_and_the_best_are_those_of_one_process(
    settings, found_by_one, num_ranks
):
    given = settings(space=NINE, early_stop=ASHA, max_jobs=4)
    run_sweep(given, "many", num_ranks)
    assert found("many") == found_by_one(given)
    layouts = json.loads(Path("many/trials/run.json").read_text())["layouts"]
    assert layouts == ["stages:1" if num_ranks == 1 else f"spread:{num_ranks}"]
    assert {row["state"] for row in found_by_one(given)["trials"]} == {"done", "stopped"}


@pytest.mark.parametrize("lives", [slow((40, 90)), (150, 60)])
def test_asha_when_replicas_die_in_the_middle_then_the_result_is_the_same(settings, found_by_one, lives):
    given = settings(space=NINE, early_stop=ASHA, max_jobs=4, job={"save_steps": 2})
    num_started = run_sweep(given, "many", 2, life=deaths(*lives))
    assert num_started == 4, "both died, and were replaced"
    assert found("many") == found_by_one(given)


@pytest.mark.parametrize(
    ("lives", "changes"),
    [
        ((90, 120), {}),
        slow((30, 45), {}),
        slow((60, 90), {}),
        slow((30, 45), ANSWERING),
        slow((60, 90), ANSWERING),
        slow((90, 120), ANSWERING),
    ],
)
def test_asha_when_no_replica_is_left_then_no_trial_is_to_blame_and_resuming_finds_the_same(
    settings, found_by_one, lives, changes
):
    """Whatever the sweep was requesting at that moment, such as answers of a trial."""
    given = settings(**{"space": NINE, "early_stop": ASHA, "max_jobs": 4, "job": {"save_steps": 2}, **changes})
    left = list(lives)
    with pytest.raises(JobError, match=r"no replica is left: the last one vanished\. Every job goes on"):
        run_sweep(given, "many", 2, life=lambda index: left.pop(0) if left else 2)
    run_sweep(given, "many", 0, resume=True)
    assert found("many") == found_by_one(given)


def test_asha_when_resumed_over_another_number_of_replicas_then_the_result_is_the_same(settings, found_by_one):
    given = settings(space=NINE, early_stop=ASHA, max_jobs=4, job={"save_steps": 2})
    run_sweep(given, "many", 3, until=lambda run: sum(trial.steps for trial in run.trials) > 25)
    assert any(row["state"] == "training" for row in json.loads(Path("many/leaderboard.json").read_text())["trials"])
    run_sweep(given, "many", 2, resume=True)
    assert found("many") == found_by_one(given)


@pytest.mark.parametrize(
    "changes",
    [
        {"max_tokens": 900},
        slow({"objective": "exact_match", "job": {"eval_steps": 3, "early_stopping_patience": 1}}),
        {"objective": {"command": "cksum < {adapter}/adapter_model.safetensors | cut -d' ' -f1", "mode": "min"}},
        {"early_stop": {"rule": "halving", "grace": 3, "unit": "steps", "min_trials": 2}},
        slow({"sampler": "tpe", "trials": 6, "space": {"lr": {"min": 1e-4, "max": 1e-2, "log": True}}}),
    ],
    ids=["budget", "answers", "command", "halving", "tpe"],
)
def test_sweep_when_weights_are_read_over_replicas_then_they_are_those_of_the_step(settings, found_by_one, changes):
    given = settings(**{"space": NINE, "early_stop": ASHA, "max_jobs": 3, **changes})
    run_sweep(given, "many", 2)
    assert found("many") == found_by_one(given)


def test_grid_when_over_replicas_then_every_replica_has_as_many_trials_at_a_time_as_one(settings, found_by_one):
    most = 0

    def count(run: Any) -> bool:
        nonlocal most
        most = max(most, sum(job.rank is not None for job in run.context.engine.jobs.values()))
        return False

    given = settings(space=NINE, max_jobs=2)
    run_sweep(given, "many", 2, until=count)
    assert found("many") == found_by_one(given) and most == 4


@pytest.mark.parametrize(
    "changes",
    [{"early_stop": ASHA}, {**ANSWERING, "early_stop": "none", "space": {"max_steps": [3, 6, 9, 12]}}],
    ids=["asha", "answers"],
)
def test_sweep_when_its_layout_follows_the_trials_then_the_result_is_that_of_one_process(
    settings, found_by_one, changes
):
    """It moves when the first four trials begin; how often later depends on what ends at the same time."""
    given = settings(**{"space": NINE, "max_jobs": 4, **changes})
    numbers = {number: f"spread:{3 - number % 2}" for number in range(1, 13)}
    num_started = run_sweep(given, "many", 2, forecast=Names({**numbers, 3: "stages:1", 6: "stages:1"}))
    assert found("many") == found_by_one(given)
    layouts = json.loads(Path("many/trials/run.json").read_text())["layouts"]
    assert len(layouts) > 1 and num_started > 2


@pytest.mark.parametrize("changes", [{}, slow({"early_stop": ASHA, "max_jobs": 4})], ids=["grid", "asha"])
def test_sweep_when_packs_decide_the_layout_and_a_replica_dies_then_the_result_is_that_of_one_process(
    settings, found_by_one, monkeypatch, changes
):
    """The first trial has two microbatches a step, which two stages share; those of the others have one."""
    monkeypatch.setattr(FollowingSweep, "cost", property(lambda _: MoveCost(0.0, 0.0)))
    shape = ModelShape.from_config(find_shape("llama-3.1-8b").config().to_dict(), "llama-3.1-8b")
    packs = PackForecaster(AnalyticCost(shape, find_hardware("h100")), 128, 3)
    trials = [{"global_batch_size": 16, "max_steps": 20}, {"global_batch_size": 4, "max_steps": 32}]
    if changes:
        trials += [{"global_batch_size": 4, "lr": rate} for rate in NINE["lr"]]
    homes: set[tuple[str, int | None]] = set()

    def watch(run: Any) -> bool:
        engine = run.context.engine
        if str(engine._layouts.layout) == "stages:2+stages:1":
            homes.update((name, job.rank) for name, job in engine.jobs.items())
        return False

    given = settings(space={"_": trials}, job={"save_steps": 2}, **changes)
    num_started = run_sweep(given, "many", 2, forecast=packs, until=watch, life=deaths(None, None, 60))
    assert found("many") == found_by_one(given)
    layouts = json.loads(Path("many/trials/run.json").read_text())["layouts"]
    assert num_started > 3 and len(layouts) > 1
    if not changes:
        assert layouts[1] == "stages:2+stages:1" and {("t000", 0), ("t001", 1)} <= homes


@pytest.mark.slow
def test_sweep_of_32_trials_when_over_three_replicas_then_finds_what_one_process_finds(settings, found_by_one):
    """Trials stop early all the time, and others take their places on whichever replica has room."""
    rates = [1e-5 * 1.3**power for power in range(32)]
    given = settings(space={"lr": rates}, early_stop=ASHA, max_jobs=8)
    run_sweep(given, "many", 3)
    assert found("many") == found_by_one(given)
    states = [row["state"] for row in found_by_one(given)["trials"]]
    assert len(states) == 32 and {"done", "stopped"} == set(states)
