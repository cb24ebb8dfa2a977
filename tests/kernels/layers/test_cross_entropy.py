"""The cross entropy of rows of logits, whose target is their largest, and the gradient in their place."""

from __future__ import annotations

import pytest
import torch

import weft.kernels.layers.cross_entropy as module
from weft.kernels.layers.cross_entropy import cross_entropy_rows_kernel, cross_entropy_rows_reference

RUNS = [cross_entropy_rows_reference, cross_entropy_rows_kernel]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    # Several blocks to a row of a tiny vocabulary.
    monkeypatch.setattr(module, "BLOCK", 16)


def plain(logits_BV: torch.Tensor, targets_B: torch.Tensor, softcap: float | None) -> torch.Tensor:
    z_BV = logits_BV if softcap is None else softcap * torch.tanh(logits_BV / softcap)
    return torch.nn.functional.cross_entropy(z_BV, targets_B, reduction="none")


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("size", [5, 16, 50])
@pytest.mark.parametrize("run", RUNS)
def test_cross_entropy_rows_when_weighted_then_gives_losses_and_the_gradient(run, size, softcap):
    """Losses are torch's, unweighted; only the last of a sorted row is a hit; the logits become the gradient."""
    logits_BV = (torch.randn(6, size) * 4).sort(dim=1).values
    targets_B = torch.tensor([0, size - 1, 2, 3, 4, size // 2])
    weights_B = torch.tensor([1.0, 0.5, 0.0, 2.0, 0.25, 1.0])
    leaf_BV = logits_BV.double().requires_grad_()
    expected_B = plain(leaf_BV, targets_B, softcap)
    (expected_BV,) = torch.autograd.grad((expected_B * weights_B).sum(), leaf_BV)
    losses_B, hits_B = run(logits_BV, targets_B, weights_B, softcap)
    assert hits_B.tolist() == [0, 1, 0, 0, size == 5, 0]
    torch.testing.assert_close(losses_B.double(), expected_B.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits_BV.double(), expected_BV, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("run", RUNS)
def test_cross_entropy_rows_when_unweighted_then_leaves_the_logits(run):
    """Without weights, as in evaluation, no gradient is made."""
    logits_BV = torch.randn(3, 50)
    before_BV = logits_BV.clone()
    targets_B = torch.tensor([1, 0, int(logits_BV[2].argmax())])
    losses_B, hits_B = run(logits_BV, targets_B, None, None)
    assert hits_B.tolist() == (logits_BV.argmax(dim=1) == targets_B).tolist()
    torch.testing.assert_close(losses_B, plain(before_BV, targets_B, None))
    assert logits_BV.equal(before_BV) and losses_B.dtype == torch.float32


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("run", RUNS)
def test_cross_entropy_rows_when_a_row_is_nan_or_infinite_then_only_that_row_is(run):
    """A NaN anywhere in a row is its own loss and gradient; every other row keeps its bits."""
    logits_BV, targets_B, weights_B = torch.randn(4, 50), torch.tensor([1, 2, 3, 4]), torch.ones(4)
    clean_BV, dirty_BV = logits_BV.clone(), logits_BV.clone()
    dirty_BV[1, 40] = torch.nan
    dirty_BV[2, 20] = torch.inf
    (clean_B, clean_hits_B), (dirty_B, dirty_hits_B) = (
        run(x, targets_B, weights_B, None) for x in (clean_BV, dirty_BV)
    )
    assert dirty_B[1].isnan() and dirty_BV[1].isnan().all() and not dirty_B[2].isfinite()
    assert clean_hits_B[[0, 3]].equal(dirty_hits_B[[0, 3]]) and not dirty_hits_B[[1, 2]].any()
    assert clean_B[[0, 3]].equal(dirty_B[[0, 3]]) and clean_BV[[0, 3]].equal(dirty_BV[[0, 3]])


@pytest.mark.parametrize("run", RUNS)
def test_cross_entropy_rows_when_tokens_are_barred_then_they_weigh_nothing(run):
    """Logits of -inf, even a whole block of them, have no probability and no gradient; huge ones do not overflow."""
    logits_BV = torch.full((2, 50), -torch.inf)
    logits_BV[:, 40:] = torch.randn(2, 10)
    logits_BV[1, 41] = 1e30
    logits_BV[0, 44] = 9.0
    expected_B = plain(logits_BV.double(), torch.tensor([44, 41]), None)
    losses_B, hits_B = run(logits_BV, torch.tensor([44, 41]), torch.ones(2), None)
    assert hits_B.tolist() == [1, 1]
    torch.testing.assert_close(losses_B.double(), expected_B, rtol=1e-5, atol=1e-5)
    assert (logits_BV[:, :40] == 0).all() and logits_BV.isfinite().all()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning", "ignore:All-NaN:RuntimeWarning")
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("run", RUNS)
def test_cross_entropy_rows_when_logits_tie_or_are_no_numbers_then_ties_are_hits_and_nan_rows_are_not(run, softcap):
    """A target as large as the largest is hit wherever that stands; a row whose loss is no number is not."""
    logits_BV = torch.full((9, 50), -7.0)
    targets_B = torch.tensor([3, 40, 3, 40, 3, 3, 3, 49, 3])
    logits_BV[0, [3, 40]] = 2.0  # a tie with a later block
    logits_BV[1, [3, 40]] = 2.0  # and with an earlier one
    logits_BV[2, 3], logits_BV[2, 40] = 2.0, 2.0000002  # the next number there is
    logits_BV[3, 3], logits_BV[3, 40] = 2.0, 2.0000002
    logits_BV[4, 3], logits_BV[4, 40] = 2.0, torch.nan
    logits_BV[5, 3] = torch.nan
    logits_BV[6] = torch.nan
    logits_BV[8, 3] = torch.inf
    losses_B, hits_B = run(logits_BV, targets_B, None, softcap)
    assert hits_B.tolist() == [1, 1, 0, 1, 0, 0, 0, 1, softcap is not None]
    assert losses_B[8].isnan() == (softcap is None)


@pytest.mark.parametrize("run", RUNS)
def test_cross_entropy_rows_when_the_cap_is_reached_then_hits_are_those_of_the_logits(run):
    """Logits far above the cap are one number after it; which was the largest is still known."""
    logits_BV = torch.zeros(2, 50)
    logits_BV[:, 7], logits_BV[:, 44] = 60.0, 70.0
    assert run(logits_BV, torch.tensor([7, 44]), torch.ones(2), 3.0)[1].tolist() == [0, 1]


def test_cross_entropy_rows_kernel_when_fp16_then_rounds_as_its_reference():
    """In half precision kernel and reference agree to the last digit or so; losses stay fp32."""
    logits_BV, targets_B = torch.randn(3, 50).half(), torch.tensor([7, 8, 9])
    both_BV = logits_BV.clone(), logits_BV.clone()
    targets_B[1] = logits_BV[1].argmax()
    results = [run(x, targets_B, torch.full((3,), 0.3), 5.0) for run, x in zip(RUNS, both_BV, strict=True)]
    torch.testing.assert_close(results[1][0], results[0][0])
    assert results[1][1].equal(results[0][1]) and results[0][1][1] == 1
    torch.testing.assert_close(both_BV[1], both_BV[0], rtol=2e-3, atol=1e-6)
