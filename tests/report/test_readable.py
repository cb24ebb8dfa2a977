import pytest

from weft.report import readable
from weft.store.wall_clock import Activity, TimeSplit


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "–"), (0.04, "0.0 s"), (9.96, "10 s"), (59.6, "1 min 00 s"), (725, "12 min 05 s"), (11225, "3 h 07 min")],
)
def test_duration_then_two_units_at_most(seconds: float | None, text: str) -> None:
    assert readable.duration(seconds) == text


@pytest.mark.parametrize(("seconds", "text"), [(48.2, "0:48"), (725, "12:05"), (11230, "3:07:10"), (None, "–")])
def test_clock_then_colons(seconds: float | None, text: str) -> None:
    assert readable.clock(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (950, "950"), (12_430, "12.4 k"), (999_999, "1.00 M"), (3.1e6, "3.10 M"), (2e9, "2.00 G")],
)
def test_count_then_three_digits_and_a_unit(value: float, text: str) -> None:
    assert readable.count(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(2e-4, "2e-4"), (1.5e-5, "1.5e-5"), (0.05, "5e-2"), (0.0, "0"), (None, "–")]
)
def test_learning_rate_then_no_needless_digits(value: float | None, text: str) -> None:
    assert readable.learning_rate(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0.27931, "0.2793"), (1e-5, "1.00e-05"), (123456.0, "1.23e+05"), (0.0, "0.0000")]
)
def test_loss_then_four_digits_or_scientific(value: float, text: str) -> None:
    assert readable.loss(value) == text


def test_loss_when_not_a_number_then_it_is_reported() -> None:
    assert readable.loss(float("nan")) == "nan"


@pytest.mark.parametrize(("value", "text"), [(12345.6, "12,346"), (87.34, "87.3"), (None, "–")])
def test_rate_then_grouped_digits(value: float | None, text: str) -> None:
    assert readable.rate(value) == text


@pytest.mark.parametrize(
    ("limit", "text"),
    [
        (64, "a-long-name-with-a-tail"),
        (23, "a-long-name-with-a-tail"),
        (15, "a-long-…-a-tail"),
        (8, "a-lo…ail"),
        (1, "…"),
    ],
)
def test_cut_middle_then_both_ends_stay_and_the_limit_holds(limit: int, text: str) -> None:
    assert readable.cut_middle("a-long-name-with-a-tail", limit) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (
            (11.21, 6, 3.1, 4, 1.04, 0.9, 2.5),
            "28.8 s: 11.2 computing, 6.0 evaluating, 3.1 compiling, 4.0 loading, 1.0 "
            "preparing data, 0.9 writing, 2.5 idle",
        ),
        ((3600, 0, 0, 60, 0, 1, 0), "61.0 min: 60.0 computing, 1.0 loading"),
        ((36000, 0, 0, 0, 0, 0, 3600), "11.0 h: 10.0 computing, 1.0 idle"),
        ((0, 0, 0, 0, 0, 0, 0), "0.0 s: idle"),
    ],
)
def test_time_split_then_parts_in_the_unit_of_the_whole(seconds: tuple[float, ...], text: str) -> None:
    split = TimeSplit({activity: round(1e9 * s) for activity, s in zip(Activity, seconds, strict=True)})
    assert readable.time_split(split) == text
