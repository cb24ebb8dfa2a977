"""Stochastic gradient descent with momentum, as torch.optim.SGD.

d = g + decay · w;  b ← μ b + d;  w ← w - rate · (d + μ b if nesterov else b)
"""

from __future__ import annotations

import torch

from weft.engine.execute.optimizers.gated import Gate, GatedOptimizer, State, SteppedTensor


class SGD(GatedOptimizer):
    """Remembers a moving sum of gradients where there is a momentum, and nothing where there is none."""

    def fresh(self, params: torch.Tensor) -> State:
        """An empty sum."""
        return {"momentum_buffer": torch.zeros_like(params)} if self.spec.used_momentum else {}

    def update(self, tensor: SteppedTensor, gate: Gate) -> None:
        """One step."""
        momentum, decay = self.spec.used_momentum, self.spec.weight_decay
        direction = tensor.grad
        if decay:
            direction.add_(tensor.params * gate.moves(decay))
        if momentum:
            buffer = tensor.state["momentum_buffer"]
            buffer.mul_(gate.keeps(momentum)).add_(direction)
            direction = direction.add_(buffer, alpha=momentum) if self.spec.nesterov else buffer
        tensor.params.sub_(direction * gate.moves(tensor.rate))
