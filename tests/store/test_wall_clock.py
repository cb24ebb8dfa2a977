"""Where the wall clock went: parts that add up, whatever overlaps."""

from __future__ import annotations

import math
import random
import time
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.store import wall_clock
from weft.store.wall_clock import MOST_SPELLS, Activity, TimeSplit, WallClock, partition, process_start_s

BUSY = [activity for activity in Activity if activity is not Activity.IDLE]
MOMENTS = st.integers(-20, 120)
SPELLS = st.lists(st.tuples(st.sampled_from(BUSY), MOMENTS, MOMENTS), max_size=12)


@pytest.fixture
def clock(monkeypatch):
    """A clock of the process that stands still; its `at` may be set, in seconds."""

    class Clock:
        at = 0.0

    monkeypatch.setattr(time, "perf_counter_ns", lambda: round(1e9 * Clock.at))
    return Clock


@given(SPELLS, st.integers(0, 50), st.integers(50, 100), st.randoms())
def test_partition_when_spells_overlap_then_every_moment_counts_once_for_the_foremost(spells, start, end, order):
    """Checked moment by moment: the parts sum up to the whole, in any order of the spells."""
    expected = dict.fromkeys(Activity, 0)
    for moment in range(start, end):
        going_on = [activity for activity, begun, ended in spells if begun <= moment < ended]
        expected[min(going_on, key=list(Activity).index, default=Activity.IDLE)] += 1
    found = partition(spells, start, end)
    assert found == expected and sum(found.values()) == end - start
    order.shuffle(spells)
    assert partition(spells, start, end) == found


def test_partition_when_files_are_written_beside_computing_then_only_what_training_waited_counts():
    """A write from 2 to 9 with microbatches from 0 to 5 and from 8 on has held training up for 3."""
    spells = [(Activity.WRITING, 2, 9), (Activity.COMPUTING, 0, 5), (Activity.COMPUTING, 8, 10)]
    found = partition(spells, 0, 12)
    assert {a: n for a, n in found.items() if n} == {Activity.COMPUTING: 7, Activity.WRITING: 3, Activity.IDLE: 2}


@given(st.lists(st.tuples(st.sampled_from(BUSY), st.integers(0, 9), st.integers(0, 5)), max_size=60))
def test_wall_clock_when_spells_are_added_up_on_the_way_then_splits_as_if_all_were_kept(steps):
    """Closing the past early changes nothing, as long as spells are reported in the order of their ends."""
    spells, moment = [], 0
    for activity, length, gap in steps:
        moment += gap + length
        spells.append((activity, moment - length, moment))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wall_clock, "MOST_SPELLS", 4)
        patch.setattr(time, "perf_counter_ns", lambda: 1_000_000_000 * (moment + 1))
        clock = WallClock(0.0)
        for activity, begun, ended in spells:
            clock.add(activity, ended - begun, ended)
        found = clock.split()
    whole = partition(spells, 0, moment + 1)
    assert found.spent_ns == {activity: 1_000_000_000 * number for activity, number in whole.items()}


def test_wall_clock_when_a_run_is_long_then_keeps_few_spells_and_loses_no_time(clock):
    """After ten thousand overlapping spells the parts still add up to the wall clock, from a few hundred of them."""
    wall, chance = WallClock(0.0), random.Random(3)
    for index in range(10_000):
        clock.at = float(index + 1)
        wall.add(chance.choice(BUSY), 0.5 + chance.randrange(20_000) / 1000, clock.at)
        assert len(wall._spells) <= MOST_SPELLS
    found = wall.split()
    assert found.wall_s == 10_000
    assert all(number >= 0 for number in found.spent_ns.values())


def test_spending_when_its_body_raises_then_counts_it_all_the_same(clock):
    """Time that was spent in vain was spent."""
    wall = WallClock(0.0)
    with suppress(KeyError), wall.spending(Activity.LOADING):
        clock.at = 2.0
        raise KeyError
    clock.at = 3.0
    assert (wall.split().seconds(Activity.LOADING), wall.split().seconds(Activity.IDLE)) == (2.0, 1.0)


def test_add_start_when_the_model_is_loaded_then_all_before_it_was_loading(clock):
    """Imports come before anything can be counted, so they are counted from the start of the process."""
    clock.at = 7.0
    wall = WallClock(5.0)
    wall.add_start(Activity.LOADING)
    assert wall.split().seconds(Activity.LOADING) == wall.split().wall_s == 2.0


@given(st.lists(st.integers(0, 10**14), min_size=len(Activity), max_size=len(Activity)))
def test_split_when_written_and_read_then_its_figures_add_up(amounts):
    """Rounded figures sum up to the rounded whole, and two sessions to the run."""
    split = TimeSplit(dict(zip(Activity, amounts, strict=True)))
    written = split.to_json()
    assert written["wall_s"] == pytest.approx(sum(written[activity.key] for activity in Activity))
    assert written["wall_s"] == pytest.approx(split.wall_s, abs=0.004)
    read = TimeSplit.from_json(written)
    assert read is not None and read.to_json() == written
    assert (split + split).wall_s == 2 * split.wall_s
    assert (split + TimeSplit({})).to_json() == written


@pytest.mark.parametrize(
    "odd",
    [
        None,
        [],
        {},
        {"computing_s": 1},
        {a.key: "1" for a in Activity},
        {a.key: -1.0 for a in Activity},
        {a.key: math.inf for a in Activity},
    ],
)
def test_split_when_its_file_holds_something_else_then_there_is_none(odd):
    """A report leaves out what is torn or odd."""
    assert TimeSplit.from_json(odd) is None


def test_process_start_then_was_before_now_and_stays():
    """The process has begun before any test, at one moment, to the tick of the system's clock."""
    first = process_start_s()
    assert first < time.perf_counter()
    # Between its two clocks the process may have to wait for a processor.
    assert min(abs(process_start_s() - first) for _ in range(100)) < 0.02


def test_clock_when_a_command_begins_again_then_its_last_line_counts_all_of_it(clock):
    first = WallClock()
    clock.at = 3.0
    first.add(Activity.COMPUTING, 2.0, 3.0)
    second = first.again()
    clock.at = 7.0
    second.add(Activity.COMPUTING, 1.0, 7.0)
    assert second.split().wall_s == 4.0 and second.since_command().wall_s == 7.0
    assert second.since_command().seconds(Activity.COMPUTING) == 3.0


def test_clock_when_a_run_goes_on_then_all_commands_and_all_tries_of_them_count_once(clock):
    """What a try recorded before it was lost is part of the command, and is not added to it again."""
    first = WallClock()
    first.go_on_from(TimeSplit({Activity.COMPUTING: 10 * 10**9}))
    clock.at = 3.0
    recorded = first.of_run()
    clock.at = 4.0
    second = first.again()
    second.go_on_from(recorded)
    clock.at = 6.0
    assert recorded.wall_s == 13.0 and second.of_run().wall_s == 16.0
    new = WallClock()
    new.go_on_from(None)
    assert new.of_run().wall_s == 0.0


def test_clock_when_stopped_then_what_is_under_way_counts_and_nothing_after(clock):
    wall = WallClock()
    with wall.spending(Activity.WRITING):
        clock.at = 2.0
        assert wall.split().seconds(Activity.WRITING) == 2.0
        wall.stop()
        clock.at = 5.0
    wall.add(Activity.COMPUTING, 5.0, 5.0)
    wall.stop()
    assert wall.split().wall_s == wall.split().seconds(Activity.WRITING) == 2.0
