"""Lengths of the rows of updated weights."""

from __future__ import annotations

import pytest
import torch

from weft.kernels.methods.row_norms import NormedRows, RowNorms

SHAPES = ((70, 130, 8), (33, 24, 16), (5, 300, 8))
"""Outputs, inputs and padded rank of each module."""


@pytest.mark.parametrize("scale", [1, 9], ids=["narrow", "wide"])
@pytest.mark.parametrize("run", [RowNorms.measure_plainly, RowNorms.launch])
def test_row_norms_when_modules_differ_then_measures_every_row(run, scale):
    """Modules of any shape in one launch."""
    torch.manual_seed(4)
    modules = [
        NormedRows(torch.randn(o, d), torch.randn(scale * p, d), torch.randn(o, scale * p), torch.zeros(o))
        for o, d, p in SHAPES
    ]
    run(RowNorms(modules))
    for module in modules:
        expected = (module.weight_OD.double() + module.b_OP.double() @ module.a_PD.double()).norm(dim=1)
        torch.testing.assert_close(module.norms_O.double(), expected, rtol=1e-5, atol=1e-5)
