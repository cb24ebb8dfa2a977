"""Layers of today's models on a GPU, in their true sizes: they train, with the same bits beside any neighbours."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from weft.data.samples import Sample
from weft.model.backbone import Backbone
from weft.model.packed import SlotSample, pack_samples
from weft.model.packing import attention
from weft.spec import AdapterSpec

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda", 0)
CAPACITY = 1024
VOCABULARY = 4096
OWN = [(200, 1), (77, 1), (130, 1)]
"""Tokens of the samples of the adapter that is looked at."""
BESIDE = [(60, 0), (200, 1), (150, None), (77, 1), (31, 0), (130, 1)]
"""The same among those of another adapter and of the bare model."""
_EVERY_FOURTH = ["linear_attention"] * 3 + ["full_attention"]
_QWEN3_5 = {
    "layer_types": _EVERY_FOURTH,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_5_9b": (
        "Qwen3_5Text", {**_QWEN3_5, "hidden_size": 4096, "intermediate_size": 12288, "num_key_value_heads": 4},
    ),
    "qwen3_5_35b_a3b": (
        "Qwen3_5MoeText",
        {
            **_QWEN3_5, "hidden_size": 2048, "num_key_value_heads": 2, "num_experts": 256, "num_experts_per_tok": 8,
            "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
        },
    ),
    "qwen3_30b_a3b": (
        "Qwen3Moe",
        {
            "hidden_size": 2048, "num_hidden_layers": 2, "num_attention_heads": 32, "num_key_value_heads": 4,
            "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
            "norm_topk_prob": True,
        },
    ),
    "gpt_oss_20b": ("GptOss", {"num_hidden_layers": 2, "num_local_experts": 32, "num_experts_per_tok": 4}),
    "glm_4_7_flash": (
        "Glm4MoeLite",
        {
            "hidden_size": 2048, "num_hidden_layers": 2, "mlp_layer_types": ["dense", "sparse"],
            "num_attention_heads": 20, "num_key_value_heads": 20, "n_routed_experts": 64, "num_experts_per_tok": 4,
            "moe_intermediate_size": 1536, "q_lora_rank": 768, "kv_lora_rank": 512, "qk_nope_head_dim": 192,
            "qk_rope_head_dim": 64, "v_head_dim": 256,
        },
    ),
    "lfm2_1_2b": (
        "Lfm2", {"hidden_size": 2048, "num_hidden_layers": 4, "layer_types": ["conv"] * 3 + ["full_attention"]},
    ),
    "nemotron_3_nano": (
        "NemotronH",
        {
            "hidden_size": 2688, "layers_block_type": ["mamba", "moe", "attention", "moe"], "num_attention_heads": 32,
            "num_key_value_heads": 2, "head_dim": 128, "mamba_num_heads": 64, "mamba_head_dim": 64,
            "ssm_state_size": 128, "n_groups": 8, "n_routed_experts": 128, "num_experts_per_tok": 6,
            "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712,
        },
    ),
    "gemma_4_31b": ("Gemma4Text", {"num_hidden_layers": 6, "attention_k_eq_v": True}),
    "gemma_4_e4b": (
        "Gemma4Text",
        {
            "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 6, "num_kv_shared_layers": 3,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2, "num_attention_heads": 8,
            "num_key_value_heads": 2, "head_dim": 256, "global_head_dim": 512, "hidden_size_per_layer_input": 256,
            "vocab_size_per_layer_input": VOCABULARY, "final_logit_softcapping": 30.0,
        },
    ),
}  # fmt: skip
MIXTURES = ("qwen3_5_35b_a3b", "qwen3_30b_a3b", "gpt_oss_20b", "glm_4_7_flash", "nemotron_3_nano")


def sample(length: int) -> Sample:
    rng = np.random.default_rng(length)
    return Sample(rng.integers(3, 1000, length, dtype=np.int32), np.arange(length) >= length // 2)


def make(name: str, kernels: str) -> Backbone:
    """A random backbone in bfloat16, with few layers of the published sizes."""
    kind, settings = SHAPES[name]
    config = getattr(transformers, f"{kind}Config")(**{"vocab_size": VOCABULARY, "pad_token_id": 0, **settings})
    attention.register()
    torch.manual_seed(0)
    with torch.device(GPU):
        options = {"dtype": torch.bfloat16, "attn_implementation": attention.NAME}
        model = transformers.AutoModelForCausalLM.from_config(config, **options)
    backbone = Backbone(model.eval(), SimpleNamespace(eos_token_id=None), name)
    backbone.use_kernels(kernels)
    return backbone


def gradients(
    backbone: Backbone, spec: AdapterSpec, lengths: list[tuple[int, int | None]]
) -> tuple[list[torch.Tensor], list[float]]:
    """Of the adapter, group by group, and the losses of its samples."""
    own, other = backbone.new_adapter(spec, 1), backbone.new_adapter(AdapterSpec(r=8, init_lora_weights=False), 2)
    slots: list[int | None] = [backbone.attach(other), backbone.attach(own)]
    slot_samples = [
        SlotSample(sample(length), None if index is None else slots[index], 0.01, 7 + length)
        for length, index in lengths
    ]
    losses = backbone.forward_backward(pack_samples(slot_samples, CAPACITY, GPU), backbone.path.row_tile(CAPACITY))
    for slot in slots:
        assert slot is not None
        backbone.detach(slot)
    grads = [group.grad.clone() for group in own.groups.values()]
    return grads, [loss for loss, (_, index) in zip(losses, lengths, strict=True) if index == 1]


@pytest.mark.parametrize("kernels", ["reference", "auto"])
@pytest.mark.parametrize("name", SHAPES)
def test_layers_when_samples_are_packed_then_an_adapter_has_the_bits_it_has_alone(name, kernels):
    backbone = make(name, kernels)
    kinds = ("none", "full", "shared") if name in MIXTURES else ("none",)
    for kind in kinds:
        rank = None if kind == "none" else 2
        spec = AdapterSpec(r=16, experts=kind, expert_r=rank, init_lora_weights=False)
        (alone, losses), (beside, others) = (gradients(backbone, spec, lengths) for lengths in (OWN, BESIDE))
        assert losses == others and all(np.isfinite(losses))
        for one, two in zip(alone, beside, strict=True):
            assert one.isfinite().all() and one.abs().max() > 0
            different = int((one != two).sum())
            assert different == 0, f"{name} experts {kind}: {different} of {one.numel()} numbers differ"
