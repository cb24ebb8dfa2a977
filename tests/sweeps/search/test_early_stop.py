"""Early stopping stops the trials that fall back, reports why, and stops no others."""

from __future__ import annotations

from typing import Any

import pytest

from weft.spec.sweep import EarlyStopSpec
from weft.sweeps.early_stop import EarlyStop
from weft.sweeps.trials_file import Observation, Trial, TrialState

TOTAL = 90


def rules(*, is_max: bool = False, **settings: Any) -> EarlyStop:
    """Rules that let a third go on and never fewer than three, from a ninth of the steps by default."""
    given = {"factor": 3.0, "min_trials": 3, **({} if "unit" in settings else {"grace": 1 / 9}), **settings}
    return EarlyStop(EarlyStopSpec(**given), "eval_loss", is_max)


def trial(number: int, *points: tuple[int, float], state: TrialState = TrialState.TRAINING, steps: int = 0) -> Trial:
    """A trial of 90 steps of 10 tokens that was seen at some steps."""
    seen = [Observation(step, 10 * step, value, 0.0) for step, value in points]
    last = steps or (points[-1][0] if points else 0)
    return Trial(number, f"t{number}", {}, state, points=seen, steps=last, tokens=10 * last, total_steps=TOTAL)


def stopped(decision: Any) -> list[str]:
    return [loser.name for loser, _ in decision.stop]


def test_asha_when_all_are_at_the_first_rung_then_the_best_third_goes_on_and_the_others_get_the_reason():
    trials = [trial(i, (10, 1.0 + i)) for i in range(9)]
    decision = rules().decide(trials)
    assert stopped(decision) == [f"t{i}" for i in range(3, 9)]
    assert decision.stop[0][1] == (
        "by step 10 its best eval_loss 4 was not among the best 1/3 of 9 trials (≤ 3)"
    )  # fmt: skip


def test_asha_when_nothing_is_set_then_the_better_half_goes_on_from_an_eighth_of_the_steps():
    plain = EarlyStop(EarlyStopSpec(), "eval_loss", False)
    assert not plain.decide([trial(i, (11, 1.0 + i)) for i in range(19)]).stop
    decision = plain.decide([trial(i, (12, 1.0 + i)) for i in range(19)])
    assert stopped(decision) == [f"t{i}" for i in range(10, 19)]
    assert "was not among the best 1/2 of 19 trials (≤ 10)" in decision.stop[0][1]


def test_asha_when_nothing_is_set_then_the_best_eight_always_go_on():
    plain = EarlyStop(EarlyStopSpec(), "eval_loss", False)
    assert not plain.decide([trial(i, (12, 1.0 + i)) for i in range(8)]).stop
    decision = plain.decide([trial(i, (12, 1.0 + i)) for i in range(9)])
    assert stopped(decision) == ["t8"]
    assert "was not among the best 8 of 9 trials (≤ 8)" in decision.stop[0][1]


def test_median_when_nothing_is_set_then_three_are_enough_to_compare():
    plain = EarlyStop(EarlyStopSpec(rule="median"), "eval_loss", False)
    others = [trial(i, (12, 1.0 + i)) for i in range(2)]
    assert stopped(plain.decide([*others, trial(2, (12, 9.0))])) == ["t2"]
    assert not plain.decide([others[0], trial(2, (12, 9.0))]).stop


def test_asha_when_larger_is_better_then_the_largest_go_on():
    trials = [trial(i, (10, i / 10)) for i in range(6)]
    decision = rules(is_max=True).decide(trials)
    assert stopped(decision) == ["t0", "t1", "t2"]
    assert "was not among the best 3 of 6 trials (≥ 0.3)" in decision.stop[0][1]


