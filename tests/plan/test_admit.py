"""Admission: within the budget, priorities first, tenants in turn, first come first served, and none forgotten."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.errors import PlanError
from weft.job_state import Reason, ReasonCode
from weft.plan.admit import QUANTUM_TOKENS, Admission, Applicant, Budget, Share, admit


def training(admission: Admission) -> frozenset[str]:
    """The jobs that train from now on."""
    return frozenset((*admission.start, *admission.keep))


@st.composite
def situations(draw: st.DrawFn) -> tuple[list[Applicant], list[Applicant], Budget, dict[str, Share]]:
    """Jobs that wait, jobs that train, a budget and the tenants' shares."""
    tenants = draw(st.lists(st.sampled_from("xyz"), min_size=1, max_size=3, unique=True))
    everyone = [
        Applicant(f"job{i}", arrival, draw(st.integers(1, 12)), draw(st.integers(0, 2)), draw(st.sampled_from(tenants)))
        for i, arrival in enumerate(draw(st.permutations(range(draw(st.integers(0, 9))))))
    ]
    running = [a for a in everyone if draw(st.booleans())]
    budget = Budget(
        draw(st.none() | st.integers(0, 60)),
        fixed_bytes=draw(st.integers(0, 20)),
        margin=draw(st.sampled_from([0.0, 0.1, 0.5])),
        max_jobs=draw(st.none() | st.integers(1, 5)),
    )
    weights = {tenant: draw(st.sampled_from([0.5, 1.0, 3.0])) for tenant in tenants}
    shares = {tenant: Share(weight, draw(st.integers(0, 5)) * QUANTUM_TOKENS) for tenant, weight in weights.items()}
    return [a for a in everyone if a not in running], running, budget, shares


def fits(chosen: Sequence[Applicant], budget: Budget) -> bool:
    """Whether a set may train together, from the budget's own words."""
    if budget.max_jobs is not None and len(chosen) > budget.max_jobs:
        return False
    predicted = budget.fixed_bytes + sum(a.num_bytes for a in chosen)
    return budget.total_bytes is None or predicted <= int(budget.total_bytes / (1 + budget.margin)) or not chosen


def held_jobs(admission: Admission) -> list[str]:
    return [held.job for held in (*admission.preempt, *admission.wait, *admission.refuse)]


@given(situations())
def test_admit_then_every_job_gets_one_answer(situation):
    waiting, running, budget, shares = situation
    admission = admit(waiting, running, budget, shares)
    answers = [*admission.start, *admission.keep, *held_jobs(admission)]
    assert sorted(answers) == sorted(a.job for a in (*waiting, *running))
    assert {*admission.start, *(h.job for h in (*admission.wait, *admission.refuse))} == {a.job for a in waiting}
    assert {*admission.keep, *(h.job for h in admission.preempt)} == {a.job for a in running}
    assert json.loads(json.dumps(dataclasses.asdict(admission)))["start"] == list(admission.start)


@given(situations())
def test_admit_when_memory_is_short_then_the_set_is_within_the_budget_and_no_job_that_fits_waits(situation):
    """A job waits only if it does not fit beside those that train with its priority or a higher one."""
    waiting, running, budget, shares = situation
    admission = admit(waiting, running, budget, shares)
    everyone = {a.job: a for a in (*waiting, *running)}
    chosen = [everyone[job] for job in training(admission)]
    assert fits(chosen, budget)
    for held in (*admission.wait, *admission.preempt):
        mine = everyone[held.job]
        above = [a for a in chosen if a.priority >= mine.priority]
        assert not fits([*above, mine], budget), (held, above)
    for held in admission.refuse:
        assert not fits([everyone[held.job]], budget)


@given(situations())
def test_admit_when_there_is_one_tenant_then_who_came_first_trains_first(situation):
    waiting, running, budget, _ = situation
    waiting, running = ([dataclasses.replace(a, tenant="x") for a in group] for group in (waiting, running))
    admission = admit(waiting, running, budget)
    everyone = {a.job: a for a in (*waiting, *running)}
    for held in (*admission.wait, *admission.preempt):
        mine = everyone[held.job]
        before = [
            everyone[job]
            for job in training(admission)
            if (-everyone[job].priority, everyone[job].arrival) < (-mine.priority, mine.arrival)
        ]
        assert not fits([*before, mine], budget)


