"""The reference path on a GPU: does it agree with the CPU and with itself, and how fast is it.

    PYTHONPATH=src python benchmarks/gpu_reference.py

Trains four jobs on the embedded backbone on CPU and GPU in fp32, and a job alone and beside seven others on the GPU;
then times one packed step of a random TinyLlama-1.1B shape in bf16 with 1, 4 and 16 adapters, and PEFT beside it.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from weft.backbone import attention
from weft.backbone.backbone import Backbone
from weft.backbone.load import load_backbone
from weft.backbone.packed import Placed, pack_samples
from weft.data.sample import Sample
from weft.demo.skills import SKILLS, write_skill
from weft.engine.engine import Engine
from weft.spec import AdapterSpec, BackboneSpec, JobSpec

NAMES = list(SKILLS)[:8]


def train(device: str, dtype: str, names: list[str], folder: Path) -> dict[str, Any]:
    """Adapters of the named skills after 20 steps together."""
    engine = Engine(load_backbone(BackboneSpec("tiny", dtype=dtype, device=device)), capacity=512)
    for i, name in enumerate(names):
        spec = AdapterSpec(r=8, lora_dropout=0.1 if i % 2 else 0.0)
        files = (str(folder / name / "train.jsonl"),)
        engine.submit(
            JobSpec(name=name, train_data=files, adapter=spec, max_steps=20, global_batch_size=4, max_length=128)
        )
    engine.run()
    return {name: engine.adapter_of(name) for name in names}


def difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Largest difference of two adapters, relative to the largest weight."""
    pairs = [(a, b) for path in one for a, b in zip(one[path], other[path], strict=True)]
    return max(float((a - b).abs().max() / a.abs().max().clamp(min=1e-30)) for a, b in pairs)


def tinyllama() -> Any:
    """The shape of TinyLlama-1.1B."""
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=22,
        num_attention_heads=32,
        num_key_value_heads=4,
        vocab_size=32000,
        max_position_embeddings=2048,
    )


def step_times() -> None:
    """Tokens per second of one packed step, TinyLlama-1.1B shape, 4,096 rows of 256-token samples."""
    from transformers import AutoModelForCausalLM

    attention.register()
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(tinyllama(), dtype=torch.bfloat16, attn_implementation=attention.NAME)
    backbone = Backbone(model, None, "tinyllama-1.1b")  # type: ignore[arg-type]
    rng = np.random.default_rng(0)
    samples = [Sample(rng.integers(0, 32000, 256, dtype=np.int32), np.ones(256, dtype=bool)) for _ in range(16)]
    for num_jobs in (1, 4, 16):
        adapters = [backbone.new_adapter(AdapterSpec(r=16), seed) for seed in range(num_jobs)]
        slots = [backbone.attach(adapter) for adapter in adapters]
        placed = [Placed(s, slots[i * num_jobs // 16], 1 / 4096) for i, s in enumerate(samples)]
        batch = pack_samples(placed, 4096, backbone.device)
        times = []
        for _ in range(8):
            torch.cuda.synchronize()
            start = time.perf_counter()
            backbone.forward_backward(batch, 4096)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        peak = torch.cuda.max_memory_allocated() / 2**30
        print(f"  {num_jobs:2d} adapters: {4096 / sorted(times)[4]:10,.0f} tokens/s, peak {peak:.1f} GiB")
        for slot in slots:
            backbone.detach(slot)


def peft_times() -> None:
    """Tokens per second of one PEFT step on the same shape: one adapter, a batch of 16 samples, and of one."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(tinyllama(), dtype=torch.bfloat16, attn_implementation="sdpa")
    model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
    for num_samples in (16, 1):
        ids = torch.randint(0, 32000, (num_samples, 256), device="cuda")
        times = []
        for _ in range(8):
            torch.cuda.synchronize()
            start = time.perf_counter()
            model(input_ids=ids, labels=ids).loss.backward()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        print(f"  PEFT, one adapter, {num_samples} x 256: {num_samples * 256 / sorted(times)[4]:10,.0f} tokens/s")


def main() -> None:
    """Prints all checks."""
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for skill in NAMES:
            (folder / skill).mkdir()
            write_skill(folder / skill, skill, train=80, held=1)
        cpu, gpu = (train(device, "float32", NAMES[:4], folder) for device in ("cpu", "cuda"))
        worst = max(difference(cpu[n], gpu[n]) for n in cpu)
        print(f"CPU and GPU, fp32, 20 steps, dropout on: largest difference {worst:.1e} of the largest weight")
        for dtype in ("float32", "bfloat16"):
            alone, beside, again = (train("cuda", dtype, n, folder) for n in (NAMES[:1], NAMES, NAMES))
            first = NAMES[0]
            print(
                f"GPU {dtype}: alone and beside 7 others {difference(alone[first], beside[first]):.1e}; "
                f"the same run twice {difference(beside[first], again[first]):.1e}"
            )
    print("one packed step, TinyLlama-1.1B shape, bf16, 4,096 rows, r=16 on all linears:")
    step_times()
    peft_times()


if __name__ == "__main__":
    main()
