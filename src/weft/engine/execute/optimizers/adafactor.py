"""Adafactor (Shazeer and Stern 2018) with the settings of transformers' Trainer: the job's rate, no relative steps.

    s = g² + 1e-30;  row ← row + (mean of s by rows - row) t^-0.8;  col likewise;  v = row colᵀ / mean(row)
    u = g / √v;  u ← u / max(1, rms(u));  w ← (1 - rate · decay) w - rate · u

Of a vector all of v is kept. torch.optim.Adafactor multiplies its rate with the size of the weights besides, so that a
LoRA's B, which starts at zero, would hardly move.
"""

from __future__ import annotations

import torch

from weft.engine.execute.optimizers.gated import Gate, GatedOptimizer, State, SteppedTensor

LEAST_SQUARE = 1e-30
DECAY = -0.8


class Adafactor(GatedOptimizer):
    """Remembers of each matrix the mean squares of its rows and columns."""

    by_module = True

    def fresh(self, params: torch.Tensor) -> State:
        """Means of nothing."""
        state = {"step": torch.tensor(0.0)}
        if params.ndim != 2:
            return state | {"exp_avg_sq": torch.zeros_like(params)}
        rows, columns = params.shape
        return state | {"exp_avg_sq_row": params.new_zeros(rows), "exp_avg_sq_col": params.new_zeros(columns)}

    def update(self, tensor: SteppedTensor, gate: Gate) -> None:
        """One step."""
        state, share = tensor.state, gate.moves((float(tensor.state["step"]) + 1) ** DECAY)
        squares = tensor.grad.square().add_(LEAST_SQUARE)
        if tensor.params.ndim == 2:
            row, column = state["exp_avg_sq_row"], state["exp_avg_sq_col"]
            row.lerp_(squares.mean(dim=-1), share)
            column.lerp_(squares.mean(dim=-2), share)
            scale = (row / row.mean()).rsqrt_().unsqueeze(-1) * column.rsqrt().unsqueeze(-2)
        else:
            scale = state["exp_avg_sq"].lerp_(squares, share).rsqrt()
        change = scale.mul_(tensor.grad)
        change.div_(change.square().mean().sqrt().clamp(min=1.0))
        # Before the first step that is taken the means are zero, and 0 · ∞ is no number.
        change.masked_fill_(~gate.is_open, 0.0)
        tensor.params.mul_(gate.keeps(1 - tensor.rate * self.spec.weight_decay)).sub_(change.mul_(tensor.rate))
