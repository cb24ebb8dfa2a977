"""NF4: the published levels, the nearest of them for every weight, and a kernel that undoes it like its reference."""

from __future__ import annotations

import pytest
import torch

from weft.kernels import storage

PUBLISHED = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""The table in the QLoRA paper's appendix, which was computed in single precision."""


def test_levels_when_computed_then_are_the_published_ones():
    assert storage.levels() == pytest.approx(PUBLISHED, abs=3e-7)
    assert list(storage.levels()) == sorted(storage.levels())
    assert (storage.levels()[0], storage.levels()[7], storage.levels()[15]) == (-1.0, 0.0, 1.0)


@pytest.mark.parametrize("shape", [(1, 64), (5, 200), (3, 7), (2, 130)])
def test_quantise_nf4_when_undone_then_every_weight_is_at_the_nearest_level_of_its_block(shape):
    """Compared with all 16 levels one by one, block by block; a row's last block may be short."""
    weight_OD = torch.randn(*shape)
    found_OD = storage.dequantise_nf4(storage.quantise_nf4(weight_OD), torch.float32)
    for row, found in zip(weight_OD, found_OD, strict=True):
        for block, undone in zip(row.split(64), found.split(64), strict=True):
            candidates = torch.tensor(storage.levels()) * block.abs().max()
            nearest = (block[:, None] - candidates).abs().min(dim=1).values
            torch.testing.assert_close((block - undone).abs(), nearest, rtol=1e-5, atol=1e-6)


def test_quantise_nf4_when_there_are_more_rows_than_it_takes_at_once_then_all_are_there(monkeypatch):
    weight_OD = torch.randn(10, 64)
    whole = storage.quantise_nf4(weight_OD)
    monkeypatch.setattr(storage, "_ROWS_AT_ONCE", 4)
    parts = storage.quantise_nf4(weight_OD)
    assert torch.equal(parts.codes, whole.codes) and torch.equal(parts.absmax_OG, whole.absmax_OG)


def test_quantise_nf4_when_stored_then_takes_four_and_a_half_bits_per_weight():
    weight = storage.quantise_nf4(torch.randn(16, 256))
    assert weight.codes.nbytes + weight.absmax_OG.nbytes == 16 * 256 * 4.5 / 8


def test_quantise_nf4_when_a_block_is_zero_then_stays_zero():
    weight_OD = torch.randn(2, 128)
    weight_OD[0, 64:] = 0
    weight = storage.quantise_nf4(weight_OD)
    found_OD = storage.dequantise_nf4(weight, torch.float32)
    assert not found_OD[0, 64:].any() and found_OD[0, :64].any()
    assert (weight.codes[0, 32:] == 0x77).all(), "7 is the code of zero"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(1, 64), (3, 200), (2, 7), (2, 320)])
def test_dequantise_kernel_when_run_then_gives_its_references_bits(shape, dtype, monkeypatch):
    monkeypatch.setattr(storage, "BYTES_BLOCK", 64)
    weight = storage.quantise_nf4(torch.randn(*shape))
    expected_OD = storage.dequantise_nf4_reference(weight, dtype)
    assert expected_OD.shape == shape and expected_OD.dtype == dtype
    assert torch.equal(storage.dequantise_nf4_kernel(weight, dtype), expected_OD)
