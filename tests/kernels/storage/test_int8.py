"""Weights in 8-bit whole numbers are within half a step of what they were."""

from __future__ import annotations

import torch

from weft.kernels import storage
from weft.kernels.storage import dequantise


def test_quantise_int8_when_undone_then_every_weight_is_within_half_a_step():
    weight_OD = torch.randn(6, 50) * torch.logspace(-3, 2, 6)[:, None]
    q_OD, scale_O = storage.quantise_int8(weight_OD)
    found_OD = dequantise(q_OD, scale_O, torch.float32)
    assert ((found_OD - weight_OD).abs() <= scale_O[:, None] * 0.5001).all()
    assert q_OD.dtype == torch.int8 and (q_OD.abs().amax(dim=1) == 127).all()


def test_quantise_int8_when_a_row_is_zero_then_stays_zero():
    weight_OD = torch.randn(3, 20)
    weight_OD[1] = 0
    q_OD, scale_O = storage.quantise_int8(weight_OD)
    assert not dequantise(q_OD, scale_O, torch.float32)[1].any()
    assert scale_O.isfinite().all()


def test_quantise_int8_when_there_are_more_rows_than_it_takes_at_once_then_all_are_there(monkeypatch):
    weight_OD = torch.randn(10, 20)
    q_OD, scale_O = storage.quantise_int8(weight_OD)
    monkeypatch.setattr(storage, "_ROWS_AT_ONCE", 4)
    parts_OD, parts_O = storage.quantise_int8(weight_OD)
    assert torch.equal(parts_OD, q_OD) and torch.equal(parts_O, scale_O)
