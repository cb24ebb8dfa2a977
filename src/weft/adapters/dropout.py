"""LoRA dropout whose mask is a pure function of the job's own history.

The mask of one sample on one module depends on (job seed, job step, place of the sample in its global batch, module,
token position, feature) and on nothing else: not on neighbours, microbatch cuts, device or recomputation. It is a
counter-based hash of 32-bit integers, computed alike on any device, so nothing is saved for backward.
"""

from __future__ import annotations

import zlib
from functools import lru_cache

import torch

_MASK = 0xFFFFFFFF


def mix(*values: int) -> int:
    """One well-mixed 32-bit number from several integers."""
    state = 0x9E3779B9
    for value in values:
        for word in (value & _MASK, (value >> 32) & _MASK):
            state = (state ^ word) * 0x85EBCA6B & _MASK
            state = (state ^ (state >> 13)) * 0xC2B2AE35 & _MASK
            state ^= state >> 16
    return state


def module_key(name: str) -> int:
    """A stable number for a module path."""
    return zlib.crc32(name.encode())


def keep_mask(key: int, num_rows: int, num_features: int, p: float, device: torch.device) -> torch.Tensor:
    """Bool [num_rows, num_features]: True where an input is kept, with probability 1 - p."""
    rows = _hash(torch.arange(num_rows, device=device, dtype=torch.int32) * 0x1E3779B1 + _signed(key))
    bits = _hash(rows[:, None] ^ _feature_hash(num_features, device)[None, :])
    return bits.bitwise_and_(0x7FFFFFFF) >= int(p * 2**31)


def drop(x_LD: torch.Tensor, keep_LD: torch.Tensor, p: float) -> torch.Tensor:
    """x with dropped inputs at zero and kept ones scaled by 1 / (1 - p); applied to a gradient, it is its own backward.

    Selects instead of multiplying, so that a dropped NaN is dropped.
    """
    return torch.where(keep_LD, x_LD / (1.0 - p), 0.0)


def _hash(x: torch.Tensor) -> torch.Tensor:
    """The finaliser of a multiplicative hash, in place, on int32 tensors that wrap around."""
    x = x * 0x7FEB352D
    x ^= (x >> 15).bitwise_and_(0x1FFFF)
    x *= 0x2C1B3C6D
    x ^= (x >> 12).bitwise_and_(0xFFFFF)
    return x


def _signed(key: int) -> int:
    """The 32 bits of a key as the int32 with the same bits."""
    key &= _MASK
    return key - 2**32 if key >= 2**31 else key


@lru_cache(maxsize=64)
def _feature_hash(num_features: int, device: torch.device) -> torch.Tensor:
    return _hash(torch.arange(num_features, device=device, dtype=torch.int32) * 0x165667B1 + 0x27D4EB2F)
