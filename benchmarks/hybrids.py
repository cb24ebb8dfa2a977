"""Layers with states on a GPU: Weft's jobs together beside one job of PEFT, in the same run and in turn.

    python -m benchmarks hybrids [--model qwen3.5-9b] [--layers 8] [--json FILE]

Random weights in bfloat16 in the layers' true sizes; experts stay frozen. Every step is 16 samples of 512 tokens, as in
`experts.py`: in PEFT one batch of one job, on transformers' own code in plain torch unless fla, causal-conv1d or
mamba-ssm are installed; in Weft four jobs with four samples each.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.clock import release
from benchmarks.experts import peft_rate, weft_rate
from weft.spec import AdapterSpec

_QWEN3_5: dict[str, Any] = {
    "vocab_size": 248_320, "num_attention_heads": 16, "head_dim": 256, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
}  # fmt: skip
GATED_DELTA = ("q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkv", "in_proj_z", "out_proj")
SHAPES: dict[str, tuple[str, dict[str, Any], list[str], tuple[str, ...]]] = {
    "qwen3.5-9b": (
        "Qwen3_5Text", {**_QWEN3_5, "hidden_size": 4096, "intermediate_size": 12288, "num_key_value_heads": 4},
        ["linear_attention"] * 3 + ["full_attention"], (*GATED_DELTA, "gate_proj", "up_proj", "down_proj"),
    ),
    "qwen3.5-35b-a3b": (
        "Qwen3_5MoeText",
        {
            **_QWEN3_5, "hidden_size": 2048, "num_key_value_heads": 2, "num_experts": 256, "num_experts_per_tok": 8,
            "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
        },
        ["linear_attention"] * 3 + ["full_attention"], GATED_DELTA,
    ),
    "lfm2-2.6b": (
        "Lfm2", {"vocab_size": 65_536, "hidden_size": 2048, "intermediate_size": 10_752, "num_attention_heads": 32},
        ["conv", "conv", "full_attention"], ("q_proj", "k_proj", "v_proj", "in_proj", "out_proj", "w1", "w2", "w3"),
    ),
    "granite-4-h-micro": (
        "GraniteMoeHybrid",
        {
            "vocab_size": 100_352, "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8,
            "num_local_experts": 0, "shared_intermediate_size": 8192, "mamba_n_heads": 64, "mamba_d_head": 64,
            "mamba_d_state": 128, "mamba_n_groups": 1,
        },
        ["mamba"] * 3 + ["attention"], ("q_proj", "k_proj", "v_proj", "o_proj", "in_proj", "out_proj"),
    ),
}  # fmt: skip
"""By name: transformers' class, sizes, kinds of layers in turn, and the linears with adapters."""


def model(name: str, layers: int, device: torch.device) -> Any:
    import transformers

    kind, settings, kinds, _ = SHAPES[name]
    types = [kinds[index % len(kinds)] for index in range(layers)]
    config = getattr(transformers, f"{kind}Config")(
        **settings, num_hidden_layers=layers, layer_types=types, pad_token_id=0, tie_word_embeddings=False
    )
    torch.manual_seed(0)
    with device:
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def hybrids(
    name: Annotated[str, typer.Option("--model", help=f"One of {', '.join(SHAPES)}.")] = "qwen3.5-9b",
    layers: Annotated[int, typer.Option(help="Layers of the model.")] = 8,
    file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
) -> None:
    """Tokens per second of four jobs of Weft and of one job of PEFT."""
    if name not in SHAPES:
        raise typer.BadParameter(f"accepted are {', '.join(SHAPES)}.", param_hint="--model")
    device, targets = torch.device("cuda", 0), SHAPES[name][3]
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(device), "model": name, "layers": layers}
    found["PEFT"] = peft_rate(model(name, layers, device), device, targets)
    release(device)
    found["Weft"] = weft_rate(model(name, layers, device), AdapterSpec(r=16, target_modules=targets))
    found["Weft beside PEFT"] = found["Weft"]["tokens_per_s"] / found["PEFT"]["tokens_per_s"]
    text = json.dumps(found, indent=1)
    print(text)
    if file is not None:
        file.write_text(text + "\n")
