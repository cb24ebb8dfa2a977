"""A forecast over replicas: one device's where there is nothing to share, and what sharing gains."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_forecast import SHAPE, cost, outline

from weft.plan.check import violations
from weft.plan.cost.divided import ShardCost
from weft.plan.pack import pack
from weft.plan.simulate.forecast import forecast
from weft.plan.simulate.layout_forecast import forecast_replicas
from weft.plan.types import Limits

JOBS = [outline("a", 4, (300, 400)), outline("b", 4, (300, 400))]
FREE = [replace(JOBS[0], is_any_order=True)]


def test_forecast_when_each_replica_has_a_job_then_takes_as_long_as_one_job_alone():
    found, alone = forecast_replicas(JOBS, 1000, [cost()] * 2), forecast(JOBS[:1], 1000, cost(), pack)
    assert found.planned_s == pytest.approx(alone.planned_s, rel=0.02)
    assert (found.num_stages, found.num_devices, found.stage_names) == (2, 2, ["replica 0", "replica 1"])
    assert found.planned_tokens == 2 * alone.planned_tokens and found.keeps_order
    assert found.stage_bytes == alone.stage_bytes * 2 and found.largest_capacity == alone.largest_capacity
    assert found.groups == (("a",), ("b",))


def test_forecast_when_a_job_is_free_then_replicas_share_its_samples():
    found, alone = forecast_replicas(FREE, 1000, [cost()] * 2), forecast(FREE, 1000, cost(), pack)
    ordered = forecast_replicas(JOBS[:1], 1000, [cost()] * 2)
    assert found.num_microbatches == 2 * ordered.num_microbatches and not found.keeps_order
    assert found.planned_s < ordered.planned_s and ordered.planned_s == pytest.approx(alone.planned_s, rel=0.02)


def test_forecast_when_replicas_are_unlike_then_every_stage_has_its_own_memory():
    found = forecast_replicas(JOBS, 1000, [cost(), cost(2)])
    assert found.stage_names == ["replica 0", "replica 1, stage 0", "replica 1, stage 1"]
    assert found.stage_layers == (4, 2, 2) and found.stage_bytes[1] < found.stage_bytes[0]


def test_forecast_when_weights_are_shared_then_slow_links_show():
    """A device that waits for its layers is as slow as they come; its memory lacks the slices of others."""
    fast, slow = (replace(cost(), hardware=replace(cost().hardware, link_rate=rate)) for rate in (1e15, 1e3))
    whole, quick = forecast_replicas(JOBS, 1000, [fast] * 2), forecast_replicas(JOBS, 1000, [fast] * 2, shards=(2,))
    assert quick.planned_s == pytest.approx(whole.planned_s, rel=0.05)
    assert quick.stage_names == ["shard 0", "shard 1"] and quick.program.shards == (2,)
    queues = [replace(job.queue, home=home) for home, job in zip((0, 1), JOBS, strict=True)]
    assert violations(quick.program, queues, Limits(1000)) == []
    # Of four layers, four devices have one each, and two that are gathered.
    quarter = forecast_replicas(JOBS, 1000, [fast] * 4, shards=(4,))
    assert max(whole.stage_bytes) - max(quarter.stage_bytes) == 2 * SHAPE.layer_weights
    waits = forecast_replicas(JOBS, 1000, [slow] * 2, shards=(2,))
    num_rounds = waits.num_microbatches / 2
    assert waits.planned_s == pytest.approx(2 * num_rounds * ShardCost(slow, 2).gather_s(), rel=0.01)