@given(situations(), st.randoms())
def test_admit_when_repeated_or_in_another_order_then_nothing_changes(situation, random):
    waiting, running, budget, shares = situation
    first = admit(waiting, running, budget, shares)
    shuffled = admit(random.sample(waiting, len(waiting)), random.sample(running, len(running)), budget, shares)
    assert shuffled == first
    everyone = [*waiting, *running]
    refused = {held.job for held in first.refuse}
    again = admit(
        [a for a in everyone if a.job not in training(first) | refused],
        [a for a in everyone if a.job in training(first)],
        budget,
        shares,
    )
    assert (again.start, again.preempt) == ((), ())
    assert training(again) == training(first)


def serve(
    arrivals: Mapping[int, Sequence[Applicant]], lengths: Mapping[str, int], budget: Budget, rounds: int
) -> dict[str, int]:
    """Runs decisions round by round, a quantum for every job that trains; returns the round each job ended in."""
    left = dict(lengths)
    alive: dict[str, Applicant] = {}
    chosen: frozenset[str] = frozenset()
    served: dict[str, int] = {}
    ended: dict[str, int] = {}
    for now in range(rounds):
        alive.update({a.job: a for a in arrivals.get(now, ())})
        waiting = [a for a in alive.values() if a.job not in chosen]
        running = [a for a in alive.values() if a.job in chosen]
        shares = {tenant: Share(1.0, tokens) for tenant, tokens in served.items()}
        chosen = training(admit(waiting, running, budget, shares))
        for job in chosen:
            tenant = alive[job].tenant
            served[tenant] = served.get(tenant, 0) + QUANTUM_TOKENS
            left[job] -= 1
            if left[job] == 0:
                ended[job] = now
                del alive[job]
        chosen = chosen & alive.keys()
    return ended


@given(situations(), st.data())
def test_admit_when_jobs_end_then_everybody_has_been_served(situation, data):
    """With finite jobs no round is idle while a job waits, so all end within the sum of their lengths."""
    waiting, running, budget, _ = situation
    everyone = [a for a in (*waiting, *running) if budget.why_never(a.num_bytes) is None]
    lengths = {a.job: data.draw(st.integers(1, 4)) for a in everyone}
    ended = serve({0: everyone}, lengths, budget, rounds=sum(lengths.values()))
    assert ended.keys() == lengths.keys()


def test_admit_when_small_jobs_keep_coming_then_the_large_one_before_them_is_served():
    """Those who overtook it hold its place on loan."""
    big = Applicant("big", 1, 10)
    first = Applicant("first", 0, 6)
    small = {now: [Applicant(f"small{now}", now + 2, 4)] for now in range(1, 60)}
    arrivals = {**small, 0: [first, big]}
    lengths = {"big": 5, "first": 3, **{f"small{now}": 20 for now in range(1, 60)}}
    ended = serve(arrivals, lengths, Budget(10), rounds=60)
    assert ended["first"] == 2 and ended["big"] == 7
    assert "small1" in ended, "what the first left over was lent, and the rest came after the big one"


def test_admit_when_one_tenant_floods_then_the_other_is_served_in_turn():
    flood = [Applicant(f"flood{i}", i, 1, tenant="x") for i in range(40)]
    late = [Applicant(f"late{i}", 100 + i, 1, tenant="y") for i in range(2)]
    lengths = {a.job: 6 for a in (*flood, *late)}
    ended = serve({0: flood, 1: late}, lengths, Budget(4), rounds=100)
    assert max(ended["late0"], ended["late1"]) <= 7


def test_admit_when_a_higher_priority_comes_then_the_latest_of_the_lowest_gives_way():
    running = [Applicant("a", 0, 4), Applicant("b", 1, 4, priority=1), Applicant("c", 2, 4)]
    admission = admit([Applicant("urgent", 3, 4, priority=2)], running, Budget(12))
    assert admission.start == ("urgent",)
    assert set(admission.keep) == {"a", "b"}
    assert [(held.job, held.reason) for held in admission.preempt] == [
        ("c", Reason(ReasonCode.GAVE_WAY, "gives way to urgent"))
    ]


