"""How often things are measured, what is measured of them, two works timed in turn, and the account of memory."""

from __future__ import annotations

import gc
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from weft.kernels.device import empty_cache, peak_bytes, reset_peak, synchronise
from weft.kernels.device_event import seconds_of


@dataclass(frozen=True)
class Effort:
    """How often things are repeated."""

    warmups: int = 3
    repeats: int = 5
    batch_sizes: tuple[int, ...] = (4, 8, 16, 32, 64)
    """What `best batch` tries, upward."""
    num_batches: int = 3
    """Batches of different lengths a padding program is timed on."""
    rounds: int = 5
    """Turns that each of two works has where their ratio counts."""
    in_a_row_s: float = 0.0
    """How long steps are repeated for one time: not each of them waits for the one before, as in training."""

    @property
    def times(self) -> dict[str, Any]:
        """As `median_s` takes them."""
        return {"warmups": self.warmups, "repeats": self.repeats, "in_a_row_s": self.in_a_row_s}


@dataclass(frozen=True)
class Measured:
    """What one run did."""

    tokens: int
    """Tokens trained per step; padding does not count."""
    rows: int
    """Rows computed per step, padding included."""
    seconds: float
    """Of one step."""
    peak_gb: float
    detail: str = ""
    """What is worth knowing beside the figures."""
    extra: Mapping[str, float] = field(default_factory=dict)
    """Further figures, by name."""

    @property
    def tokens_per_s(self) -> float:
        """The speed that counts."""
        return self.tokens / self.seconds


THOROUGH = Effort(in_a_row_s=0.5)
QUICK = Effort(warmups=1, repeats=2, batch_sizes=(4, 8, 16), num_batches=1, rounds=2)


def in_turn_s(
    works: Sequence[Callable[[], object]], device: torch.device, *, rounds: int, turn_s: float, warm_up_s: float = 0.0
) -> list[float]:
    """Median seconds of each work, taken in turn; a turn lasts `turn_s`, and the first round does not count.

    For ratios: a GPU at its power limit runs the same work faster after a pause, or after work that drew less. So does
    a work here at the beginning of its turn, which is why it runs for `warm_up_s` before it is timed.
    """
    found: list[list[float]] = [[] for _ in works]
    once = [seconds_of(work, device) for work in works]
    for turn in range(rounds + 1):
        for work, one, seconds in zip(works, once, found, strict=True):
            seconds_of(work, device, math.ceil(warm_up_s / one))
            taken = seconds_of(work, device, max(1, math.ceil(turn_s / one)))
            seconds += [taken] if turn else []
    return [statistics.median(seconds) for seconds in found]


def release(device: torch.device) -> None:
    """Gives back what is no longer referenced, and starts a new account of the peak."""
    gc.collect()
    # The first call of a process makes the GPU ready, without which there is no account.
    synchronise(device)
    empty_cache(device)
    reset_peak(device)


def peak_gb(device: torch.device) -> float:
    """Most memory held by tensors since `release`, in 10⁹ bytes; 0 where memory is not counted."""
    return peak_bytes(device) / 1e9
