"""Rows in 8-bit floats: the kernels do what their references do, rounding stays small, and rows never meet."""

from __future__ import annotations

import pytest
import torch

from weft.kernels import storage

SHAPES = [(1, 5), (7, 64), (5, 300)]


def rows_of_many_sizes(num_rows: int, num_columns: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random rows from tiny to large; one of zeros if there are several."""
    x_TK = torch.randn(num_rows, num_columns) * torch.logspace(-1, 2, num_rows)[:, None]
    if num_rows > 1:
        x_TK[1] = 0
    return x_TK.to(dtype)


def comparable(x_TK: torch.Tensor, columns_K: torch.Tensor | None, expected_TK: torch.Tensor) -> torch.Tensor:
    """Where the interpreter's cast is right: it drops the carry of a number that rounds up to a power of two, and does
    not round numbers below the normal range."""
    exact = x_TK.float() if columns_K is None else x_TK.float() * columns_K
    exact = exact * (storage.LARGEST / exact.abs().amax(dim=1).clamp(min=storage.TINIEST))[:, None]
    mantissa, _ = torch.frexp(expected_TK.float())
    carried = (mantissa.abs() == 0.5) & (expected_TK.float().abs() > exact.abs())
    return ~carried & ((exact.abs() >= 2**-6) | (exact == 0))


@pytest.mark.parametrize("row_block", [64, storage.ROW_BLOCK], ids=["read twice", "held"])
@pytest.mark.parametrize("has_columns", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("num_rows", "num_columns"), SHAPES)
def test_quantise_rows_kernel_when_run_then_gives_its_references_numbers(
    num_rows, num_columns, dtype, has_columns, row_block, monkeypatch
):
    """Equal numbers and scales for rows shorter and longer than a block, with and without column factors."""
    monkeypatch.setattr(storage, "ROW_BLOCK", row_block)
    x_TK = rows_of_many_sizes(num_rows, num_columns, dtype)
    columns_K = torch.rand(num_columns) + 0.1 if has_columns else None
    q_TK, scale_T = storage.quantise_rows_kernel(x_TK, columns_K)
    expected_TK, expected_T = storage.quantise_rows_reference(x_TK, columns_K)
    assert torch.equal(scale_T, expected_T)
    sure = comparable(x_TK, columns_K, expected_TK)
    assert sure.float().mean() > 0.8
    assert torch.equal(q_TK.float()[sure], expected_TK.float()[sure])


def test_quantise_rows_kernel_when_rows_are_part_of_wider_ones_then_reads_only_its_columns():
    wide_TK = torch.randn(4, 96)
    q_TK, scale_T = storage.quantise_rows_kernel(wide_TK[:, 32:64])
    expected_TK, expected_T = storage.quantise_rows_kernel(wide_TK[:, 32:64].contiguous())
    assert torch.equal(q_TK.float(), expected_TK.float()) and torch.equal(scale_T, expected_T)


def test_quantise_rows_when_given_a_cpu_tensor_then_is_within_a_sixteenth_of_each_number():
    """Half of the last of three bits, and for numbers far below the row's largest half of the smallest step."""
    x_TK = rows_of_many_sizes(6, 512)
    q_TK, scale_T = storage.quantise_rows(x_TK)
    error_TK = (q_TK.float() * scale_T[:, None] - x_TK).abs()
    assert (error_TK <= x_TK.abs() / 16 + scale_T[:, None] * 2**-10).all()
    assert (q_TK.float().abs().amax(dim=1)[2:] == storage.LARGEST).all()


def test_quantise_rows_when_columns_have_factors_then_rounds_the_products():
    x_TK, columns_K = torch.randn(3, 40), torch.logspace(-3, 3, 40)
    q_TK, scale_T = storage.quantise_rows(x_TK, columns_K)
    expected_TK, expected_T = storage.quantise_rows(x_TK * columns_K)
    assert torch.equal(q_TK.float(), expected_TK.float()) and torch.equal(scale_T, expected_T)


@pytest.mark.parametrize("size", [1e-20, 1e-8, 1e30])
def test_quantise_rows_when_a_row_is_tiny_or_huge_then_keeps_its_numbers(size):
    """Gradients of a token may be far below 1e-8; they must not become zero."""
    x_TK = torch.randn(2, 64) * size
    q_TK, scale_T = storage.quantise_rows(x_TK)
    x_TK, found_TK = x_TK.double(), q_TK.double() * scale_T[:, None]
    assert (found_TK - x_TK).norm() < 0.04 * x_TK.norm()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("quantise", [storage.quantise_rows_reference, storage.quantise_rows_kernel])
def test_quantise_rows_when_a_row_is_bad_then_only_its_own_product_is(bad, quantise):
    x_TK = torch.randn(4, 64)
    healthy_TK, healthy_T = quantise(x_TK)
    x_TK[2, 3] = bad
    q_TK, scale_T = quantise(x_TK)
    others = [0, 1, 3]
    assert torch.equal(q_TK.float()[others], healthy_TK.float()[others])
    assert torch.equal(scale_T[others], healthy_T[others])
    product_T = (q_TK.float() * scale_T[:, None]).sum(dim=1)
    assert not scale_T[2].isfinite()
    assert not product_T[2].isfinite() and product_T[others].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("stored", [storage.FP8, torch.int8])
@pytest.mark.parametrize(("num_rows", "num_columns"), SHAPES)
def test_dequantise_kernel_when_run_then_gives_its_references_bits(num_rows, num_columns, stored, dtype, monkeypatch):
    monkeypatch.setattr(storage, "COPY_BLOCK", 128)
    q_NK = (torch.randn(num_rows, num_columns) * 40).clamp(-127, 127).to(stored)
    scale_N = torch.rand(num_rows)
    expected_NK = storage.dequantise_reference(q_NK, scale_N, dtype)
    assert expected_NK.dtype == dtype and expected_NK.any()
    assert torch.equal(storage.dequantise_kernel(q_NK, scale_N, dtype), expected_NK)


def test_has_fp8_when_the_device_is_a_cpu_then_false():
    assert not storage.has_fp8(torch.device("cpu"))
