"""mLoRA's order, LoRAPP, never beats the programs that `--schedule auto` chooses, so `auto` does not try it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from covering import each_value

from benchmarks.pipeline.four_jobs import MIXES, NUM_LAYERS, LayerCost, by_samples, queues
from weft.plan.pipeline.build import PipelinePlanner, Schedule, build
from weft.plan.simulate.choose import FastestPipeline
from weft.plan.simulate.interpret import simulate
from weft.plan.types import Limits, whole_batches

LIMITS = Limits(8192)


@pytest.mark.parametrize(("mix", "num_stages", "num_jobs", "batch"), each_value(MIXES[::4], (4, 2), (2, 1, 4), (4, 16)))
def test_auto_when_lorapp_has_its_best_microbatches_then_is_faster(mix, num_stages, num_jobs, batch):
    """LoRAPP with 1, 2 or 4 samples of a job in a microbatch, as mLoRA has them, or packed."""
    jobs = queues(replace(mix, jobs=mix.jobs[:num_jobs]), 4 * batch * num_jobs, batch)
    cost = LayerCost((NUM_LAYERS // num_stages,) * num_stages)
    whole = whole_batches(jobs, LIMITS, num_stages)
    streams = [by_samples(whole, num_samples) for num_samples in (1, 2, 4)]
    programs = [build(Schedule.LORAPP, stream, num_stages, cost=cost) for stream in streams]
    programs.append(PipelinePlanner(Schedule.LORAPP, num_stages)(jobs, LIMITS))
    lorapp_s = min(simulate(program, cost).makespan_s for program in programs)
    auto_s = simulate(FastestPipeline(num_stages, cost)(jobs, LIMITS), cost).makespan_s
    assert auto_s < 0.95 * lorapp_s
