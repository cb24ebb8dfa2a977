"""`weft bench methods` compares jobs whose steps have the same rows, and refuses what it does not know."""

from __future__ import annotations

import pytest
import torch
from tiny_models import random_backbone

from weft.bench.clock import QUICK
from weft.bench.methods.jobs import MethodJobs
from weft.bench.methods.pace import WARM_UP, measure_pace
from weft.bench.methods.parts import TARGETS, MethodBench, choose_parts
from weft.bench.shapes import find_shape
from weft.data.order import BatchSchedule
from weft.errors import ConfigError


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
    jobs = MethodJobs(rows=64, length=16, num_steps=WARM_UP + 2, vocabulary=backbone.vocabulary)
    found = measure_pace(backbone, [jobs.lora(0, 4), jobs.dpo(1, 4), jobs.ia3(2)], 256)
    assert found.seconds > 0 and 0 < found.trained <= found.tokens
    assert found.trained % 16 == 0 and found.alone_s.keys() == {"lora0", "dpo1", "ia3-2"}


def test_regime_when_it_is_unknown_or_needs_a_gpu_then_is_refused():
    bench = MethodBench(find_shape("tiny"), torch.device("cpu"), QUICK)
    assert set(choose_parts([], bench)) <= set(TARGETS)
    with pytest.raises(ConfigError, match="got 'speed'; accepted are mixed_vs_lora"):
        choose_parts(["speed"], bench)
    with pytest.raises(ConfigError, match="memory32_ratio needs a CUDA GPU"):
        choose_parts(["memory32_ratio"], bench)
