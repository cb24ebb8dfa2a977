"""Samplers propose what the space holds, nothing twice, and the same again after a restart."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from weft.errors import ConfigError, MissingExtraError
from weft.spec.load_sweep import space_of, sweep_from_mapping
from weft.spec.space import Space, params_of, read_space, value_key
from weft.sweeps.samplers import (
    NAME,
    Grid,
    OptunaSampler,
    OptunaStorage,
    RandomDraws,
    Sampler,
    import_optuna,
    make_sampler,
    sampler_name,
)
from weft.sweeps.trials_file import Observation, Trial, TrialState

SPACE = read_space({"lr": {"min": 1e-4, "max": 1e-2, "log": True}, "r": [4, 8, 16]})
COUNTABLE = read_space({"lr": [1, 2, 3], "r": [4, 8]})


def always(point: Any) -> bool:
    return True


def trial_of(number: int, point: dict[str, Any], value: float, state: TrialState = TrialState.DONE) -> Trial:
    return Trial(number, f"t{number:03d}", params_of(point), state, points=[Observation(1, 10, value, 0.0)])


def run_search(sampler: Sampler, number: int, value: Callable[[dict[str, Any]], float], at_a_time: int = 3) -> list:
    """Points of a search in which some trials are always under way."""
    points: list[dict[str, Any]] = []
    for i in range(number):
        known = {value_key(point) for point in points}
        point = sampler.propose(i, lambda point, known=known: value_key(point) not in known)
        assert point is not None
        points.append(point)
        if i >= at_a_time:
            done = i - at_a_time
            sampler.report(points[done], trial_of(done, points[done], value(points[done])))
    return points


def test_grid_when_all_are_proposed_then_has_every_point_once_in_order():
    grid = Grid(COUNTABLE, None, 0)
    points = [grid.propose(i, always) for i in range(6)]
    assert points == [COUNTABLE.point_at(i) for i in range(6)]
    assert grid.propose(6, always) is None


@pytest.mark.parametrize("trials", [None, 4])
def test_grid_when_a_single_point_is_new_then_any_trial_finds_it(trials):
    """A sweep that goes on with another budget has tried its points in another order."""
    for index in range(6):
        wanted = COUNTABLE.point_at(index)
        assert Grid(COUNTABLE, trials, 0).propose(3, lambda point, wanted=wanted: point == wanted) == wanted


def test_grid_when_the_budget_is_smaller_then_draws_a_part_that_depends_on_the_seed_alone():
    def part(seed: int) -> list:
        return [value_key(Grid(COUNTABLE, 4, seed).propose(i, always)) for i in range(4)]

    assert len(set(part(0))) == 4
    assert part(0) == part(0)
    assert len({tuple(part(seed)) for seed in range(5)}) > 1


def test_grid_when_resumed_with_a_larger_budget_then_no_point_is_tried_twice_and_none_is_left_out():
    first = [Grid(COUNTABLE, 4, 0).propose(i, always) for i in range(4)]
    points = list(first)
    for number in range(4, 6):
        known = {value_key(point) for point in points}
        points.append(Grid(COUNTABLE, 6, 0).propose(number, lambda point, known=known: value_key(point) not in known))
    assert {value_key(point) for point in points} == {value_key(COUNTABLE.point_at(i)) for i in range(6)}


def test_grid_when_it_is_astronomic_then_a_budget_still_draws_different_points_at_once():
    huge = read_space({name: list(range(1, 101)) for name in ("r", "max_steps", "seed", "warmup_steps")})
    points = {value_key(Grid(huge, 50, 0).propose(i, always)) for i in range(50)}
    assert huge.num_points == 10**8 and len(points) == 50


def test_random_draws_when_repeated_then_are_the_same_and_follow_the_scale():
    points = [RandomDraws(SPACE, 1).propose(i, always) for i in range(200)]
    assert points == [RandomDraws(SPACE, 1).propose(i, always) for i in range(200)]
    assert all(SPACE.point_of(point) == point for point in points)
    below = sum(point["lr"] < 1e-3 for point in points)
    assert 70 < below < 130
    assert {point["r"] for point in points} == {4, 8, 16}


def test_random_draws_when_the_space_is_used_up_then_end():
    assert len(run_search(RandomDraws(COUNTABLE, 0), 6, lambda point: 0.0)) == 6
    assert RandomDraws(COUNTABLE, 0).propose(6, lambda point: False) is None


@pytest.mark.parametrize("name", ["tpe", "gp", "qmc", "nsgaii"])
def test_optuna_then_proposes_points_of_the_space_and_takes_results(name):
    space = read_space({"lr": {"min": 1e-4, "max": 1e-2, "log": True}, "_": [{"r": 4, "alpha": 8}, {"r": 8}]})
    points = run_search(OptunaSampler(name, space, 1, is_max=False), 8, lambda point: point["lr"])
    assert all(space.point_of(params_of(point)) == point for point in points)


def test_tpe_when_it_has_learnt_then_stays_near_the_best():
    def value(point: dict[str, Any]) -> float:
        return abs(math.log10(point["lr"] / 3e-3)) + (point["r"] != 8)

    points = run_search(OptunaSampler("tpe", SPACE, 0, is_max=False), 40, value)
    mean = [sum(value(point) for point in part) / 20 for part in (points[:20], points[20:])]
    assert mean[1] < 0.7 * mean[0]


def test_optuna_when_rebuilt_from_reported_trials_then_goes_on_as_before():
    def next_point(sampler: OptunaSampler) -> Any:
        for i in range(12):
            point = RandomDraws(SPACE, 3).propose(i, always)
            state = TrialState.STOPPED if i % 3 else TrialState.DONE
            sampler.report(point, trial_of(i, point, point["lr"], state))
        return sampler.propose(12, always)

    assert next_point(OptunaSampler("tpe", SPACE, 5, is_max=True)) == next_point(
        OptunaSampler("tpe", SPACE, 5, is_max=True)
    )


def test_storage_when_given_trials_then_a_study_can_read_them_and_has_each_once(tmp_path):
    url = f"sqlite:///{tmp_path}/study.db"
    point = {"lr": 1e-3, "r": 8}
    done, failed = trial_of(0, point, 0.5), trial_of(1, {"lr": 2e-3, "r": 4}, 0.0, TrialState.FAILED)
    for _ in range(2):
        storage = OptunaStorage(url, "mine", SPACE, is_max=False)
        storage.add(point, done)
        storage.add({"lr": 2e-3, "r": 4}, failed)
    study = import_optuna().load_study(study_name="mine", storage=url)
    assert [trial.user_attrs[NAME] for trial in study.trials] == ["t000", "t001"]
    assert (study.best_value, study.best_params) == (0.5, {"lr": 1e-3, "r": 8})


def test_optuna_when_it_is_not_installed_then_explains_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(MissingExtraError, match=r"pip install -e '.*\[optuna\]'"):
        OptunaSampler("tpe", SPACE, 0, is_max=False)


def spec_with(space: Any, **settings: Any) -> tuple[Any, Space]:
    job = {"train_data": "rows.jsonl", "eval_data": 2}
    spec = sweep_from_mapping({"base_model": "tiny", "job": job, "space": space, **settings}, base_dir=Path())
    return spec, space_of(spec)


LONG = {"r": list(range(1, 41)), "max_steps": list(range(1, 41))}
ENDLESS = {"lr": {"min": 1e-4, "max": 1e-2}}


@pytest.mark.parametrize(
    ("space", "settings", "name"),
    [
        ({"r": [4, 8]}, {}, "grid"),
        ({"r": [4, 8]}, {"trials": 2}, "grid"),
        ({"r": [4, 8]}, {"trials": 1}, "random"),
        (ENDLESS, {"trials": 4}, "random"),
        (ENDLESS, {"max_seconds": 4}, "random"),
        (LONG, {"all_points": True}, "grid"),
        (LONG, {"max_tokens": 10, "sampler": "grid"}, "grid"),
    ],
)
def test_sampler_when_left_to_choose_then_takes_the_grid_where_it_fits_the_budget(space, settings, name):
    assert sampler_name(*spec_with(space, **settings)) == name


@pytest.mark.parametrize(
    ("space", "settings", "message"),
    [
        (LONG, {}, "space: the grid has 1,600 points and there is no budget. --trials N tries N of them, --all tries"),
        (ENDLESS, {}, "space.lr: has endlessly many values, so the sweep needs a budget. Set trials"),
        (ENDLESS, {"sampler": "grid", "trials": 9}, "space.lr: a grid needs countable values, and this is a range."),
        ({"r": [4]}, {"sampler": "tpe"}, "sampler: tpe never ends by itself; set trials, max_tokens or max_seconds."),
        ({"r": [4]}, {"sampler": "random"}, "sampler: random never ends by itself"),
    ],
)
def test_sampler_when_it_cannot_end_or_begin_then_reports_what_to_do(space, settings, message):
    with pytest.raises(ConfigError) as error:
        make_sampler(*spec_with(space, **settings))
    assert str(error.value).startswith(message)
