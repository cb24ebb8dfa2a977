"""LoRA dropout whose mask is a pure function of the job's own history.

Whether an input is dropped depends on (job seed, job step, index of the sample in its global batch, token position,
module, feature) and on nothing else: not on neighbours, microbatch cuts or device. It is a counter-based hash of 32-bit
integers, computed alike everywhere. A key per row, made once per microbatch and well mixed, is combined with a key per
feature of the module. The latter is one multiplication, since a GPU computes it again for every tile.
"""

from __future__ import annotations

import zlib
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

MASKS = 2
"""Version of the masks; it changes with them, so that a resumed job can detect it."""
_MASK = 0xFFFFFFFF
_SIGN = -(2**31)
_STRIDE = 0x9E3779B1
_FACTOR = 0xFFD66A5A - 2**32
"""Even, so that one more is odd; as int32."""


def mix(*values: int) -> int:
    state = 0x9E3779B9
    for value in values:
        for word in (value & _MASK, (value >> 32) & _MASK):
            state = (state ^ word) * 0x85EBCA6B & _MASK
            state = (state ^ (state >> 13)) * 0xC2B2AE35 & _MASK
            state ^= state >> 16
    return state


def module_key(name: str) -> int:
    return zlib.crc32(name.encode())


def row_keys(sample_key: int, num_rows: int) -> npt.NDArray[np.int32]:
    with np.errstate(over="ignore"):
        x = np.arange(num_rows, dtype=np.uint32) * np.uint32(_STRIDE) + np.uint32(sample_key & _MASK)
        x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
        x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return (x ^ (x >> np.uint32(16))).view(np.int32)


def module_seed(module: int, first: int = 0) -> int:
    """Seed of a module's feature keys; `first`: index of the first local feature among all of the module."""
    return (mix(module, 0x27D4EB2F) + first * _STRIDE) & _MASK


def keep_mask(row_keys_L: torch.Tensor, module: int, num_features: int, p: float, *, first: int = 0) -> torch.Tensor:
    """Bool [L, num_features]: True where an input is kept, with probability 1 - p. `first`: the first feature's index
    in the module."""
    keys_D = _feature_keys(module, first + num_features, row_keys_L.device)[first:]
    # int32 arithmetic wraps around. The product's upper bits decide, as an unsigned number: with an odd factor of the
    # feature's own, one multiplication is enough.
    bits_LD = (row_keys_L[:, None] ^ keys_D).mul_(keys_D * _FACTOR + 1)
    return bits_LD.bitwise_xor_(_SIGN) >= 2 * int(p * 2**31) + _SIGN


def drop(x_LD: torch.Tensor, keep_LD: torch.Tensor, p: float) -> torch.Tensor:
    """x with dropped inputs at zero and kept ones scaled by 1 / (1 - p); applied to a gradient, it is its own backward.
    Selects instead of multiplying, so that a dropped NaN is dropped."""
    return torch.where(keep_LD, x_LD / (1.0 - p), 0.0)


@lru_cache(maxsize=8192)
def _feature_keys(module: int, num_features: int, device: torch.device) -> torch.Tensor:
    """int32 [num_features]: the keys of a module's features."""
    keys_D = np.arange(num_features, dtype=np.uint32) * np.uint32(_STRIDE) + np.uint32(module_seed(module))
    return torch.from_numpy(keys_D.view(np.int32)).to(device)
