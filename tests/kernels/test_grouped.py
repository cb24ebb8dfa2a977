"""Products by group: a row's result depends on that row alone, and gradients are sums over one group's rows."""

from __future__ import annotations

import pytest
import torch

from weft.kernels import grouped
from weft.kernels.grouped import add_grouped_gradient, grouped_product


def ends_of(*counts: int) -> torch.Tensor:
    return torch.tensor(counts).cumsum(0).int()


@pytest.fixture
def case():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(70, 24, generator=generator), torch.randn(4, 24, 40, generator=generator)


def test_product_when_groups_are_uneven_then_each_row_has_its_groups_weight(case):
    x_SK, w_GKN = case
    y_SN = grouped_product(x_SK, w_GKN, ends_of(33, 0, 1, 36))
    expected = torch.cat([x_SK[:33] @ w_GKN[0], x_SK[33:34] @ w_GKN[2], x_SK[34:] @ w_GKN[3]])
    torch.testing.assert_close(y_SN, expected)


@pytest.mark.parametrize("num_rows", [1, 7, 32, 33, 70])
def test_product_when_rows_have_other_neighbours_then_keep_their_bits(case, num_rows):
    x_SK, w_GKN = case
    whole = grouped_product(x_SK, w_GKN[:1], ends_of(70))
    spoiled = x_SK.clone()
    spoiled[num_rows:] = float("nan")
    assert torch.equal(grouped_product(spoiled, w_GKN[:1], ends_of(70))[:num_rows], whole[:num_rows])
    assert torch.equal(grouped_product(x_SK[:num_rows], w_GKN[:1], ends_of(num_rows)), whole[:num_rows])
    moved = grouped_product(x_SK.roll(5, 0), w_GKN[:1], ends_of(70))
    assert torch.equal(moved.roll(-5, 0), whole)


def test_product_when_groups_have_any_number_of_rows_then_multiplies_blocks_of_one_size(case, monkeypatch):
    """The bits of a product depend on how many rows it has, where the machine's library chooses by that."""
    seen: set[int] = set()
    mm = torch.Tensor.mm
    monkeypatch.setattr(torch.Tensor, "mm", lambda x, w: seen.add(len(x)) or mm(x, w))
    grouped_product(*case, ends_of(33, 0, 1, 36))
    assert seen == {grouped.BLOCK}


def test_gradient_when_added_then_each_group_has_the_sum_over_its_rows(case):
    left_SM, right_SN = case[0], torch.randn(70, 16)
    grad_GMN = torch.ones(4, 24, 16)
    add_grouped_gradient(grad_GMN, left_SM, right_SN, ends_of(33, 0, 1, 36), 0.5)
    torch.testing.assert_close(grad_GMN[3], 1 + 0.5 * left_SM[34:].t() @ right_SN[34:])
    assert torch.equal(grad_GMN[1], torch.ones(24, 16))


def test_gradient_when_factors_are_padded_then_only_its_own_columns_count(case):
    grad_GMN = torch.zeros(1, 20, 10)
    add_grouped_gradient(grad_GMN, case[0], torch.randn(70, 16), ends_of(70), 1.0)
    assert grad_GMN.abs().min() > 0


@pytest.mark.parametrize("counts", [(33, 0, 1, 36), (0, 70, 0, 0), (10, 20, 30, 10)])
def test_product_when_torch_has_one_for_groups_then_both_agree(case, monkeypatch, counts):
    """The way of a GPU, by torch's own implementation for a CPU."""
    x_SK, w_GKN = (x.bfloat16() for x in case)
    right_SN = torch.randn(70, 16).bfloat16()
    blocks = grouped_product(x_SK, w_GKN, ends_of(*counts))
    sums, found = torch.zeros(4, 24, 16), torch.zeros(4, 24, 16)
    add_grouped_gradient(sums, x_SK, right_SN, ends_of(*counts), 0.5)
    monkeypatch.setattr(grouped, "_has_grouped_kernel", lambda *_: True)
    torch.testing.assert_close(grouped_product(x_SK, w_GKN, ends_of(*counts)), blocks, rtol=0.02, atol=0.02)
    add_grouped_gradient(found, x_SK, right_SN, ends_of(*counts), 0.5)
    torch.testing.assert_close(found, sums, rtol=0.02, atol=0.05)
    assert all(bool(found[i].any()) == bool(count) for i, count in enumerate(counts))


def test_check_when_products_are_right_or_wrong_then_reports_it(monkeypatch):
    check = grouped._keeps_bits.__wrapped__
    assert check(24, 40, torch.float32, torch.device("cpu"))
    product = grouped.F.grouped_mm
    # Rows beyond the 40th would have other bits, as a kernel that splits K by the number of rows gives.
    monkeypatch.setattr(grouped.F, "grouped_mm", lambda x, w, offs: product(x, w, offs=offs) * (1 + 1e-7 * len(x)))
    assert not check(24, 40, torch.float32, torch.device("cpu"))
