"""What it costs on a CPU to compute a product in blocks of rows, which bit equality needs.

    python -m benchmarks cpu-blocks

Prints the time of X W for 1,024 rows in blocks of 32, 64, 128 and 256 rows over the time of one product (medians).
"""

from __future__ import annotations

import statistics
import time

import torch

from weft.adapters.sites import tiled_mm

ROWS = 1024


def seconds(x: torch.Tensor, w: torch.Tensor, tile: int | None) -> float:
    """Median time of one product, after warm-up."""
    times = []
    for _ in range(25):
        start = time.perf_counter()
        tiled_mm(x, w, tile)
        times.append(time.perf_counter() - start)
    return statistics.median(times[5:])


def cpu_blocks() -> None:
    """A product on a CPU in blocks of rows, which bit equality needs."""
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}; time over one product of {ROWS} rows")
    for num_in, num_out in ((192, 192), (192, 512), (576, 576), (576, 1536), (2048, 2048)):
        x, w = torch.randn(ROWS, num_in), torch.randn(num_out, num_in).t()
        whole = seconds(x, w, None)
        ratios = [f"{tile}: {seconds(x, w, tile) / whole:.2f}" for tile in (32, 64, 128, 256)]
        print(f"  {num_in} x {num_out:<5} " + "   ".join(ratios))
