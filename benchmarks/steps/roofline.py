"""The speed that matrix products alone allow: every product weight once forward in FP8 and once backward in bf16.

Per token and weight: 2 FLOP at the FP8 rate + 2 FLOP at the bf16 rate, both as this device reaches them on one large
square product. Attention, norms, loss and adapters are free here, so no step is faster.
"""

from __future__ import annotations

import torch

from benchmarks.clock import Measured
from benchmarks.steps.regimes import Workload
from weft.kernels.timing import median_s
from weft.plan.cost.published_shapes import Shape

SIDE = 8192


def measure_roofline(shape: Shape, workload: Workload, device: torch.device) -> Measured:
    """What a step of the workload would take at the rates measured now."""
    bf16, fp8 = product_rates(device)
    seconds = workload.capacity * seconds_per_token(shape, fp8, bf16)
    detail = f"products at {fp8 / 1e12:,.0f} TFLOP/s in FP8 and {bf16 / 1e12:,.0f} in bf16"
    return Measured(workload.capacity, workload.capacity, seconds, 0.0, detail)


def seconds_per_token(shape: Shape, forward_rate: float, backward_rate: float) -> float:
    """Seconds of one token's products at the given FLOP/s."""
    return 2 * shape.num_product_weights * (1 / forward_rate + 1 / backward_rate)


def product_rates(device: torch.device) -> tuple[float, float]:
    """FLOP/s of a bf16 and of an FP8 product with row-wise scales."""
    left = torch.randn(SIDE, SIDE, device=device, dtype=torch.bfloat16)
    right = torch.randn(SIDE, SIDE, device=device, dtype=torch.bfloat16)
    left8, right8 = left.to(torch.float8_e4m3fn), right.to(torch.float8_e4m3fn)
    ones = torch.ones(SIDE, 1, device=device)

    def in_bf16() -> object:
        return left @ right.t()

    def in_fp8() -> object:
        return torch._scaled_mm(left8, right8.t(), ones, ones.t(), out_dtype=torch.bfloat16, use_fast_accum=True)

    flop = 2.0 * SIDE**3
    times = [median_s(work, device, warmups=5, repeats=15) for work in (in_bf16, in_fp8)]
    return flop / times[0], flop / times[1]
