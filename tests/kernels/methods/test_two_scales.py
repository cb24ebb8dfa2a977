"""A shared matrix between scales of rows and of columns, and the gradients of both."""

from __future__ import annotations

import pytest
import torch

from weft.kernels.lora.tables import padded
from weft.kernels.methods.two_scales import scale_kernel, scale_reference, scales_grad_kernel, scales_grad_reference

SHAPES = [(3, 40, 12), (1, 5, 256), (2, 1030, 16)]
"""Modules, outputs and rank; the last takes more than a stretch of rows."""


def vectors(modules: int, num_out: int, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A corner of a larger matrix, and the scales of its rows and columns."""
    torch.manual_seed(4)
    return torch.randn(num_out + 3, rank)[:num_out], torch.randn(modules, num_out), torch.randn(modules, rank)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_scale_when_run_by_the_kernel_then_is_that_of_its_reference(shape, dtype):
    """To the bit in fp32; the interpreter rounds to bf16 in its own way."""
    shared_OR, *scales = vectors(*shape)
    found, expected = (torch.full((*shape[:2], padded(shape[2])), 7.0, dtype=dtype) for _ in range(2))
    scale_kernel(shared_OR, *scales, found)
    scale_reference(shared_OR, *scales, expected)
    torch.testing.assert_close(found, expected, rtol=0 if dtype is torch.float32 else 2**-7, atol=0)
    assert (found[:, :, shape[2] :] == 7).all()


@pytest.mark.parametrize("run", [scales_grad_reference, scales_grad_kernel])
@pytest.mark.parametrize("shape", SHAPES)
def test_scales_grad_when_gradients_have_come_then_is_that_of_the_product_and_leaves_nothing(shape, run):
    shared_OR, rows_MO, columns_MR = vectors(*shape)
    grad_MOR = torch.randn(shape)
    wanted = [scales.double().requires_grad_() for scales in (rows_MO, columns_MR)]
    made_MOR = wanted[0][:, :, None] * shared_OR.double() * wanted[1][:, None]
    expected = torch.autograd.grad(made_MOR, wanted, grad_MOR.double())
    found = run(grad_MOR, shared_OR, rows_MO, columns_MR)
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.double(), other, rtol=1e-4, atol=1e-4)
    assert not grad_MOR.any()
