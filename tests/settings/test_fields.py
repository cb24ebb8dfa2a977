"""Reading plain mappings into specs: aliases, types, limits and did-you-mean."""

from dataclasses import dataclass
from typing import Any

import pytest

from weft.errors import ConfigError
from weft.settings import above, at_least, between, convert, describe, read, setting, type_name, validate


@dataclass(frozen=True)
class Wheel:
    size: float = setting(rule=above(0))
    spokes: int = setting(8, aliases=("num_spokes",), rule=at_least(0))

    def __post_init__(self) -> None:
        validate(self)


@dataclass(frozen=True)
class Bike:
    wheels: tuple[Wheel, ...] = setting(())
    colour: str = setting("red", aliases=("color",), choices=("red", "blue"))
    slack: float | None = setting(None, rule=between(0, 1))

    def __post_init__(self) -> None:
        validate(self)


def problem(values: Any, cls: type = Bike) -> str:
    with pytest.raises(ConfigError) as caught:
        read(cls, values, "bike")
    return str(caught.value)


def test_read_when_values_are_good_then_converts_and_fills_in():
    bike = read(Bike, {"wheels": [{"size": "2e1"}, {"size": 3, "num_spokes": 4.0}], "color": "blue"})
    assert bike == Bike((Wheel(20.0), Wheel(3.0, 4)), "blue")
    assert isinstance(bike.wheels[1].size, float)
    assert isinstance(bike.wheels[1].spokes, int)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"colur": "red"}, "bike.colur: unknown setting. Did you mean colour?"),
        ({"zzz": 1}, "bike.zzz: unknown setting. `weft config` lists all settings."),
        ({"color": "red", "colour": "red"}, "bike.colour: color and colour are two names of one setting; keep one."),
        ({"colour": "green"}, "bike.colour: got 'green'; accepted are red, blue."),
        ({"slack": 1}, "bike.slack: must be at least 0 and below 1, got 1.0."),
        ({"slack": float("nan")}, "bike.slack: expected a finite number, got nan."),
        ({"": 1}, "bike.: unknown setting. `weft config` lists all settings."),
        ({"wheels": [{}]}, "bike.wheels.0: size is missing."),
        ({"wheels": [{"size": 1}, {"size": 0}]}, "bike.wheels.1.size: must be above 0, got 0.0."),
        ({"wheels": [{"size": 1, "spokes": 2.5}]}, "bike.wheels.0.spokes: expected a whole number, got 2.5."),
        (
            {"wheels": [{"size": 1, "spokes": 10**400}]},
            f"bike.wheels.0.spokes: 1{'0' * 56}... is too large; the most is 1e+18.",
        ),
        ({"wheels": [{"size": 1, "spokes": "1e30"}]}, "bike.wheels.0.spokes: '1e30' is too large; the most is 1e+18."),
        ({"wheels": [{"size": 10**400}]}, f"bike.wheels.0.size: 1{'0' * 56}... is too large; the most is 1e+18."),
        ({"wheels": [{"size": 1, "spokes": "inf"}]}, "bike.wheels.0.spokes: expected a whole number, got 'inf'."),
        ({"wheels": [{"size": True}]}, "bike.wheels.0.size: expected a number, got True."),
        ({"wheels": [3]}, "bike.wheels.0: expected a mapping of settings, got 3."),
        ([], "bike: expected a mapping of settings, got a list."),
    ],
)
def test_read_when_a_value_is_wrong_then_reports_where_and_what_is_right(values: Any, sentence: str):
    assert problem(values) == sentence


def test_spec_when_made_in_python_then_is_checked_the_same_way():
    assert Wheel("26") == Wheel(26.0)
    with pytest.raises(ConfigError, match=r"size: must be above 0, got -1\.0"):
        Wheel(-1)


@pytest.mark.parametrize(
    ("value", "hint", "result"),
    [
        (True, bool | str, True),
        ("gaussian", bool | str, "gaussian"),
        (0.1, float | int | tuple[str, ...] | None, 0.1),
        (5, float | int | tuple[str, ...] | None, 5),
        ("a.jsonl", float | int | tuple[str, ...] | None, ("a.jsonl",)),
        (None, float | None, None),
        ({1: 2}, dict[str, int], {"1": 2}),
    ],
)
def test_convert_when_several_types_are_accepted_then_keeps_the_one_it_is(value: Any, hint: Any, result: Any):
    converted = convert(value, hint, "x")
    assert converted == result
    assert type(converted) is type(result)


def test_convert_when_no_type_fits_then_names_all_of_them():
    with pytest.raises(ConfigError, match="x: expected a number or a list of whole number, got 'many'"):
        convert("many", float | tuple[int, ...] | None, "x")
    with pytest.raises(ConfigError, match="x: expected a mapping, got a list"):
        convert([], dict[str, int], "x")


def test_rule_when_put_into_words_then_shows_whole_numbers_whole():
    assert between(0, 2**32).text == "at least 0 and below 4294967296"
    assert above(0.5).text == "above 0.5"
    assert at_least(1e-7).text == "at least 1e-07"


def test_words_when_values_are_described_then_are_short():
    assert describe(None) == "nothing"
    assert describe({}) == "a mapping"
    assert len(describe("x" * 500)) == 60
    assert type_name(dict[str, int]) == "mapping"
    assert type_name(bool | None) == "true/false or nothing"
