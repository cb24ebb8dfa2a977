"""A search space holds what is written, and reports what is wrong with what is invalid."""

from __future__ import annotations

import math

import pytest

from weft.errors import ConfigError
from weft.spec.space import TOGETHER, params_of, read_space, same, setting_path


def test_choices_when_written_in_any_way_then_mean_the_same():
    listed, spelled, single = (read_space({"r": text}) for text in ([8, 16], {"choices": [8, 16]}, 8))
    assert listed == spelled
    assert listed.parameters[0].values == (8, 16)
    assert single.parameters[0].values == (8,)


def test_numbers_when_yaml_takes_them_for_text_then_are_numbers():
    assert read_space({"lr": ["1e-4", 2e-4]}).parameters[0].values == (1e-4, 2e-4)
    low_high = read_space({"lr": {"min": "1e-5", "max": "1e-3", "log": True}}).parameters[0]
    assert (low_high.low, low_high.high) == (1e-5, 1e-3)


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("lr", "learning_rate"),
        ("rank", "adapter.r"),
        ("adapter.r", "adapter.r"),
        ("lora.rank", "adapter.r"),
        ("dropout", "adapter.lora_dropout"),
        ("num_epochs", "num_train_epochs"),
        ("batch_size", "global_batch_size"),
        ("target_modules", "adapter.target_modules"),
        ("nobody", "nobody"),
    ],
)
def test_setting_path_when_a_name_is_known_anywhere_then_is_the_jobs_own(name, path):
    assert setting_path(name) == path


def test_space_when_settings_are_nested_then_they_go_by_their_path():
    space = read_space({"lora": {"r": [2, 4], "alpha": {"times_r": [0.5, 2]}}})
    assert [p.name for p in space.parameters] == ["lora.r", "lora.alpha"]
    assert space.parameters[1].values == ("0.5r", "2r")


def test_points_when_all_are_counted_then_none_is_missing_and_none_is_there_twice():
    space = read_space({"r": [2, 4, 8], "lr": [1e-3, 1e-4], "warmup_steps": {"min": 0, "max": 4, "step": 2}})
    points = [space.point_at(index) for index in range(space.num_points)]
    assert space.num_points == 18
    assert len({tuple(point.values()) for point in points}) == 18
    assert points[0] == {"r": 2, "lr": 1e-3, "warmup_steps": 0.0}
    assert points[1] == {"r": 2, "lr": 1e-3, "warmup_steps": 2.0}
    assert list(points[-1].values()) == [8, 1e-4, 4.0]


def test_points_when_settings_vary_together_then_are_multiplied_with_the_others():
    space = read_space({TOGETHER: [{"r": 8, "alpha": 8}, {"r": 64, "alpha": 16}], "lr": [1e-3, 1e-4]})
    params = [params_of(space.point_at(index)) for index in range(space.num_points)]
    assert params[0] == {"r": 8, "alpha": 8, "lr": 1e-3}
    assert params[3] == {"r": 64, "alpha": 16, "lr": 1e-4}
    assert space.point_of({"lora_rank": 64, "lora_alpha": 16.0, "learning_rate": 1e-3}) == space.point_at(2)
    assert space.point_of({"r": 64, "alpha": 8, "lr": 1e-3}) is None


def test_range_when_drawn_from_then_keeps_to_its_ends_steps_and_scale():
    log = read_space({"lr": {"min": 1e-4, "max": 1e-2, "log": True}}).parameters[0]
    assert (log.draw(0.0), log.draw(0.5)) == (1e-4, 1e-3)
    assert log.values is None and log.holds(1e-2) and not log.holds(0.1)
    whole = read_space({"r": {"min": 2, "max": 8, "step": 2}}).parameters[0]
    assert whole.values == (2, 4, 6, 8)
    assert [whole.draw(share) for share in (0.0, 0.3, 0.99)] == [2, 4, 8]
    assert all(isinstance(value, int) for value in whole.values)
    powers = read_space({"r": {"min": 1, "max": 64, "log": True}}).parameters[0]
    assert powers.draw(0.5) == 8 and isinstance(powers.draw(0.9), int)


