"""VeRA on the rows of one slot, in plain torch.

It is a LoRA with the frozen corner A of the shared matrix and with b ⊙ B ⊙ d in B's place, so forward and the gradient
of x are LoRA's. Of the gradient G = dyᵀ S that B ⊙ b ⊙ d would have, a sample leaves, with H = G ⊙ B,
    db += H d,    dd += Hᵀ b
in fp32 and in the job's order. So besides x only S is kept.

Shape suffixes: T rows of the microbatch, L rows of a slot or of a sample, D in, O out, R rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weft.adapters.routing import SlotRows
from weft.methods.lora.weights import LoraWeights


@dataclass
class VeraWeights(LoraWeights):
    """The adapter on one module: its vectors and their gradients beside corners of the shared matrices."""

    d_R: torch.Tensor
    b_O: torch.Tensor
    grad_d_R: torch.Tensor
    grad_b_O: torch.Tensor

    def compute_weights(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """A, and b ⊙ B ⊙ d, in the type of the activations."""
        return self.a_RD.to(dtype), (self.b_O[:, None] * self.b_OR * self.d_R).to(dtype)

    def accumulate(
        self, rows: SlotRows, x_LD: torch.Tensor, s_LR: torch.Tensor, ds_LR: torch.Tensor, dy_TO: torch.Tensor
    ) -> None:
        """Adds dd and db sample by sample."""
        for sample in rows.samples:
            h_OR = dy_TO[sample.buffer].t().float().mm(s_LR[sample.slot].float()).mul_(self.b_OR)
            self.grad_b_O.addmv_(h_OR, self.d_R)
            self.grad_d_R.addmv_(h_OR.t(), self.b_O)
