"""Lion (Chen et al. 2023, "Symbolic discovery of optimization algorithms"): steps by the sign of a moving mean.

w ← (1 - rate · decay) w - rate · sign(β₁ m + (1-β₁) g);  m ← β₂ m + (1-β₂) g
"""

from __future__ import annotations

import torch

from weft.engine.execute.optimizers.gated import Gate, GatedOptimizer, State, SteppedTensor


class Lion(GatedOptimizer):
    """Remembers one moving mean of the gradients."""

    def fresh(self, params: torch.Tensor) -> State:
        """A mean of nothing."""
        return {"exp_avg": torch.zeros_like(params)}

    def update(self, tensor: SteppedTensor, gate: Gate) -> None:
        """One step."""
        spec, exp_avg = self.spec, tensor.state["exp_avg"]
        signs = torch.lerp(exp_avg, tensor.grad, 1 - spec.adam_beta1).sign_()
        tensor.params.mul_(gate.keeps(1 - tensor.rate * spec.weight_decay))
        tensor.params.sub_(signs.mul_(gate.moves(tensor.rate)))
        exp_avg.lerp_(tensor.grad, gate.moves(1 - spec.adam_beta2))
