"""Mixtures of experts on a GPU: Weft's jobs together beside one job of PEFT, in the same run and in turn.

    python -m benchmarks experts [--layers 8] [--json FILE]

The layers are those of Qwen3-30B-A3B, with random weights in bfloat16. Every step is 16 samples of 512 tokens: in PEFT
one batch of one job, with transformers' grouped products; in Weft four jobs with four samples each. Optimizer included.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import numpy as np
import torch
import typer

from benchmarks.clock import peak_gb, release
from weft.data.dataset import Dataset, JobData
from weft.data.samples import Sample
from weft.engine.engine import Engine
from weft.model.backbone import Backbone
from weft.model.packing import attention
from weft.plan.weights import num_experts
from weft.spec import AdapterSpec, JobSpec

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
NUM_JOBS, PER_JOB, LENGTH = 4, 4, 512
WARM_UP, STEPS = 3, 8
KINDS: dict[str, dict[str, Any]] = {
    "frozen": {"experts": "none"},
    "shared r=16": {"experts": "shared"},
    "full r=2": {"experts": "full", "expert_r": 2},
}


def model(layers: int, device: torch.device) -> Any:
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    sizes: dict[str, Any] = {
        "vocab_size": 151_936, "hidden_size": 2048, "num_hidden_layers": layers, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768, "norm_topk_prob": True,
    }  # fmt: skip
    config = Qwen3MoeConfig(**sizes)
    torch.manual_seed(0)
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def experts(
    layers: Annotated[int, typer.Option(help="Layers of the model; 48 are the whole one.")] = 8,
    file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
) -> None:
    """Tokens per second of four jobs of Weft and of one job of PEFT."""
    device = torch.device("cuda", 0)
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(device), "layers": layers}
    products = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    for name, parameters in {"PEFT, frozen": [], "PEFT, full r=2": products}.items():
        found[name] = peft_rate(model(layers, device), device, ATTENTION, parameters)
        release(device)
    for kind, settings in KINDS.items():
        adapter = AdapterSpec(r=16, target_modules=ATTENTION, **settings)
        found[f"Weft, {kind}"] = weft_rate(model(layers, device), adapter)
        release(device)
    found["Weft beside PEFT, frozen"] = found["Weft, frozen"]["tokens_per_s"] / found["PEFT, frozen"]["tokens_per_s"]
    text = json.dumps(found, indent=1)
    print(text)
    if file is not None:
        file.write_text(text + "\n")


def peft_rate(
    plain: Any, device: torch.device, targets: Sequence[str], parameters: Sequence[str] = ()
) -> dict[str, float]:
    """One job of PEFT with rank 16, and rank 2 on parameters of experts."""
    import peft

    plain.set_attn_implementation("sdpa")
    if num_experts(plain.config.to_dict()):
        plain.set_experts_implementation("grouped_mm")
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules=list(targets), target_parameters=list(parameters),
        rank_pattern={r".*\.experts\..*": 2}, alpha_pattern={r".*\.experts\..*": 4},
    )  # fmt: skip
    adapted = peft.get_peft_model(plain, config)
    trained = [p for p in adapted.parameters() if p.requires_grad]
    for parameter in trained:
        parameter.data = parameter.data.float()
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    ids = torch.randint(3, plain.config.vocab_size, (NUM_JOBS * PER_JOB, LENGTH), device=device)

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            adapted(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(WARM_UP):
        step()
    torch.cuda.synchronize()
    begun_s = time.perf_counter()
    for _ in range(STEPS):
        step()
    torch.cuda.synchronize()
    rate = STEPS * ids.numel() / (time.perf_counter() - begun_s)
    return {"tokens_per_s": rate, "peak_gb": peak_gb(device), "parameters": sum(p.numel() for p in trained)}


def weft_rate(plain: Any, adapter: AdapterSpec) -> dict[str, float]:
    """Four jobs with such adapters, together."""
    from weft.engine.events import StepDone

    attention.register()
    plain.set_attn_implementation(attention.NAME)
    tokenizer: Any = SimpleNamespace(eos_token_id=None)
    backbone = Backbone(plain, tokenizer, plain.config.model_type)
    device = backbone.device
    backbone.use_kernels("auto")
    engine = Engine(backbone, capacity=NUM_JOBS * PER_JOB * LENGTH)
    rng = np.random.default_rng(0)
    for index in range(NUM_JOBS):
        rows = rng.integers(3, plain.config.vocab_size, (8, LENGTH), dtype=np.int32)
        samples = [Sample(row, np.ones(LENGTH, dtype=bool)) for row in rows]
        spec = JobSpec(
            f"job{index}", train_data=("random",), adapter=adapter, max_steps=WARM_UP + STEPS,
            global_batch_size=PER_JOB, max_length=LENGTH,
        )  # fmt: skip
        engine.submit(spec, JobData(Dataset.of(samples, "random"), None))
    begun_s, done = 0.0, 0
    for event in engine.events():
        if isinstance(event, StepDone):
            done += 1
            if done == NUM_JOBS * WARM_UP:
                backbone.wait()
                begun_s = time.perf_counter()
            if done == NUM_JOBS * (WARM_UP + STEPS):
                backbone.wait()
                break
    rate = STEPS * NUM_JOBS * PER_JOB * LENGTH / (time.perf_counter() - begun_s)
    parameters = backbone.new_adapter(adapter, 0, torch.device("cpu")).num_parameters
    return {"tokens_per_s": rate, "peak_gb": peak_gb(device), "parameters": parameters}
