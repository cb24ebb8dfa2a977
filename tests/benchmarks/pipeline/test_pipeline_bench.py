"""`python -m benchmarks pipeline`: figures of programs that ran, and of those that `weft train` would run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.pipeline.four_jobs import BATCH, CAPACITY, MIXES, by_samples, execute, measure_executed, queues
from benchmarks.pipeline.parts import GPU_REGIMES, REGIMES, TARGETS, choose_parts
from benchmarks.pipeline.recorded import RecordedRun, equal_share, replay_errors
from benchmarks.pipeline.seventy import TORCH_LORA, WEFT_LORA, measure_seventy, scaled
from weft.errors import ConfigError
from weft.kernels.device import has_gpu
from weft.plan.cost.profile import ProfiledCost, load_profile
from weft.plan.cost.shape import ModelShape, find_shape
from weft.plan.cost.types import LinearCost
from weft.plan.pipeline.build import Schedule, build
from weft.plan.simulate.choose import FastestPipeline
from weft.plan.simulate.interpret import simulate
from weft.plan.types import Limits

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
PROFILE = load_profile(BENCHMARKS / "h200_profile.json")


def recorded(late_s: float = 0.0) -> RecordedRun:
    """Two programs as if they had run, one after another, every span so much later than the one before it."""
    jobs = queues(MIXES[-1], 64, 4)
    run = RecordedRun()
    for start in (0, 8):
        program = build(Schedule.ONE_F_ONE_B, by_samples(jobs, 2)[start : start + 8], 2)
        run.programs.append(program)
        for index, span in enumerate(simulate(program, LinearCost(optimizer_s=5.0)).spans):
            run.spans.append(replace(span, start_s=span.start_s + 1e6 * start + late_s * index))
    run.spans.sort(key=lambda span: (span.stage, span.start_s))
    return run


def test_recorded_run_when_it_is_the_simulators_own_then_nothing_differs():
    run = recorded()
    assert equal_share([run]) == 1.0
    assert replay_errors(run) == pytest.approx((0.0, 0.0), abs=1e-12)


def test_recorded_run_when_two_events_are_exchanged_or_one_is_missing_then_they_count():
    run = recorded()
    num_events = len(run.spans)
    run.spans[2], run.spans[3] = run.spans[3], run.spans[2]
    assert equal_share([run]) == 1 - 2 / num_events
    run = recorded()
    run.spans.pop()
    assert equal_share([run]) == 1 - 1 / num_events


def test_recorded_run_when_stages_are_late_then_the_replay_misses_that():
    makespan, bubble = replay_errors(recorded(late_s=100.0))
    assert makespan > 0.01 and bubble > 0.01


def test_executed_when_planned_program_by_program_then_all_work_is_done_once():
    jobs = queues(MIXES[-1], 64, 4)
    cost = LinearCost()
    planner = FastestPipeline(2, cost)
    found = execute(planner, jobs, Limits(CAPACITY), cost)
    tokens = sum(sum(batch.lengths) for job in jobs for batch in job.batches)
    assert found.busy_s == pytest.approx(2 * 2 * tokens)
    assert 0 < found.bubble_ratio < 1
    often, drained = (
        execute(planner, jobs, Limits(CAPACITY), cost, every=1, drains=drains) for drains in (False, True)
    )
    for other in (often, drained):
        assert other.num_programs == 4 > found.num_programs and other.busy_s == pytest.approx(found.busy_s)
    assert often.bubble_ratio < drained.bubble_ratio


@pytest.mark.slow
def test_four_jobs_when_few_samples_are_simulated_then_every_figure_is_there():
    found = measure_executed(num_samples=4 * BATCH * 2)
    assert found.keys() == {key for key in TARGETS if key.startswith("bubble_het4_exec")}
    assert all(0 < value < 0.7 for value in found.values())


def test_profile_when_scaled_to_its_own_shape_then_keeps_its_times_and_adds_the_forward_again():
    """Only the forward on the way back is new."""
    shape = ModelShape.from_config(find_shape("llama-3.1-8b").config().to_dict(), "llama-3.1-8b")
    before, after = ProfiledCost(PROFILE), ProfiledCost(scaled(PROFILE, shape, PROFILE.setup.row_tile))
    lengths = [1000, 3000]
    forward_s = before.forward_s(lengths, 0)
    assert after.forward_s(lengths, 0) == pytest.approx(forward_s)
    assert after.backward_s(lengths, 0) == pytest.approx(before.backward_s(lengths, 0) + forward_s)


def test_profile_when_scaled_to_70b_then_layers_take_about_as_much_longer_as_they_have_more_weights():
    shape = ModelShape.from_config(find_shape("llama-3.1-70b").config().to_dict(), "llama-3.1-70b")
    before, after = ProfiledCost(PROFILE), ProfiledCost(scaled(PROFILE, shape, PROFILE.setup.row_tile))
    weights = shape.num_layers * shape.layer_weights + shape.head_weights
    own = PROFILE.setup.num_layers * PROFILE.setup.layer_weights + PROFILE.setup.head_weights
    ratio = after.forward_s([8192], 0) / before.forward_s([8192], 0)
    assert ratio == pytest.approx(weights / own, rel=0.2)


def test_seventy_when_few_samples_are_simulated_then_links_are_named():
    found = measure_seventy(PROFILE, num_samples=4 * BATCH)
    peers = [f"sim70b_vs_{peer}" for peer in ("1f1b", "mlora")]
    assert found.keys() == {peer + how for peer in peers for how in ("", "_rows", "_bound", "_torch")} | {
        "sim70b_link_gb_s"
    }
    for peer in peers:
        assert 0 < found[peer] < found[f"{peer}_rows"] < found[f"{peer}_bound"]
        assert found[peer] < found[f"{peer}_torch"] < found[peer] * (1 + TORCH_LORA)


def test_seventy_when_kernels_are_compared_then_their_prices_are_those_measured():
    measured = json.loads((BENCHMARKS / "h200.json").read_text())
    torch_s = measured["hf_frozen_512to1024_tok_s"] / measured["peft_best_512to1024_tok_s"] - 1
    assert pytest.approx(torch_s) == TORCH_LORA
    assert measured["overhead4"] == WEFT_LORA


def test_parts_when_one_figure_is_requested_then_only_its_part_is_chosen():
    # Some are measured on a GPU.
    assert len(choose_parts([], None)) == len(REGIMES) - (0 if has_gpu() else len(GPU_REGIMES))
    assert list(choose_parts(["sim70b_vs_1f1b"], PROFILE)) == [
        "70B on four H100, simulated by a profile of llama-3.1-8b, links assumed"
    ]
    with pytest.raises(ConfigError, match="got 'nothing'; accepted are order_equal"):
        choose_parts(["nothing"], None)
