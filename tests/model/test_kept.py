"""The estimate by which admission and plans count a microbatch on the reference path is what autograd keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from tiny_families import FAMILIES, model_type
from tiny_models import random_backbone, random_sample

from weft.model.packed import SlotSample, pack_samples
from weft.model.packing import mixers
from weft.plan.weights import WEIGHTS
from weft.spec import AdapterSpec

WIDE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 96,
    "num_experts_per_tok": 4,
    "top_k_experts": 4,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 8),
    "head_dim": 32,
    "global_head_dim": 64,
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "mamba_d_head", "mamba_head_dim"), 32),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size"), 32),
    "mamba_d_ssm": 256,
}
"""Sizes at which numbers for each row and head, such as those of a norm's scale, are few beside those of vectors."""
LATENT = {"q_lora_rank": 48, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 24, "v_head_dim": 32}
LATENT |= {"head_dim": 8, "qk_head_dim": 32}
DENSE = {"num_local_experts": 0, "mamba_n_heads": 8}
OWN: dict[str, dict[str, Any]] = {
    "deepseek_v3": LATENT,
    "glm4_moe_lite": LATENT,
    "granitemoehybrid": DENSE,
    "granitemoehybrid_nope": DENSE,
}
CASES = [
    ("llama", "none"),
    *((name, "none") for name in FAMILIES if model_type(name) in WEIGHTS),
    *((name, "full") for name in ("mixtral", "gemma4_moe", "gpt_oss", "nemotron_h", "qwen3_5_moe_text")),
]


def kept_bytes(run: Callable[[], Any], held: Iterable[torch.Tensor]) -> int:
    """Bytes that autograd keeps of what a function does, besides those that are held anyway."""
    known = {tensor.untyped_storage().data_ptr() for tensor in held}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = run()
    del output
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize(("name", "experts"), CASES)
def test_activation_bytes_when_estimated_then_are_those_kept_and_those_of_one_mixer_again(name, experts, monkeypatch):
    backbone = random_backbone(name, **{**WIDE, **OWN.get(name, {})})
    spec = AdapterSpec(r=2, experts=experts)
    slot = backbone.attach(backbone.new_adapter(spec, 0))
    own_mixers = [module for module in backbone.model.modules() if mixers.is_mixer(module)]
    # On a CPU attention to sinks keeps scores, of which short samples have few; states come in chunks of 64.
    length = 128 if own_mixers else 8
    rng = np.random.default_rng(0)
    samples = [SlotSample(random_sample(rng, length, high=60), slot) for _ in range(128 // length)]
    batch = pack_samples(samples, 128, backbone.device)
    weights = [*backbone.model.parameters(), *backbone.model.buffers()]
    again = [0]
    recomputed = mixers.recomputed

    def run_twice(run: Callable[..., torch.Tensor], *given: torch.Tensor) -> torch.Tensor:
        leaves = [tensor.detach().requires_grad_() for tensor in given]
        again.append(kept_bytes(lambda: run(*leaves), [*weights, *given]))
        return recomputed(run, *given)

    monkeypatch.setattr(mixers, "recomputed", run_twice)
    kept = kept_bytes(lambda: backbone.path.hidden(batch, 128, through=True), weights)
    # Autograd knows nothing of gradients.
    gradients = 128 * max(map(mixers.gradient_bytes, own_mixers), default=0)
    is_dense = not own_mixers and not backbone.sites.experts
    estimate = backbone.activation_bytes(128, [spec]) - gradients
    assert 0.96 < estimate / (kept + max(again)) < (1.2 if is_dense else 1.05)


def test_activation_bytes_when_an_adapter_names_what_all_linear_leaves_out_then_its_inputs_count():
    backbone = random_backbone("glm4_moe")
    usual, named = (
        AdapterSpec(r=2, target_modules=chosen) for chosen in ("all-linear", ("q_proj", "shared_experts.gate_proj"))
    )
    assert backbone.activation_bytes(1, [named]) - backbone.activation_bytes(1, [usual]) == 4 * 32
