"""The losses of preference pairs are those of the papers, and their weights the slopes of these."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from weft.model.objective_loss import Groups
from weft.objectives.preference import Dpo

LENGTHS = torch.tensor([3, 1, 4, 2, 1, 5])


def expected(objective: Dpo, logprobs_N: torch.Tensor, references_N: torch.Tensor) -> torch.Tensor:
    """The loss of each pair, written out sample by sample with torch's own functions."""
    gains = [part.sum() for part in (logprobs_N - references_N).split(LENGTHS.tolist())]
    if objective.loss_type == "ipo":
        gains = [gain / length for gain, length in zip(gains, LENGTHS.tolist(), strict=True)]
    losses = []
    for chosen, rejected in zip(gains[::2], gains[1::2], strict=True):
        logit = objective.beta * (chosen - rejected)
        if objective.loss_type == "ipo":
            losses.append((chosen - rejected - 1 / (2 * objective.beta)) ** 2)
        elif objective.loss_type == "hinge":
            losses.append(F.relu(1 - logit))
        else:
            smooth = objective.label_smoothing
            losses.append(-F.logsigmoid(logit) * (1 - smooth) - F.logsigmoid(-logit) * smooth)
    return torch.stack(losses)


@pytest.mark.parametrize(
    "objective", [Dpo(), Dpo(0.5), Dpo(2.0, label_smoothing=0.2), Dpo(0.3, "hinge"), Dpo(0.1, "ipo")], ids=str
)
def test_loss_when_compared_with_the_formula_then_it_and_its_slopes_are_equal(objective):
    generator = torch.Generator().manual_seed(1)
    logprobs_N, references_N = -torch.rand(2, int(LENGTHS.sum()), generator=generator, dtype=torch.float64) * 4
    logprobs_N.requires_grad_()
    losses_G = expected(objective, logprobs_N, references_N)
    losses_G.sum().backward()
    with torch.no_grad():
        loss = objective.likelihood_loss(Groups(logprobs_N, references_N, LENGTHS, 2))
    torch.testing.assert_close(loss.losses_G, losses_G.detach())
    torch.testing.assert_close(loss.weights_N, -logprobs_N.grad)


def test_metrics_when_the_chosen_answer_gains_more_then_the_pair_is_right():
    logprobs_N = torch.tensor([-1.0, -3.0, -2.0, -2.0])
    references_N = torch.tensor([-2.0, -2.0, -1.0, -3.0])
    loss = Dpo(0.5).likelihood_loss(Groups(logprobs_N, references_N, torch.tensor([1, 1, 1, 1]), 2))
    found = {name: values.tolist() for name, values in loss.metrics.items()}
    assert found == {
        "rewards/chosen": [0.5, -0.5],
        "rewards/rejected": [-0.5, 0.5],
        "rewards/accuracies": [1.0, 0.0],
        "rewards/margins": [1.0, -1.0],
    }


def test_loss_when_margins_are_huge_then_stays_a_number():
    logprobs_N = torch.tensor([0.0, -1e4, -1e4, 0.0])
    loss = Dpo(1.0).likelihood_loss(Groups(logprobs_N, torch.zeros(4), torch.tensor([1, 1, 1, 1]), 2))
    assert loss.losses_G.tolist() == [0.0, 1e4]
    assert torch.isfinite(loss.weights_N).all()
