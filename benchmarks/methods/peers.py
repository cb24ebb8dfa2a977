"""PEFT's DoRA, and DPO with PEFT as people write it: a pass with the adapter and one without; at the best batch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.clock import Effort, release
from benchmarks.steps.peers import RANK, PeerStep, adapter_steps, best_batch, with_adapter
from benchmarks.steps.regimes import BenchProgram, BenchRun, Workload
from benchmarks.steps.samples import IGNORED
from weft.model.random_model import build
from weft.plan.cost.published_shapes import Shape

BETA = 0.1


def measure_dora(shape: Shape, length: int, dtype: torch.dtype, device: torch.device, effort: Effort) -> float:
    """Tokens per second of PEFT's DoRA on all linears."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=RANK, lora_alpha=2 * RANK, use_dora=True, target_modules="all-linear")
    model = get_peft_model(build(shape, dtype, device, "sdpa"), config).train()
    return _fastest(adapter_steps(model), model, length, device, effort)


def measure_dpo(shape: Shape, length: int, dtype: torch.dtype, device: torch.device, effort: Effort) -> float:
    """Tokens of pairs per second of a LoRA on all linears; a batch's rows are pairs, one behind the other."""
    model = with_adapter(build(shape, dtype, device, "sdpa"), 0.0)
    return _fastest(pair_steps(model), model, length, device, effort)


def pair_steps(model: Any) -> PeerStep:
    """DPO's sigmoid loss: forward, the same without the adapter, backward and optimizer step."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    halves = model.dtype is torch.bfloat16

    def sums(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        labels = batch["labels"][:, 1:]
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        logits = model(**inputs).logits[:, :-1]
        losses = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED, reduction="none")
        return -losses.view(labels.shape).sum(dim=1)

    def step(batch: dict[str, torch.Tensor]) -> None:
        with torch.autocast(model.device.type, torch.bfloat16, enabled=halves):
            with torch.no_grad(), model.disable_adapter():
                references = sums(batch)
            gains = sums(batch) - references
            loss = -F.logsigmoid(BETA * (gains[::2] - gains[1::2])).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _fastest(step: PeerStep, model: Any, length: int, device: torch.device, effort: Effort) -> float:
    run = BenchRun(BenchProgram.PEFT_BEST, Workload((RANK,), (length, length), length))
    try:
        return best_batch(step, run, model.config.vocab_size, device, effort).tokens_per_s
    finally:
        release(device)