def test_admit_when_preempting_would_not_help_then_none_is_preempted():
    running = [Applicant("high", 0, 10, priority=3), Applicant("low", 1, 2)]
    admission = admit([Applicant("big", 2, 8, priority=2)], running, Budget(12))
    assert set(admission.keep) == {"high", "low"} and not admission.start
    assert admission.wait[0].reason == Reason(
        ReasonCode.NO_MEMORY_NOW, "waits for memory: it needs 8 bytes, jobs before it hold 10 bytes of 12 bytes"
    )


def test_admit_when_tenants_have_had_unequal_service_then_seats_follow_their_weights():
    jobs = [Applicant(f"{tenant}{i}", 4 * (tenant == "y") + i, 1, tenant=tenant) for tenant in "xy" for i in range(4)]
    alike = admit(jobs, [], Budget(4))
    assert alike.start == ("x0", "y0", "x1", "y1")
    behind = admit(jobs, [], Budget(4), {"x": Share(1.0, 2 * QUANTUM_TOKENS)})
    assert sorted(behind.start) == ["x0", "y0", "y1", "y2"]
    weighted = admit(jobs, [], Budget(4), {"x": Share(3.0)})
    assert sorted(weighted.start) == ["x0", "x1", "x2", "y0"]
    unripe = admit(jobs, [], Budget(4), {"x": Share(1.0, QUANTUM_TOKENS - 1)})
    assert unripe == alike, "less than a quantum changes no tenant's turn"


def test_admit_when_a_job_can_never_fit_then_refused_with_the_arithmetic():
    gib = 2**30
    budget = Budget(80 * gib, fixed_bytes=44 * gib, margin=0.25)
    admission = admit([Applicant("huge", 0, 24 * gib), Applicant("fine", 1, 20 * gib)], [], budget)
    assert admission.start == ("fine",)
    assert admission.refuse[0].reason == Reason(
        ReasonCode.DOES_NOT_FIT,
        "can never fit: it needs 24.0 GiB, and of 80.0 GiB only 20.0 GiB are for jobs (44.0 GiB go to the backbone and "
        "its microbatches, 25% is kept as a margin).",
    )


def test_admit_when_jobs_have_held_more_than_the_estimate_then_the_evidence_counts():
    running = [Applicant("a", 0, 6), Applicant("b", 1, 6)]
    assert admit([], running, Budget(20, 10)).preempt[0].job == "b"
    assert not admit([], running, Budget(20, 10, proven_bytes=12)).preempt


def test_admit_when_max_jobs_is_reached_then_the_rest_waits_with_the_reason():
    admission = admit([Applicant(f"job{i}", i) for i in range(3)], [], Budget(max_jobs=1))
    assert admission.start == ("job0",)
    assert admission.wait[0].reason == Reason(
        ReasonCode.NO_SEAT, "waits for a seat: 1 job trains, max_jobs allows no more"
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: admit([Applicant("a", 0)], [Applicant("a", 1)], Budget()), "a: is given twice"),
        (lambda: admit([Applicant("a", 0, -1)], [], Budget()), "a: needs -1 bytes"),
        (lambda: admit([], [], Budget(), {"x": Share(0.0)}), "x: has the weight 0; it must be above 0"),
        (lambda: Budget(margin=-0.1), "margin: is -0.1; it must be at least 0"),
        (lambda: Budget(max_jobs=0), "max_jobs: is 0; it must be at least 1"),
    ],
    ids=["twice", "bytes", "weight", "margin", "max_jobs"],
)
def test_admit_when_the_input_is_wrong_then_reports_what(call, message):
    with pytest.raises(PlanError, match=message):
        call()


@pytest.mark.parametrize(
    ("budget", "number"),
    [(Budget(1050, 50, 0.05), 9), (Budget(1050, 50, 0.05, max_jobs=4), 4), (Budget(), None), (Budget(max_jobs=3), 3)],
)
def test_num_alike_when_jobs_are_of_one_size_then_as_many_as_admission_takes(budget, number):
    assert budget.num_alike(100) == number
    for num in range(1, 12):
        assert budget.fits(num, 100 * num) is (number is None or num <= number)
