"""What stages take is learnt from passes, adapters apart from the backbone."""

from __future__ import annotations

import random

import pytest

from weft.plan.cost.fit import MicrobatchLoad
from weft.plan.cost.learned import FEWEST, StagePace
from weft.plan.cost.types import LinearCost

RANKS = {"a": 8, "b": 16, "c": 8}
TABLE = LinearCost(send_s=0.5, optimizer_s=9.0, token_bytes=7)


def noted(num_passes: int, job_s: float) -> StagePace:
    """Passes of two stages that take 3 ms, 0.1 ms a row and so much a job; backward twice that."""
    rng, pace = random.Random(0), StagePace(row_tile=16)
    for _ in range(num_passes):
        jobs = [(RANKS[name], [rng.randint(5, 40)] * 2) for name in rng.sample(sorted(RANKS), rng.randint(1, 3))]
        load = MicrobatchLoad.of(jobs, 0, 16)
        for stage in range(2):
            seconds = (3e-3 + 1e-4 * load.rows + job_s * load.jobs) * (stage + 1)
            pace.note_pass("forward", stage, load, seconds)
            pace.note_pass("backward", stage, load, 2 * seconds)
            pace.note_step(stage, 0.25)
    return pace


def test_learned_cost_when_jobs_differ_between_microbatches_then_separates_adapters_from_the_backbone():
    """The mean over both passes of both stages is 2.25 times a forward on the first."""
    learned = noted(60, job_s=2e-3).learn(2, TABLE, RANKS)
    assert learned is not None
    cost, adapters = learned
    assert adapters.job_s == pytest.approx(2.25 * 2e-3, rel=0.05)
    assert cost.forward_s([30, 30], 0) == pytest.approx(3e-3 + 64e-4, rel=0.05)
    assert cost.backward_s([30, 30], 1) == pytest.approx(4 * (3e-3 + 64e-4), rel=0.05)
    assert cost.step_s(1) == 0.25 and cost.transfer_s(4) == 2.0 and cost.held_bytes([3], 0) == 21
    assert cost.forward_s([], 0) == 0.0


def test_adapters_when_they_take_no_time_then_are_learnt_to_take_none():
    learned = noted(60, job_s=0.0).learn(2, TABLE, RANKS)
    assert learned is not None and learned[1].microbatch_s({"a": 50, "b": 9}) < 1e-5


def test_pace_when_too_little_was_seen_then_concludes_nothing():
    assert noted(FEWEST - 1, job_s=1e-3).learn(2, TABLE, RANKS) is None
    assert noted(FEWEST, job_s=1e-3).learn(3, TABLE, RANKS) is None
