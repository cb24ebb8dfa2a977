"""Cluster replay: every job ends with its work done, and the figures are those a pencil would give."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.planning.replay import PEFT, POLICIES, Instance, TraceJob, generate_trace, replay
from weft.errors import PlanError
from weft.plan.cost.types import LinearCost

# One token a second each way in tiles of 4 rows: 4 tokens cost 8 s, a full microbatch of 8 costs 16 s.
SMALL = Instance(LinearCost(), capacity=8, row_tile=4, job_bytes=100)


def job(name: str, arrival_s: float, duration_s: float, step_tokens: int = 8, **more: object) -> TraceJob:
    return TraceJob(name, arrival_s, duration_s, step_tokens, num_bytes=10, **more)  # type: ignore[arg-type]


@st.composite
def traces(draw: st.DrawFn) -> list[TraceJob]:
    rows = draw(
        st.lists(st.tuples(st.integers(0, 50), st.integers(1, 40), st.integers(1, 12)), min_size=1, max_size=12)
    )
    return [
        TraceJob(f"j{i}", float(at), float(took), tokens, at + 2.0 * took, i % 3, num_bytes=10 + i)
        for i, (at, took, tokens) in enumerate(rows)
    ]


def alone(trace: list[TraceJob]) -> list[float]:
    """When jobs end one after another on one instance, first come first served."""
    now, ends = 0.0, []
    for item in sorted(trace, key=lambda item: (item.arrival_s, item.job)):
        now = max(now, item.arrival_s) + item.duration_s
        ends.append(now - item.arrival_s)
    return ends


@given(traces())
def test_replay_when_jobs_go_one_by_one_then_equals_the_recursion(trace):
    report = replay(trace, dataclasses.replace(SMALL, max_jobs=1), num_gpus=1)
    ends = alone(trace)
    mean_s, mean_duration_s = sum(ends) / len(ends), sum(item.duration_s for item in trace) / len(trace)
    assert report.jct_mean_s == pytest.approx(mean_s)
    assert report.queue_mean_s == pytest.approx(mean_s - mean_duration_s, abs=1e-6)


@settings(max_examples=60)
@given(traces(), st.sampled_from(list(POLICIES)), st.sampled_from([None, 1, 2]), st.integers(1, 3))
def test_replay_when_run_then_all_jobs_end_no_faster_than_alone_and_the_order_given_means_nothing(
    trace, policy, max_jobs, num_gpus
):
    instance = dataclasses.replace(SMALL, max_jobs=max_jobs)
    report = replay(trace, instance, num_gpus=num_gpus, policy=policy)
    assert report == replay(trace[::-1], instance, num_gpus=num_gpus, policy=policy)
    assert report.num_jobs == len(trace)
    mean_duration = sum(item.duration_s for item in trace) / len(trace)
    assert report.jct_mean_s >= mean_duration - 1e-6
    assert report.jct_mean_s >= report.queue_mean_s + mean_duration - 1e-6
    assert report.makespan_s >= max(item.arrival_s + item.duration_s for item in trace) - 1e-6
    assert 0 <= report.utilisation <= 1 + 1e-9 and 0 <= report.busy_share <= 1 + 1e-9
    assert json.loads(json.dumps(report.to_dict()))["policy"] == policy


def test_replay_when_two_jobs_fill_one_tile_then_neither_is_slower_for_the_other():
    trace = [job("a", 0, 10, step_tokens=2), job("b", 0, 10, step_tokens=2)]
    assert replay(trace, SMALL, num_gpus=1).jct_mean_s == pytest.approx(10)
    assert replay(trace, dataclasses.replace(SMALL, max_jobs=1), num_gpus=1).jct_mean_s == pytest.approx(15)


def test_replay_when_jobs_fill_a_microbatch_alone_then_they_share_it_equally():
    """Three jobs of 10 s share an instance: 30 s each; one that comes late takes its third from then on."""
    trace = [job(name, 0, 10) for name in "abc"]
    assert replay(trace, SMALL, num_gpus=1).jct_mean_s == pytest.approx(30)
    # a alone for 5 s, then half speed until b's 4 s are done at 13 s, then its last second.
    staggered = replay([job("a", 0, 10), job("b", 5, 4)], SMALL, num_gpus=1)
    assert staggered.makespan_s == pytest.approx(14)
    assert staggered.jct_mean_s == pytest.approx((14 + 8) / 2)


def test_replay_when_there_are_more_instances_then_jobs_go_to_the_least_loaded():
    trace = [job("big", 0, 10), job("small", 0, 10, step_tokens=1), job("next", 0, 10)]
    # big on one instance; small on the other; next joins small, with 8 tokens wanted of 8 and small taking 1.
    report = replay(trace, SMALL, num_gpus=2)
    # small alone: 1 token in 8 s; beside next: 1 in 16 s. next: 7 in 16 s instead of 8.
    small_s = 20.0
    next_s = 10 * 8 / 7
    assert report.jct_mean_s == pytest.approx((10 + (small_s - (small_s - next_s) / 2) + next_s) / 3)


def test_replay_when_memory_is_full_then_jobs_queue():
    instance = dataclasses.replace(SMALL, job_bytes=20)
    report = replay([job(name, 0, 10, step_tokens=1) for name in "abc"], instance, num_gpus=1)
    assert report.queue_mean_s == pytest.approx(10 / 3)
    assert report.makespan_s == pytest.approx(20)


def test_replay_when_a_higher_priority_comes_then_the_lower_gives_way_and_ends_later():
    instance = dataclasses.replace(SMALL, max_jobs=1)
    trace = [job("low", 0, 10), job("late", 1, 10), job("urgent", 4, 3, priority=1)]
    report = replay(trace, instance, num_gpus=1, policy="priority")
    assert report.num_preemptions == 1
    # urgent 4..7; low goes on with 6 s left, 7..13; late 13..23.
    assert report.jct_mean_s == pytest.approx((13 + 22 + 3) / 3)
    assert replay(trace, instance, num_gpus=1).num_preemptions == 0


def test_replay_when_several_could_give_way_then_the_lowest_and_latest_does():
    instance = dataclasses.replace(SMALL, max_jobs=3)
    trace = [job("first", 0, 10, 1), job("middle", 1, 10, 1, priority=1), job("last", 2, 10, 1)]
    report = replay([*trace, job("urgent", 3, 4, 1, priority=2)], instance, num_gpus=1, policy="priority")
    # Only last, which has 9 s left at 3 s, goes on at 7 s and ends at 16 s.
    assert report.makespan_s == pytest.approx(16) and report.num_preemptions == 1
    assert report.jct_mean_s == pytest.approx((10 + 10 + 14 + 4) / 4)


def test_replay_when_a_long_job_has_a_later_deadline_then_its_slack_may_still_be_less():
    instance = dataclasses.replace(SMALL, max_jobs=1)
    trace = [
        job("running", 0, 5, deadline_s=100),
        job("short", 1, 2, deadline_s=30),
        job("long", 2, 20, deadline_s=40),
    ]
    report = replay(trace, instance, num_gpus=1, policy="slo")
    # long has 40 - 20 = 20 to spare against 28: 5..25, then short 25..27.
    assert report.jct_mean_s == pytest.approx((5 + 23 + 26) / 3)
    assert report.late_share == 0


def test_replay_when_a_large_urgent_job_comes_then_only_as_many_give_way_as_it_needs():
    small = [TraceJob(name, at, 50, 1, num_bytes=30) for at, name in enumerate("abc")]
    urgent = TraceJob("urgent", 5, 1, 1, priority=1, num_bytes=70)
    report = replay([*small, urgent], SMALL, num_gpus=1, policy="priority")
    assert report.num_preemptions == 2
    assert report.queue_mean_s == 0


def test_replay_when_deadlines_rule_then_least_slack_goes_first_and_the_late_go_last():
    instance = dataclasses.replace(SMALL, max_jobs=1)
    trace = [
        job("running", 0, 10, deadline_s=100),
        job("hopeless", 1, 5, deadline_s=2),
        job("relaxed", 2, 5, deadline_s=90),
        job("tight", 3, 5, deadline_s=16),
    ]
    report = replay(trace, instance, num_gpus=1, policy="slo")
    # tight 10..15, relaxed 15..20, hopeless 20..25.
    assert report.late_share == pytest.approx(1 / 4)
    assert report.jct_mean_s == pytest.approx((10 + 24 + 18 + 12) / 4)


def test_replay_when_hours_are_shared_then_more_is_trained_and_jobs_end_sooner():
    """The published load is far beyond one job per instance, with PEFT's own speed and padding."""
    trace = generate_trace(1, horizon_s=6 * 3600)
    shared = replay(trace, Instance(max_jobs=32), recorded_on=PEFT)
    single = replay(trace, PEFT)
    assert shared.throughput_tokens_s > 2 * single.throughput_tokens_s
    assert shared.jct_mean_s < single.jct_mean_s and shared.num_ended > single.num_ended


