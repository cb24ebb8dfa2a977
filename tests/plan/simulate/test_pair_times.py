"""What two microbatches side by side are predicted to take, whether that pays, and how measurements change it."""

from __future__ import annotations

import dataclasses

import pytest

from weft.engine.events import MicrobatchesPaired
from weft.plan.check import violations
from weft.plan.cost.analytic import AnalyticCost
from weft.plan.cost.fit import Fit, MicrobatchLoad
from weft.plan.cost.hardware import find_hardware
from weft.plan.cost.learned import FEWEST, MeasuredPairs, PairPace
from weft.plan.cost.shape import ModelShape, find_shape
from weft.plan.pipeline.pair import side_by_side, two_groups, uncut
from weft.plan.program import Backward, Forward
from weft.plan.simulate.choose import FastestPipeline, pipeline_planner
from weft.plan.simulate.interpret import simulate
from weft.plan.simulate.timeline import BESIDE, COMPUTE
from weft.plan.simulate.two_streams import PairTimes
from weft.plan.types import Batch, JobQueue, Limits, Microbatch, Segment

SHAPE = ModelShape.from_config(find_shape("llama-3.1-8b").config().to_dict())
SAMPLES = (1024,) * 4
LIMITS = Limits(4096)


def cost(device: str = "l40s") -> AnalyticCost:
    return AnalyticCost(SHAPE, find_hardware(device), tensor_parallel=2)


def queues(*jobs: str) -> list[JobQueue]:
    return [JobQueue(job, tuple(Batch(step, 0, SAMPLES) for step in range(3)), True) for job in jobs]


def test_pair_when_links_are_slow_then_hides_most_sums_and_never_takes_less_than_what_computes():
    found = PairTimes(cost())
    for is_forward in (True, False):
        share = found.share(SAMPLES, SAMPLES, 0, is_forward=is_forward)
        pass_s = (cost().forward_s if is_forward else cost().backward_s)(SAMPLES, 0)
        sums = SHAPE.num_layers * cost().layer(SAMPLES, is_forward=is_forward).reduces / pass_s
        assert 1 - sums <= share < 1 - 0.9 * sums
    fast = dataclasses.replace(cost(), hardware=dataclasses.replace(cost().hardware, link_rate=1e18))
    assert PairTimes(fast).share(SAMPLES, SAMPLES, 0, is_forward=True) == pytest.approx(1.0)


def test_pair_when_one_is_short_then_the_rest_of_the_other_hides_nothing():
    found = PairTimes(cost())
    shares = [found.share(SAMPLES, own, 0, is_forward=True) for own in (SAMPLES, (1024,), (16,))]
    assert shares == sorted(shares) and shares[-1] < 1.0


def test_pair_when_something_was_measured_then_that_counts_before_links():
    table = cost("h100")
    waits = PairTimes(table, MeasuredPairs(sums={("forward", 0): 0.4})).share(SAMPLES, SAMPLES, 0, is_forward=True)
    assert 0.6 <= waits < 0.7 < PairTimes(table).share(SAMPLES, SAMPLES, 0, is_forward=True)
    ran = PairTimes(table, MeasuredPairs({("forward", 0): 0.4}, {("forward", 0): 1.2}))
    assert ran.share(SAMPLES, SAMPLES, 0, is_forward=True) == 1.2
    assert ran.share(SAMPLES, SAMPLES, 0, is_forward=False) == PairTimes(table).share(
        SAMPLES, SAMPLES, 0, is_forward=False
    )


def test_program_when_simulated_then_both_of_a_pair_run_at_once_and_are_held_at_once():
    program = side_by_side(two_groups(queues("a", "b"), LIMITS.capacity)[1])
    timeline = simulate(program, cost(), pairs=PairTimes(cost()))
    first, second = timeline.spans[:2]
    assert (first.start_s, first.duration_s) == (second.start_s, second.duration_s)
    assert (first.lane, second.lane) == (COMPUTE, BESIDE)
    assert (first.args["beside"], second.args["beside"]) == (1, 0)
    assert timeline.peak_bytes(0) == 2 * cost().held_bytes(SAMPLES, 0)
    assert timeline.bubble_ratio() == pytest.approx(0.0)
    # Without a measured gain of pairs they gain nothing.
    alone = simulate(dataclasses.replace(program, pairs=()), cost())
    assert simulate(program, cost()).makespan_s == pytest.approx(alone.makespan_s)
    assert timeline.makespan_s < 0.75 * alone.makespan_s


