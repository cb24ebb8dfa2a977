"""Decoding on a GPU: log-probabilities have the bits of training, and no sequence depends on the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from benchmarks.decode import SIZES, alone_and_beside, differing_logprobs, requests, with_adapters
from weft.model.backbone import Backbone

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda", 0)
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"hidden_size": 4096, "intermediate_size": 14336, "num_key_value_heads": 8}),
    "qwen3": ("Qwen3", {"hidden_size": 2560, "intermediate_size": 9728, "num_key_value_heads": 8, "head_dim": 128}),
    "gemma3": (
        "Gemma3Text",
        {
            "hidden_size": 2560, "intermediate_size": 10240, "num_attention_heads": 8, "num_key_value_heads": 4,
            "head_dim": 256, "sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
}  # fmt: skip


def backbone_of(name: str, kind: str = "none") -> tuple[Backbone, list[int]]:
    """Two layers in their true size, under eight adapters of four ranks."""
    family, sizes = SHAPES[name]
    config = getattr(transformers, f"{family}Config")(**{**SIZES, "num_hidden_layers": 2, **sizes})
    torch.manual_seed(0)
    with GPU:
        plain = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    plain.generation_config.eos_token_id = None
    return with_adapters(plain, 8, kind)


@pytest.mark.parametrize(("name", "kind"), [*((name, "none") for name in SHAPES), ("llama", "fp8"), ("llama", "nf4")])
def test_sequences_when_decoded_then_log_probabilities_have_the_bits_of_training(name, kind):
    backbone, slots = backbone_of(name, kind)
    found = differing_logprobs(backbone, requests(96, [None, *slots]), 70)
    assert found == {"log_probabilities": 96 * 70, "differing": 0}
    decoder = backbone.decoder(None)
    assert decoder is not None and decoder.has_training_bits


def test_sequences_when_beside_255_others_then_write_what_they_write_alone():
    backbone, slots = backbone_of("llama")
    assert alone_and_beside(backbone, requests(256, [None, *slots]))
