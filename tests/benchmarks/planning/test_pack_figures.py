"""The packing bench reports the issue's keys, and its lengths are those of the data sets."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.pipeline.four_jobs import MIXES, queues
from benchmarks.planning.parts import measure_pack


def test_measure_pack_when_small_then_meets_the_targets():
    figures = measure_pack(num_samples=1280)
    assert figures["pack_s_1280"] < 5
    assert 0 <= figures["pack_over_lower_bound"] <= 0.02
    assert figures["pack_proven_share"] >= 0.95
    assert figures["pack_noops"] == 0


@pytest.mark.parametrize(("mix", "mean"), [(0, 526), (1, 947), (2, 1800)])
def test_queues_when_drawn_then_means_are_as_published_and_right_skewed(mix, mean):
    lengths = [n for q in queues(MIXES[mix], 8000, 16) for b in q.batches for n in b.lengths]
    assert np.mean(lengths) == pytest.approx(mean, rel=0.05)
    assert np.median(lengths) < np.mean(lengths)


def test_queues_when_samples_do_not_divide_then_the_last_batch_is_smaller_and_nothing_is_lost():
    made = queues(MIXES[4], 4 * 40, 16)
    assert [[len(b.lengths) for b in q.batches] for q in made] == [[16, 16, 8]] * 4
    assert made == queues(MIXES[4], 4 * 40, 16)
