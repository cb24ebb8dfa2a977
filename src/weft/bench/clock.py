"""Times work where it runs: device events on a GPU, the host's clock elsewhere; medians after a warm-up."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Effort:
    """How often things are repeated."""

    warmups: int = 3
    repeats: int = 5
    batch_sizes: tuple[int, ...] = (4, 8, 16, 32, 64)
    """What `best batch` tries, upward."""
    num_batches: int = 3
    """Batches of different lengths a padding program is timed on."""


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


THOROUGH = Effort()
QUICK = Effort(warmups=1, repeats=2, batch_sizes=(4, 8, 16), num_batches=1)


def median_s(work: Callable[[], object], device: torch.device, *, warmups: int, repeats: int) -> float:
    """Median seconds of `work`."""
    for _ in range(warmups):
        work()
    return statistics.median(_once(work, device) for _ in range(repeats))


def replayed_s(work: Callable[[], object], device: torch.device, *, warmups: int, repeats: int) -> float:
    """Median seconds of the work, replayed from a CUDA graph where there is one: the host's part does not count."""
    if device.type != "cuda":
        return median_s(work, device, warmups=1, repeats=repeats)
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return median_s(graph.replay, device, warmups=warmups, repeats=repeats)


def _once(work: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        begun = time.perf_counter()
        work()
        return time.perf_counter() - begun
    torch.cuda.synchronize(device)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    torch.cuda.synchronize(device)
    return float(start.elapsed_time(end)) / 1e3


def release(device: torch.device) -> None:
    """Gives back what is no longer referenced, and starts a new account of the peak."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.init()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak_gb(device: torch.device) -> float:
    """Most memory held by tensors since `release`, in 10⁹ bytes; 0 where nobody counts."""
    return torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else 0.0