@pytest.mark.parametrize("is_max", [False, True])
def test_asha_when_a_trial_has_a_bad_moment_at_a_rung_then_the_best_it_has_had_counts(is_max):
    """Values go up and down; one that has gone on from a rung is not compared there again."""
    sign = -1.0 if is_max else 1.0
    others = [trial(i, (10, sign * (1.0 + i)), (30, sign * (1.0 + i))) for i in range(1, 9)]
    shaky = trial(0, (10, sign * 1.5), (30, sign * 50.0))
    assert stopped(rules(is_max=is_max).decide([shaky, *others])) == [f"t{i}" for i in range(3, 9)]
    late = trial(0, (10, sign * 50.0), (30, sign * 40.0), (40, sign * 1.5))
    decision = rules(is_max=is_max).decide([late, *others])
    assert stopped(decision) == [f"t{i}" for i in range(4, 9)]
    assert decision.stop[0][1].startswith(f"by step 30 its best eval_loss {sign * 5:g} was not among the best 1/3 of 9")


def test_asha_when_values_are_equal_then_no_trial_stops():
    assert not rules().decide([trial(i, (10, 0.5)) for i in range(6)]).stop


def test_asha_when_others_are_about_to_come_then_waits_for_them():
    here = [trial(i, (10, 1.0 + i)) for i in range(4)]
    near, far = trial(4, steps=9), trial(5, steps=2)
    decision = rules().decide([*here, near, far], held=["t0"])
    assert not decision.stop and not decision.release
    assert [held.name for held in decision.hold] == ["t1", "t2", "t3"], "t0 waits already"
    decision = rules().decide([*here, far], held=["t0", "t1", "t2", "t3"])
    assert stopped(decision) == ["t3"]
    assert [released.name for released in decision.release] == ["t0", "t1", "t2"]


def test_rung_when_a_trial_comes_to_it_then_it_is_known_before_whether_it_is_compared_there():
    mine = trial(0)
    seen = [Observation(step, 10 * step, 0.0, 0.0) for step in (5, 10, 20, 30, 40)]
    before = [None, *seen]
    for given in ({}, {"unit": "tokens", "grace": 100}, {"rule": "halving"}):
        compared = [rules(**given).is_compared(mine, *pair) for pair in zip(seen, before, strict=False)]
        assert compared == [False, True, False, True, False]
    compared = [rules(rule="median").is_compared(mine, *pair) for pair in zip(seen, before, strict=False)]
    assert compared == [False, True, True, True, True]


def test_asha_when_few_have_come_then_some_always_go_on():
    few = [trial(i, (10, 1.0 + i)) for i in range(4)]
    assert not rules().decide(few[:3]).stop
    assert stopped(rules().decide(few)) == ["t3"]
    assert stopped(rules(min_trials=2).decide(few)) == ["t2", "t3"]
    assert not rules(min_trials=5).decide(few).stop


def test_asha_when_a_trial_has_passed_a_rung_then_only_its_highest_one_counts():
    ended = [trial(i, (10, 2.0), (30, 1.0 + i), state=TrialState.STOPPED) for i in range(3)]
    late = trial(3, (10, 9.0), (30, 0.5))
    early = trial(4, (10, 2.5))
    assert stopped(rules().decide([*ended, late, early])) == ["t4"]


def test_asha_when_a_trial_is_at_its_end_then_it_is_not_stopped():
    trials = [trial(i, (30, 1.0 + i), (90, 1.0)) for i in range(5)]
    assert not rules().decide(trials).stop


def test_asha_when_measured_in_steps_or_tokens_then_rungs_are_there():
    trials = [trial(i, (20, 1.0 + i)) for i in range(5)]
    assert not rules(unit="steps", grace=21).decide(trials).stop
    assert stopped(rules(unit="steps", grace=20).decide(trials)) == ["t3", "t4"]
    assert not rules(unit="tokens", grace=201).decide(trials).stop
    assert stopped(rules(unit="tokens", grace=200).decide(trials)) == ["t3", "t4"]


def test_none_then_no_trial_stops():
    assert not rules(rule="none").decide([trial(i, (10, 1.0 + i)) for i in range(9)]).stop


