"""Weights that fit the embedded backbone, and what transformers alone computes."""

from __future__ import annotations

import torch

from weft.adapters.method import ModuleTensors
from weft.model.load import load_plain_model
from weft.spec import BackboneSpec

LEAVES = ["q_proj", "v_proj"]
LAYERS = 6
SHOUTING = (
    "{% for message in messages %}[{{ message.role | upper }}] {{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}[ASSISTANT] {% endif %}"
)
"""A chat template that is not the embedded backbone's."""


def tiny_tensors(strength: float, *, rank: int = 4) -> dict[str, ModuleTensors]:
    """Random A and B that fit the embedded backbone; with strength 0 the adapter has no effect."""
    generator = torch.Generator().manual_seed(1)
    num_out = {"q_proj": 192, "v_proj": 64}
    tensors = {}
    for layer in range(LAYERS):
        for leaf in LEAVES:
            a = torch.randn(rank, 192, generator=generator) / 14
            b = torch.randn(num_out[leaf], rank, generator=generator) * strength
            tensors[f"model.layers.{layer}.self_attn.{leaf}"] = (a, b)
    return tensors


def plain_logits(model_path: str, tokens: list[int]) -> torch.Tensor:
    """Logits (T, V) of a model as transformers alone computes them."""
    model = load_plain_model(BackboneSpec(model_path, "float32", "cpu"))
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0]
