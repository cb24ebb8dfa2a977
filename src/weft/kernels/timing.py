"""Seconds of work where it runs: device events on a GPU, the host's clock elsewhere; medians after a warm-up."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

import torch

from weft.kernels.device import Stream, beside, is_gpu, record, synchronise
from weft.kernels.device_event import DeviceEvent


def median_s(
    work: Callable[[], object], device: torch.device, *, warmups: int, repeats: int, in_a_row_s: float = 0.0
) -> float:
    """Median seconds of `work`; each time it is done over and over for `in_a_row_s`, as training does its steps."""
    for _ in range(warmups):
        work()
    number = max(1, math.ceil(in_a_row_s / seconds_of(work, device))) if in_a_row_s else 1
    return statistics.median(seconds_of(work, device, number) for _ in range(repeats))


def replayable(work: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """The work as a captured CUDA graph where there is one: the host's part does not count."""
    if not is_gpu(device):
        return work
    with beside(device, Stream(device)):
        work()
    with record() as graph:
        work()
    return graph.replay


def seconds_of(work: Callable[[], object], device: torch.device, number: int = 1) -> float:
    """Seconds of one work among so many that follow each other."""
    synchronise(device)
    begun = DeviceEvent(device)
    for _ in range(number):
        work()
    ended = DeviceEvent(device)
    synchronise(device)
    return ended.seconds_since(begun) / max(1, number)
