"""Cross entropy of rows of logits: losses, which targets have the largest logit, and gradients written over the logits.

For each row b with logits x, target t and weight w (no cap: z = x):
    z      = cap · tanh(x / cap)
    loss_b = log Σ_v exp(z_v) − z_t                              unweighted, fp32
    hit_b  = 1 if x_t ≥ max_v x_v and loss_b is a number, else 0
    dx_v   = w · (softmax(z)_v − [v = t]) · (1 − (z_v / cap)²)   (B, V), over the logits, in their type

A row is read once for its maximum and sum together (a running sum is scaled down when the maximum grows) and once more
for the gradient. Sums run lane by lane over blocks from the first to the last, then over the lanes. Rows are
independent: a NaN stays in its row. Whether the target is hit is computed from the logits before the cap: the cap keeps
their order, but a device may round it differently for one logit than for many.

Shape suffixes: B rows, V vocabulary; 2: losses, then hits.
"""

from __future__ import annotations

import torch

from weft.kernels.launch import jit, next_power_of_2, runs_triton, tl


def cross_entropy_rows_reference(
    logits_BV: torch.Tensor, targets_B: torch.Tensor, weights_B: torch.Tensor | None, softcap: float | None = None
) -> torch.Tensor:
    z_BV = logits_BV.float()
    is_top_B = z_BV.gather(1, targets_B[:, None])[:, 0] >= z_BV.amax(dim=1)
    if softcap is not None:
        z_BV = torch.tanh(z_BV / softcap) * softcap
    norm_B1 = torch.logsumexp(z_BV, dim=1, keepdim=True)
    losses_B = (norm_B1 - z_BV.gather(1, targets_B[:, None]))[:, 0]
    if weights_B is not None:
        dz_BV = torch.exp(z_BV - norm_B1)
        dz_BV.scatter_add_(1, targets_B[:, None], dz_BV.new_full((len(dz_BV), 1), -1.0))
        if softcap is not None:
            dz_BV *= 1 - (z_BV / softcap) ** 2
        logits_BV.copy_(dz_BV.mul_(weights_B[:, None]))
    return torch.stack((losses_B, (is_top_B & ~losses_B.isnan()).float()))


BLOCK = 8_192
"""Logits of a row read at once: 16 for each of 512 threads, so that they seldom wait for each other's maximum."""


@jit
def _capped(x, softcap, HAS_CAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """cap · tanh(x / cap), through an exponential that may overflow without harm."""
    if HAS_CAP:
        return softcap * (1.0 - 2.0 / (tl.exp(2.0 * x / softcap) + 1.0))
    else:
        return x


@jit
def _cross_entropy(  # type: ignore[no-untyped-def]
    logits,
    targets,
    weights,
    results,
    stride,
    num_columns,
    softcap,
    HAS_WEIGHTS: tl.constexpr,
    HAS_CAP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    target = tl.load(targets + row)
    x_target = tl.load(logits + target).to(tl.float32)
    z_target = _capped(x_target, softcap, HAS_CAP)
    lanes = tl.arange(0, BLOCK)
    # A finite start: a first block of -inf must not make -inf - -inf.
    largest = -3.0e38
    sums = tl.zeros((BLOCK,), dtype=tl.float32)
    if HAS_CAP:
        tops = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    for start in range(0, num_columns, BLOCK):
        columns = start + lanes
        inside = columns < num_columns
        x = tl.load(logits + columns, mask=inside, other=0.0).to(tl.float32)
        if HAS_CAP:
            tops = tl.maximum(tops, tl.where(inside, x, float("-inf")))
        z = tl.where(inside, _capped(x, softcap, HAS_CAP), float("-inf"))
        above = tl.maximum(largest, tl.max(z, axis=0))
        sums = sums * tl.exp(largest - above) + tl.exp(z - above)
        largest = above
    norm = largest + tl.log(tl.sum(sums, axis=0))
    loss = norm - z_target
    top = largest
    if HAS_CAP:
        top = tl.max(tops, axis=0)
    tl.store(results + row, loss)
    # A maximum may pass over a NaN; the loss of such a row never does.
    tl.store(results + tl.num_programs(0) + row, tl.where((x_target >= top) & (loss == loss), 1.0, 0.0))
    if HAS_WEIGHTS:
        weight = tl.load(weights + row)
        for start in range(0, num_columns, BLOCK):
            columns = start + lanes
            inside = columns < num_columns
            z = _capped(tl.load(logits + columns, mask=inside, other=0.0).to(tl.float32), softcap, HAS_CAP)
            grad = tl.exp(z - norm) - tl.where(columns == target, 1.0, 0.0)
            if HAS_CAP:
                grad *= 1.0 - (z / softcap) * (z / softcap)
            tl.store(logits + columns, (grad * weight).to(logits.dtype.element_ty), mask=inside)


def cross_entropy_rows_kernel(
    logits_BV: torch.Tensor, targets_B: torch.Tensor, weights_B: torch.Tensor | None, softcap: float | None = None
) -> torch.Tensor:
    num_rows, num_columns = logits_BV.shape
    results_2B = torch.empty(2, num_rows, dtype=torch.float32, device=logits_BV.device)
    block = min(BLOCK, next_power_of_2(num_columns))
    _cross_entropy[(num_rows,)](
        logits_BV,
        targets_B,
        results_2B if weights_B is None else weights_B,
        results_2B,
        logits_BV.stride(0),
        num_columns,
        1.0 if softcap is None else float(softcap),
        HAS_WEIGHTS=weights_B is not None,
        HAS_CAP=softcap is not None,
        BLOCK=block,
        num_warps=min(16, max(4, block // 512)),
    )
    return results_2B


def cross_entropy_rows(
    logits_BV: torch.Tensor, targets_B: torch.Tensor, weights_B: torch.Tensor | None, softcap: float | None = None
) -> torch.Tensor:
    """Loss (unweighted) and hit of every row (2, B, fp32); given weights, the logits become the weighted loss's
    gradient."""
    assert logits_BV.stride(1) == 1 and targets_B.is_contiguous() and (weights_B is None or weights_B.is_contiguous())
    run = cross_entropy_rows_kernel if runs_triton(logits_BV) else cross_entropy_rows_reference
    return run(logits_BV, targets_B, weights_B, softcap)
