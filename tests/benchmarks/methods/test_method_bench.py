"""`python -m benchmarks methods` compares jobs whose steps have the same rows, and refuses what it does not know."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny_models import random_backbone

from benchmarks.clock import QUICK
from benchmarks.methods.jobs import WARM_UP, MethodJobs, Pace, measure_pace
from benchmarks.methods.parts import TARGETS, MethodBench, choose_parts
from weft.data.order import BatchSchedule
from weft.errors import ConfigError
from weft.plan.cost.shape import find_shape


def test_jobs_when_they_differ_in_everything_then_their_steps_have_as_many_rows():
    jobs = MethodJobs(rows=256, length=32, num_steps=3, vocabulary=60, widest=8)
    made = [*jobs.mixed(), jobs.lora(0), jobs.dora(0), jobs.dpo(0), jobs.ia3(0)]
    assert len({(spec.adapter.method, spec.objective) for spec, _ in made[:8]}) == 8
    for spec, data in made:
        train = data.led_by(spec.adapter.num_leading_rows).train
        groups = BatchSchedule.of(spec, train.num_groups).batch(0)
        assert sum(sum(train.member_lengths(int(group))) for group in groups) == 256, spec.name


def test_pace_when_jobs_are_trained_then_counts_what_ran_and_what_was_trained():
    backbone = random_backbone("llama_odd")
    jobs = MethodJobs(rows=64, length=16, num_steps=WARM_UP + 6, vocabulary=backbone.vocabulary)
    found = measure_pace(backbone, [jobs.lora(0, 4), jobs.dpo(1, 4), jobs.ia3(2)], 256)
    assert found.seconds > 0 and 0 < found.trained <= found.tokens
    assert found.trained % 16 == 0 and found.alone.keys() == {"lora0", "dpo1", "ia3-2"}
    assert found.num_reference > 0
    again = measure_pace(backbone, [replace(jobs, num_read=WARM_UP).dpo(1, 4)], 256)
    assert again.num_reference == 0 and again.seconds_per_token() == pytest.approx(again.seconds / again.tokens)


def test_pace_when_a_job_had_microbatches_to_itself_then_a_token_of_the_others_takes_what_is_left():
    pace = Pace(tokens=100, num_reference=20, trained=90, seconds=11.0, alone={"x": (20, 3.0)}, peak_gb=1.0)
    assert pace.seconds_per_token() == 0.11 and pace.seconds_per_token("x") == 0.1
    assert pace.tokens_per_s == 10.0


def test_regime_when_it_is_unknown_or_needs_a_gpu_then_is_refused():
    bench = MethodBench(find_shape("tiny"), torch.device("cpu"), QUICK)
    assert set(choose_parts([], bench)) <= set(TARGETS)
    with pytest.raises(ConfigError, match="got 'speed'; accepted are mixed_vs_lora"):
        choose_parts(["speed"], bench)
    with pytest.raises(ConfigError, match="memory32_ratio needs a CUDA GPU"):
        choose_parts(["memory32_ratio"], bench)