@pytest.mark.parametrize(("pairs_share_room", "num_pairs", "num_tokens"), [(True, 6, 2048), (False, 3, 4096)])
def test_choice_when_pairs_pay_then_is_pairs_and_reports_the_gain(pairs_share_room, num_pairs, num_tokens):
    """On a GPU, two half full ones, which take no more memory than one full one."""
    planner = pipeline_planner("auto", cost(), in_pairs=True)
    assert isinstance(planner, FastestPipeline) and planner.pairs_share_room
    planner = dataclasses.replace(planner, pairs_share_room=pairs_share_room)
    choice = planner.choose(queues("a", "b"), LIMITS)
    assert choice.pairs is not None and choice.pairs.num_pairs == len(choice.program.pairs) == num_pairs
    assert {own.num_tokens for own in choice.program.microbatches} == {num_tokens}
    assert violations(choice.program, queues("a", "b"), LIMITS) == []
    without = dataclasses.replace(planner, pairs=None).choose(queues("a", "b"), LIMITS)
    assert without.program.pairs == () and without.pairs is None
    assert choice.pairs.gain == pytest.approx(1 - choice.seconds / without.seconds) and choice.pairs.gain > 0.2
    text = MicrobatchesPaired(3, choice.pairs.gain, (("a",), ("b",)), 0).text
    assert text.startswith("microbatches of a; b run two at a time") and "predicted from the hardware table" in text


def test_choice_when_jobs_fit_one_microbatch_then_counts_what_two_half_full_ones_cost():
    """Half the rows take half the time, so that two groups hide sums for nothing; in whole tiles they do not.

    Nor is there room for two whole tiles where memory is counted.
    """
    small = [JobQueue(job, (Batch(0, 0, (1024, 1024)),), True) for job in "ab"]
    tiles = dataclasses.replace(cost(), row_tile=4096)
    chosen = [pipeline_planner("auto", own, in_pairs=True) for own in (cost(), tiles, tiles)]
    chosen[1] = dataclasses.replace(chosen[1], pairs_share_room=False)
    pairs = [planner.choose(small, LIMITS).pairs for planner in chosen if isinstance(planner, FastestPipeline)]
    assert [each.num_pairs if each is not None else None for each in pairs] == [1, 0, 0]
    assert pairs[1] is not None and pairs[1].gain is not None and pairs[1].gain < 0
    assert "pairs would take" in MicrobatchesPaired(0, pairs[1].gain, (("a", "b"),), 20).text
    assert pairs[2] is not None and pairs[2].gain is None


def test_choice_when_a_sample_is_longer_than_half_a_microbatch_then_it_runs_alone():
    planner = pipeline_planner("auto", cost(), in_pairs=True)
    long = [JobQueue("a", (Batch(0, 0, (3000, 1000)), Batch(1, 0, (1000, 1000))), True), *queues("b")]
    program = planner(long, LIMITS)
    assert violations(program, long, LIMITS) == [] and program.pairs
    sizes = [own.num_tokens for own in program.microbatches]
    assert max(sizes[first] + sizes[second] for first, second in program.pairs) <= LIMITS.capacity
    assert max(sizes) > LIMITS.capacity // 2


def test_choice_when_there_is_one_job_then_reports_that_all_microbatches_share_a_job():
    planner = pipeline_planner("auto", cost(), in_pairs=True)
    assert isinstance(planner, FastestPipeline)
    choice = planner.choose(queues("a"), LIMITS)
    assert choice.pairs is not None and (choice.pairs.num_pairs, choice.pairs.gain) == (0, None)
    assert "no two without a common job have room" in MicrobatchesPaired(0, None, (("a",),), 0).text


def test_pace_when_enough_was_seen_then_knows_waits_and_pairs_of_that_stage():
    pace, load, forward = PairPace(), MicrobatchLoad.of([(4, [100])], 0), ("forward", 1)
    alone = {forward: Fit({"rows": 0.01})}
    for _ in range(FEWEST - 1):
        pace.note_sums(forward, 0.25, 1.0)
        pace.note_pair(forward, (load, load), 1.5)
    assert pace.learn(alone) == MeasuredPairs()
    pace.note_sums(forward, 0.25, 1.0)
    pace.note_pair(forward, (load, load), 1.5)
    found = pace.learn(alone)
    assert (found.sums, found.pairs) == ({forward: pytest.approx(0.25)}, {forward: pytest.approx(0.75)})
    assert pace.learn({("forward", 0): alone[forward]}).pairs == {}


@pytest.mark.parametrize("behind", [False, True])
def test_choice_when_there_are_stages_then_pairs_go_through_all_of_them(behind):
    """Two half full microbatches take the way of one; also after what another program has left in the pipeline."""
    own = dataclasses.replace(cost(), num_stages=2)
    planner = pipeline_planner("auto", own, in_pairs=True)
    assert isinstance(planner, FastestPipeline)
    if behind:
        left = [Microbatch((Segment("z", 0, index, 2048),)) for index in range(2)]
        planner = dataclasses.replace(planner, behind=tuple(left))
    given = queues("a", "b", "c", "d")
    choice = planner.choose(given, LIMITS)
    program = choice.program
    assert choice.pairs is not None and choice.pairs.num_pairs == len(program.pairs) == 12
    assert choice.pairs.gain is not None and choice.pairs.gain > 0.1
    assert violations(program, given, LIMITS) == []
    for stage in program.stages:
        passes = [i for i in stage if isinstance(i, Forward | Backward)]
        assert len(passes) == 48 and all(type(a) is type(b) for a, b in zip(passes[::2], passes[1::2], strict=True))
    assert [len(parts) for parts in uncut(program)] == [2] * 12
    limits = planner.memory_bytes(LIMITS)
    timeline = simulate(program, own)
    assert all(timeline.peak_bytes(stage) <= most for stage, most in enumerate(limits))
