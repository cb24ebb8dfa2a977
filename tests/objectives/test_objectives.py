"""What every objective keeps to, so that data, planner, backbone and engine can treat them alike."""

from __future__ import annotations

import math

import pytest
import torch

from weft.data.formats import convert_rows
from weft.data.row import Row
from weft.model.objective_loss import Groups, num_scored
from weft.objectives.heads import Classification, HeadObjective
from weft.objectives.objective import ACCURACY, LOSS, LikelihoodObjective, MetricSum, MetricTotals, Objective
from weft.objectives.registry import OBJECTIVES, SUPERVISED, choose_objective
from weft.spec.job import OBJECTIVES as NAMES


def is_named(objective: Objective) -> bool:
    """Whether only jobs that name it have it."""
    return type(objective).claims is Objective.claims


def test_registry_when_read_then_every_objective_is_a_choice_by_its_name():
    assert NAMES[0] == "auto" and sorted(NAMES[1:]) == sorted(OBJECTIVES)
    assert all(objective.name == name for name, objective in OBJECTIVES.items())


@pytest.mark.parametrize("name", OBJECTIVES)
def test_row_when_an_objective_reads_it_then_becomes_its_group_of_rows_that_formats_read(name):
    objective, row = OBJECTIVES[name], dict(OBJECTIVES[name].example)
    before = dict(row)
    if isinstance(objective, Classification):
        objective = type(objective)(("yes", "no"))
    assert objective.claims(row) or is_named(objective), "these are only for jobs that name them"
    parts = objective.parts(row, "rows.jsonl line 1")
    assert len(parts) == objective.group_size and row == before
    assert all(part.weight >= 0 for part in parts)
    rows = [Row(part.values, "rows.jsonl line 1") for part in parts]
    _, forms = convert_rows(rows, objective.part_format or "auto")
    assert len(forms) == objective.group_size


@pytest.mark.parametrize("name", OBJECTIVES)
def test_divisor_when_samples_are_there_then_is_positive_and_their_order_does_not_matter(name):
    objective = OBJECTIVES[name]
    weights = [3.0, 1.0, 2.5, 7.0, 0.5, 4.0]
    assert objective.divisor(weights) == objective.divisor(weights[::-1]) > 0


@pytest.mark.parametrize("name", [name for name, o in OBJECTIVES.items() if isinstance(o, LikelihoodObjective)])
def test_scored_weights_when_compared_with_autograd_then_are_the_slope_of_the_loss(name):
    objective = OBJECTIVES[name]
    assert isinstance(objective, LikelihoodObjective)
    generator = torch.Generator().manual_seed(0)
    size = num_scored(objective)
    lengths_S = torch.tensor([3, 1, 4, 2][: 2 * size])
    logprobs_N, references_N = -torch.rand(2, int(lengths_S.sum()), generator=generator) * 5
    logprobs_N.requires_grad_()
    read = references_N if objective.reads_reference else None
    labels_GM = torch.tensor([1.0, 0.0])[:, None].expand(2, size) if objective.reads_labels else None
    loss = objective.likelihood_loss(Groups(logprobs_N, read, lengths_S, size, labels_GM))
    loss.losses_G.sum().backward()
    assert loss.losses_G.shape == (2,) and all(values.shape == (2,) for values in loss.metrics.values())
    torch.testing.assert_close(loss.weights_N.detach(), -logprobs_N.grad)


@pytest.mark.parametrize("name", [name for name, o in OBJECTIVES.items() if isinstance(o, HeadObjective)])
def test_slopes_of_logits_when_compared_with_autograd_then_are_those_of_the_loss(name):
    objective = OBJECTIVES[name]
    assert isinstance(objective, HeadObjective)
    generator = torch.Generator().manual_seed(0)
    logits_NL = torch.randn(4, objective.num_labels or 3, generator=generator, requires_grad=True)
    loss = objective.head_loss(logits_NL, torch.tensor([0.0, 0.0, 1.0, 1.0]))
    loss.losses_U.sum().backward()
    torch.testing.assert_close(loss.slopes_NL.detach(), logits_NL.grad)
    assert len(loss.losses_U) == len(loss.measured_UK) == 4 // objective.group_size
    score = objective.score(0.0, 0.5, loss.measured_UK[0].tolist())
    assert score["loss"] == (0.5, 1) and len(score) > 1


def test_choice_when_no_objective_is_named_then_any_row_may_decide_it():
    plain, paired = OBJECTIVES["supervised"].example, OBJECTIVES["dpo"].example
    assert choose_objective("auto", [plain, plain]) is SUPERVISED
    assert choose_objective("auto", [plain, paired]) is OBJECTIVES["dpo"]
    assert choose_objective("supervised", [paired]) is SUPERVISED


def test_tally_when_scores_name_different_metrics_then_each_has_its_own_mean():
    tally = MetricTotals()
    tally.add({LOSS: MetricSum(3.0, 2), ACCURACY: MetricSum(1, 2)})
    tally.add({LOSS: MetricSum(4.0, 0.5), ACCURACY: MetricSum(3, 4), "margin": MetricSum(-1.5, 1)})
    tally.add({})
    assert tally.means() == (7.0 / 2.5, 4 / 6, {"margin": -1.5})


def test_tally_when_nothing_was_counted_then_its_means_are_nan_and_its_loss_is_finite():
    means = MetricTotals().means()
    assert math.isnan(means.loss) and math.isnan(means.accuracy) and means.further == {} and MetricTotals().is_finite


def test_tally_when_a_loss_is_not_finite_then_reports_it():
    tally = MetricTotals()
    tally.add({LOSS: MetricSum(math.inf, 1)})
    assert not tally.is_finite
