"""Muon for matrices (Jordan et al. 2024), AdamW for what is none.

    b ← μ b + (1-μ) g;  d = (1-μ) g + μ b;  o = U Vᵀ of d = U S Vᵀ, about, by five Newton-Schulz iterations in bf16
    w ← (1 - rate · decay) w - 0.2 · √(the longer side) · rate · o

This is torch.optim.Muon with its `match_rms_adamw`, which makes a step about as large as AdamW's, so that a learning
rate that is good for AdamW is good here too. A tensor with a side of 1 is no matrix.
"""

from __future__ import annotations

import math

import torch

from weft.engine.execute.optimizers.gated import Gate, GatedOptimizer, State, SteppedTensor

NUM_ITERATIONS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the polynomial that moves every singular value towards 1."""
LEAST_NORM = 1e-7


class Muon(GatedOptimizer):
    """Remembers a moving mean of the gradients of each matrix, and AdamW's moments of the rest."""

    by_module = True

    def fresh(self, params: torch.Tensor) -> State:
        """Means of nothing."""
        if _is_matrix(params):
            return {"momentum_buffer": torch.zeros_like(params)}
        moments = {name: torch.zeros_like(params) for name in ("exp_avg", "exp_avg_sq")}
        return {"step": torch.tensor(0.0), **moments}

    def update(self, tensor: SteppedTensor, gate: Gate) -> None:
        """One step."""
        tensor.params.mul_(gate.keeps(1 - tensor.rate * self.spec.weight_decay))
        if not _is_matrix(tensor.params):
            self._update_vector(tensor, gate)
            return
        momentum, buffer = self.spec.used_momentum, tensor.state["momentum_buffer"]
        buffer.lerp_(tensor.grad, gate.moves(1 - momentum))
        direction = orthogonal(tensor.grad.lerp(buffer, momentum)).float()
        size = 0.2 * math.sqrt(max(tensor.params.shape)) * tensor.rate
        tensor.params.sub_(direction.mul_(gate.moves(size)))

    def _update_vector(self, tensor: SteppedTensor, gate: Gate) -> None:
        spec, state, number = self.spec, tensor.state, float(tensor.state["step"]) + 1
        exp_avg = state["exp_avg"].lerp_(tensor.grad, gate.moves(1 - spec.adam_beta1))
        exp_avg_sq = state["exp_avg_sq"].mul_(gate.keeps(spec.adam_beta2))
        exp_avg_sq.addcmul_(tensor.grad, tensor.grad, value=1 - spec.adam_beta2)
        scale = (exp_avg_sq.sqrt() / math.sqrt(1 - spec.adam_beta2**number)).add_(spec.adam_epsilon)
        tensor.params.sub_((exp_avg / scale).mul_(gate.moves(tensor.rate / (1 - spec.adam_beta1**number))))


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """About the nearest matrix whose singular values are all 1, by Newton-Schulz iterations in bf16."""
    first, third, fifth = COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if is_tall else matrix).bfloat16()
    x = x / x.norm().clamp(min=LEAST_NORM)
    for _ in range(NUM_ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=third, alpha=fifth), x, beta=first)
    return x.T if is_tall else x


def _is_matrix(params: torch.Tensor) -> bool:
    return params.ndim == 2 and min(params.shape) > 1