def test_replay_when_recorded_on_a_slower_instance_then_the_work_is_the_same_and_takes_less():
    """Ten seconds at half the speed are five."""
    slow = dataclasses.replace(SMALL, cost=LinearCost(token_s=2.0))
    assert replay([job("a", 0, 10)], SMALL, recorded_on=slow).makespan_s == pytest.approx(5)
    assert replay([job("a", 0, 10)], slow, recorded_on=slow).makespan_s == pytest.approx(10)


def test_replay_when_one_job_waits_for_another_then_fairness_is_jains_index_of_their_slowdowns():
    """Two of 10 s, one after the other: 1 and a half of their speed alone."""
    trace = [job("a", 0, 10), job("b", 0, 10)]
    assert replay(trace, dataclasses.replace(SMALL, max_jobs=1), num_gpus=1).fairness == pytest.approx(1.5**2 / 2.5)
    assert replay(trace, SMALL, num_gpus=1).fairness == pytest.approx(1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"policy": "fifo"}, "policy: is 'fifo'; accepted are fcfs, priority, slo"),
        ({"num_gpus": 1, "gpus_per_instance": 2}, "num_gpus: 1 GPUs with 2 per instance make no instance"),
    ],
    ids=["policy", "gpus"],
)
def test_replay_when_the_request_is_impossible_then_reports_what(arguments, message):
    with pytest.raises(PlanError, match=message):
        replay([job("a", 0, 1)], SMALL, **arguments)


def test_replay_when_a_job_fits_no_instance_or_there_is_none_then_reports_it():
    with pytest.raises(PlanError, match="a: needs 500 bytes; an instance has 100 for jobs"):
        replay([TraceJob("a", 0, 1, 8, num_bytes=500)], SMALL)
    with pytest.raises(PlanError, match="trace: has no jobs"):
        replay([], SMALL)