def test_probes_when_taken_then_show_every_choice_and_both_ends():
    space = read_space({"r": [2, 4, 8], "lr": {"min": 1e-4, "max": 1e-2}})
    probes = list(space.probes())
    assert {probe["r"] for probe in probes} == {2, 4, 8}
    assert {probe["lr"] for probe in probes} == {1e-4, 1e-2}


def test_values_when_they_mean_the_same_then_are_the_same():
    assert same(1, 1.0) and same([1, "a"], (1.0, "a")) and same({"rank": 8}, {"r": 8})
    assert not same(True, 1) and not same("1", 1)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({}, "space: there is nothing to search"),
        ([8], "space: expected parameters such as r: [8, 16], got a list."),
        ({"r": []}, "space.r: the list is empty"),
        ({"learning_rat": [1]}, "space.learning_rat: is no setting that can be searched. Did you mean learning_rate?"),
        ({"adapter.rnak": [1]}, "space.adapter.rnak: is no setting that can be searched. Did you mean adapter.rank?"),
        ({"name": ["a"]}, "space.name: is no setting that can be searched."),
        ({"adapter": [{"r": 8}]}, "space.adapter: name what varies of it"),
        ({"lr": {"min": 1e-2, "max": 1e-4}}, "space.lr: min 0.01 is above max 0.0001."),
        ({"lr": {"min": 0, "max": 1, "log": True}}, "space.lr: a logarithmic range needs a min above 0, got 0."),
        ({"lr": {"min": 1e-4}}, "space.lr: max is missing."),
        ({"lr": {"min": 1e-4, "mx": 1}}, "space.lr.mx: unknown word. Did you mean max?"),
        ({"lr": {"min": 0, "max": 1, "step": 0}}, "space.lr.step: must be above 0, got 0."),
        ({"lr": {"min": 0, "max": math.inf}}, "space.lr.max: expected a finite number, got inf."),
        ({"lr": {"min": "low", "max": 1}}, "space.lr.min: expected a number, got 'low'."),
        ({"lr": {"choices": [1], "min": 0}}, "space.lr: write a list, {choices: [...]}"),
        ({"lr": {"times_r": [2]}}, "space.lr: only lora_alpha can be a multiple of r."),
        ({"r": {"min": 0.5, "max": 4, "int": True}}, "space.r: whole numbers need a whole min, max and step."),
        ({"r": [8, 8.0]}, "space.r.1: 8.0 is there twice."),
        ({"r": [8], "rank": [16]}, "space.rank: r and rank are searched twice; keep one."),
        ({"_": [{"r": 8}], "r": [16]}, "space.r: r is searched twice; keep one."),
        ({"_": {"r": 8}}, "space._: expected a list of settings that go together"),
        ({"_": [{"rr": 8}]}, "space._.0.rr: is no setting that can be searched."),
    ],
)
def test_space_when_it_is_invalid_then_refused_with_the_reason(tree, message):
    with pytest.raises(ConfigError) as error:
        read_space(tree)
    assert str(error.value).startswith(message)


def test_params_when_the_method_is_searched_then_hold_what_applies_to_it():
    space = read_space({"method": ["ia3", "lora"], "r": [8, 16], "lr": [1e-3], "init_ia3_weights": [True]})
    params = [params_of(space.point_at(index)) for index in range(space.num_points or 0)]
    assert params[0] == params[1] == {"method": "ia3", "lr": 1e-3, "init_ia3_weights": True}
    assert params[3] == {"method": "lora", "r": 16, "lr": 1e-3}
    assert (space.num_points, space.num_distinct) == (4, 3)
    assert [space.point_of(p) for p in params[1:3]] == [space.point_at(0), space.point_at(2)]
    assert {params_of(point).get("r") for point in space.probes()} == {None, 8, 16}


def test_point_of_when_params_have_former_names_and_values_then_is_the_same_point():
    space = read_space({"gradient_sum": ["in_order", "any_order"], "r": [2, 4]})
    assert space.point_of({"sums": "free", "r": 4}) == {"gradient_sum": "any_order", "r": 4}
    before = read_space({"sums": ["ordered", "free"]})
    assert before.point_of({"gradient_sum": "any_order"}) == {"sums": "free"}
    assert before.point_of({"gradient_sum": "neither"}) is None
    assert space.point_of({"r": 4}) is None
