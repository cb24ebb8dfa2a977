"""Scores add up by name, and a mean divides by what its metric is counted in."""

import math

from weft.objectives.objective import ACCURACY, LOSS, MetricSum, MetricTotals


def test_tally_when_scores_name_different_metrics_then_each_has_its_own_mean():
    tally = MetricTotals()
    tally.add({LOSS: MetricSum(3.0, 2), ACCURACY: MetricSum(1, 2)})
    tally.add({LOSS: MetricSum(4.0, 0.5), ACCURACY: MetricSum(3, 4), "margin": MetricSum(-1.5, 1)})
    tally.add({})
    assert tally.means() == (7.0 / 2.5, 4 / 6, {"margin": -1.5})


def test_tally_when_nothing_was_counted_then_its_means_are_nan_and_its_loss_is_finite():
    means = MetricTotals().means()
    assert math.isnan(means.loss) and math.isnan(means.accuracy) and means.further == {} and MetricTotals().is_finite


def test_tally_when_a_loss_is_not_finite_then_says_so():
    tally = MetricTotals()
    tally.add({LOSS: MetricSum(math.inf, 1)})
    assert not tally.is_finite
