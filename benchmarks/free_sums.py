"""The cost of gradient_sum any_order on a CPU, compared with in_order.

    OMP_NUM_THREADS=1 python -m benchmarks free-sums

Prints the processor time of adding 20 million numbers to a sum, in buffers of several sizes, as fp32 and in fixed
point, and of reading such a sum, which a step does once; then that of training a job on the embedded model.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import weft
from weft.kernels.fixed_point import FixedPointSum

NUMBERS = 20_000_000
SIZES = (4_096, 65_536, NUMBERS)
RUNS = 5


def milliseconds(run: Callable[[], object], before: Callable[[], object] = lambda: None) -> float:
    """Median processor time, after a first run."""
    times = []
    for _ in range(RUNS + 1):
        before()
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return 1000 * statistics.median(times[1:])


def print_sums() -> None:
    """The arithmetic by itself."""
    for size in SIZES:
        numbers = torch.randn(size) * 1e-4
        buffers = [torch.zeros(size) for _ in range(NUMBERS // size)]
        sums = [FixedPointSum(buffer) for buffer in buffers]
        totals = [torch.zeros(size) for _ in buffers]

        def fill(buffers: list[torch.Tensor] = buffers, numbers: torch.Tensor = numbers) -> None:
            for buffer in buffers:
                buffer.copy_(numbers)

        def add(totals: list[torch.Tensor] = totals, buffers: list[torch.Tensor] = buffers) -> None:
            for total, buffer in zip(totals, buffers, strict=True):
                total.add_(buffer)

        def take(sums: list[FixedPointSum] = sums) -> None:
            for each in sums:
                each.take()

        def read_all(sums: list[FixedPointSum] = sums) -> None:
            for each in sums:
                each.total()

        ordered = milliseconds(add, fill)
        free = milliseconds(take, fill)
        read = milliseconds(read_all)
        print(f"  buffers of {size:>10,}: fp32 {ordered:5.0f} ms, fixed point {free:5.0f} ms, read {read:5.0f} ms")


def print_job() -> None:
    """A job on the embedded model: 20 steps of 8 samples of a few dozen tokens."""
    rows = [{"prompt": f"{i} plus {i + 1} is", "completion": f" {2 * i + 1}"} for i in range(40)]
    times = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sums.jsonl"
        path.write_text("\n".join(json.dumps(row) for row in rows))
        for sums in ("in_order", "any_order"):
            engine = weft.Engine("tiny")
            engine.submit(weft.Job(name="job", train_data=(str(path),), max_steps=20, gradient_sum=sums))
            start = time.process_time()
            engine.run()
            times[sums] = time.process_time() - start
    print(f"  a job of 20 steps: ordered {times['in_order']:.2f} s, free {times['any_order']:.2f} s")


def free_sums() -> None:
    """Gradient sums on a CPU: any_order compared with in_order."""
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}; processor time, {NUMBERS:,} numbers")
    print_sums()
    print_job()