def test_median_when_a_trial_is_worse_than_most_at_the_same_step_then_it_stops():
    others = [trial(i, (10, 1.0 + i), (20, 0.5 + i), state=TrialState.DONE) for i in range(3)]
    worse, better = trial(3, (20, 1.8)), trial(4, (20, 1.2))
    decision = rules(rule="median").decide([*others, worse, better])
    assert stopped(decision) == ["t3"]
    assert decision.stop[0][1] == (
        "at step 20 its eval_loss 1.8 was worse than 1.35, the median of 4 other trials there"
    )  # fmt: skip


def test_median_when_others_have_gone_on_then_their_values_of_the_same_step_count():
    """A trial that is ahead has better values now; those do not show where it was."""
    ahead = [trial(i, (10, 2.0), (80, 0.1)) for i in range(3)]
    assert stopped(rules(rule="median").decide([*ahead, trial(3, (10, 1.9))])) == []
    assert stopped(rules(rule="median").decide([*ahead, trial(3, (10, 2.1))])) == ["t3"]


@pytest.mark.parametrize(("min_trials", "losers"), [(3, ["t2"]), (4, [])])
def test_median_when_fewer_than_min_trials_have_come_then_no_trial_stops(min_trials, losers):
    others = [trial(i, (10, 1.0), state=TrialState.DONE) for i in range(2)]
    assert stopped(rules(rule="median", min_trials=min_trials).decide([*others, trial(2, (10, 9.0))])) == losers


@pytest.mark.parametrize(("step", "grace"), [(5, 0.1), (9, 0.2)])
def test_median_when_a_trial_is_in_its_grace_then_it_goes_on(step, grace):
    others = [trial(i, (step, 1.0), state=TrialState.DONE) for i in range(3)]
    assert not rules(rule="median", grace=grace).decide([*others, trial(3, (step, 9.0))]).stop


def test_halving_when_others_are_still_to_come_then_holds_and_then_releases_the_best():
    halving = rules(rule="halving", min_trials=2)
    first, second, third = trial(0, (10, 1.0)), trial(1, (10, 2.0)), trial(2, steps=4)
    decision = halving.decide([first, second, third])
    assert decision.hold == (first, second) and not decision.stop and not decision.release
    assert halving.decide([first, second, third], {"t0", "t1"}).hold == ()
    third.points.append(Observation(10, 100, 3.0, 0.0))
    decision = halving.decide([first, second, third], {"t0", "t1"})
    assert stopped(decision) == ["t2"] and decision.release == (first, second) and not decision.hold
    third.state = TrialState.STOPPED
    assert not halving.decide([first, second, third]).hold


def test_halving_when_a_trial_is_at_its_end_then_it_does_not_wait():
    trials = [trial(i, (30, 1.0 + i), (90, 1.0)) for i in range(2)]
    decision = rules(rule="halving", unit="steps", grace=10).decide([*trials, trial(2, steps=5)])
    assert not decision.hold and not decision.stop


def test_halving_when_trials_have_not_started_yet_then_waits_for_them_too():
    trials = [trial(i, (10, 1.0 + i)) for i in range(4)]
    assert rules(rule="halving").decide(trials, num_to_come=1).hold == tuple(trials)
    waiting = Trial(4, "t4", {}, total_steps=TOTAL)
    assert rules(rule="halving").decide([*trials, waiting]).hold == tuple(trials)
    assert stopped(rules(rule="halving").decide(trials)) == ["t3"]


@pytest.mark.parametrize(
    ("rule", "fewest"), [({}, 9), ({"rule": "halving", "min_trials": 3}, 4), ({"rule": "median"}, 3)]
)
def test_rule_when_there_are_too_few_trials_then_it_can_stop_none(rule, fewest):
    spec = EarlyStopSpec(**rule)
    assert [spec.can_stop_any(number) for number in (fewest - 1, fewest, None)] == [False, True, True]
    assert not EarlyStopSpec(rule="none").can_stop_any(100)
