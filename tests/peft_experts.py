"""PEFT's order of numbers in adapters on experts, by shapes alone."""

from __future__ import annotations

import torch


def as_peft(path: str, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """A with one expert after the other, (E · R, D), B with one rank after the other, (O, R · E)."""
    a, b = tensors
    if a.ndim == 2:
        return a, b
    return a.reshape(-1, a.shape[-1]), b.permute(1, 2, 0).reshape(b.shape[1], -1)
