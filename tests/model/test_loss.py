"""The blocked loss, its hits and its hand-made gradient are those of torch, and no row depends on the others."""

import pytest
import torch
import torch.nn.functional as F
from covering import each_value

from weft.model.loss import BLOCK, BlockedLoss, Head

D, V = 128, 83
HEADS = {"plain": (False, None), "bias": (True, None), "cap": (False, 2.5), "bias and cap": (True, 1.5)}


def head(kind: str, dtype: torch.dtype = torch.float64) -> Head:
    generator = torch.Generator().manual_seed(1)
    with_bias, softcap = HEADS[kind]
    bias_V = torch.randn(V, generator=generator, dtype=torch.float64).to(dtype) if with_bias else None
    return Head(torch.randn(V, D, generator=generator, dtype=torch.float64).to(dtype), bias_V, softcap)


def rows(number: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    hidden_ND = torch.randn(number, D, generator=generator, dtype=torch.float64).to(dtype)
    targets_N = torch.randint(0, V, (number,), generator=generator)
    return hidden_ND, targets_N, torch.rand(number, generator=generator) + 0.1


def reference(hidden_ND: torch.Tensor, targets_N: torch.Tensor, weights_N: torch.Tensor, head: Head):
    """Losses and gradient by autograd in double precision."""
    hidden_ND = hidden_ND.double().requires_grad_()
    logits_NV = F.linear(hidden_ND, head.weight_VD.double(), None if head.bias_V is None else head.bias_V.double())
    if head.softcap is not None:
        logits_NV = torch.tanh(logits_NV / head.softcap) * head.softcap
    losses_N = F.cross_entropy(logits_NV, targets_N, reduction="none")
    (losses_N * weights_N).sum().backward()
    return losses_N.detach(), hidden_ND.grad


@pytest.mark.parametrize(
    ("kind", "number"), each_value(list(HEADS), [1, 5, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7])
)
def test_loss_and_gradient_when_any_head_then_those_of_autograd(kind, number):
    hidden_ND, targets_N, weights_N = rows(number, torch.float32)
    single = head(kind, torch.float32)
    (losses_N, _), grad_ND = BlockedLoss(single)(hidden_ND, targets_N, weights_N)
    expected_N, expected_ND = reference(hidden_ND, targets_N, weights_N, single)
    torch.testing.assert_close(losses_N.double(), expected_N, rtol=5e-6, atol=5e-6)
    torch.testing.assert_close(grad_ND.double(), expected_ND, rtol=1e-5, atol=5e-5)


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("number", [1, BLOCK, 3 * BLOCK + 7])
def test_hits_when_every_other_target_is_the_largest_then_those_rows_are_hit(kind, number):
    """Before the cap, which takes many of these logits to the same number."""
    hidden_ND, targets_N, weights_N = rows(number, torch.float32)
    single = head(kind, torch.float32)
    bias_V = 0 if single.bias_V is None else single.bias_V.double()
    largest_N = (hidden_ND.double() @ single.weight_VD.double().t() + bias_V).argmax(dim=1)
    targets_N[::2] = largest_N[::2]
    (_, hits_N), _ = BlockedLoss(single)(hidden_ND, targets_N, weights_N)
    assert hits_N.tolist() == (targets_N == largest_N).tolist()


def test_hits_when_the_loss_is_no_number_then_none():
    """An infinite logit is the largest, but its row has no result."""
    hidden_ND, targets_N, weights_N = rows(4, torch.float32)
    wild = head("bias", torch.float32)
    wild.bias_V[5] = torch.inf
    targets_N[:3] = 5
    (losses_N, hits_N), _ = BlockedLoss(wild)(hidden_ND, targets_N, weights_N)
    assert losses_N[:3].isnan().all() and not hits_N.any()


@pytest.mark.parametrize("kind", HEADS)
def test_loss_when_no_weights_then_the_same_bits_without_a_gradient(kind):
    hidden_ND, targets_N, weights_N = rows(150, torch.float32)
    single = head(kind, torch.float32)
    results_2N, grad_ND = BlockedLoss(single)(hidden_ND, targets_N)
    assert grad_ND is None
    assert torch.equal(results_2N, BlockedLoss(single)(hidden_ND, targets_N, weights_N)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("number", [1, 5, 40])
def test_row_when_others_come_before_and_after_then_the_same_bits(kind, dtype, number):
    """Wherever a row falls among the blocks, and however few there are, its loss, hit and gradient stay."""
    hidden_ND, targets_N, weights_N = rows(number, dtype)
    small = head(kind, dtype)
    targets_N[::2] = small.linear(hidden_ND[::2]).argmax(dim=1)
    results_2N, grad_ND = BlockedLoss(small)(hidden_ND, targets_N, weights_N)
    for before, after in ((1, 0), (100, 0), (0, 200), (BLOCK + 3, 17)):
        more = [rows(n, dtype) for n in (before, after)] if after else [rows(before, dtype)]
        parts = [more[0], (hidden_ND, targets_N, weights_N), *more[1:]]
        together = BlockedLoss(small)(*(torch.cat(column) for column in zip(*parts, strict=True)))
        assert torch.equal(together[0][:, before : before + number], results_2N)
        assert torch.equal(together[1][before : before + number], grad_ND)


@pytest.mark.parametrize("kind", HEADS)
def test_row_when_another_is_nan_then_the_same_bits(kind):
    hidden_ND, targets_N, weights_N = rows(20, torch.float32)
    small = head(kind, torch.float32)
    targets_N[:] = small.linear(hidden_ND).argmax(dim=1)
    results_2N, grad_ND = BlockedLoss(small)(hidden_ND, targets_N, weights_N)
    spoiled_ND = hidden_ND.clone()
    spoiled_ND[7] = float("nan")
    others = [i for i in range(20) if i != 7]
    spoiled = BlockedLoss(small)(spoiled_ND, targets_N, weights_N)
    assert torch.equal(spoiled[0][:, others], results_2N[:, others]) and results_2N[1].all()
    assert torch.equal(spoiled[1][others], grad_ND[others])
    assert spoiled[0][0, 7].isnan() and spoiled[0][1, 7] == 0 and spoiled[1][7].isnan().all()


def test_loss_when_logits_are_huge_then_finite():
    hidden_ND, targets_N, weights_N = rows(3, torch.float32)
    results_2N, grad_ND = BlockedLoss(head("plain", torch.float32))(hidden_ND * 1e4, targets_N, weights_N)
    assert results_2N.isfinite().all() and grad_ND.isfinite().all()
