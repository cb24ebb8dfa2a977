"""Jobs of every method equal the same jobs trained alone by PEFT, with the dropout masks that Weft draws."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_exact import STEPS, assert_equal_peft, peft_loss
from tiny_models import Job, job_spec, random_backbone, random_data
from torch import nn

from weft.engine.jobs.live_job import LiveJob
from weft.kernels.dropout import drop, keep_mask, mix, module_key, row_keys


class StatedDropout(nn.Module):
    """Drops what Weft drops on a module: the keys of a padded batch's rows are put in before it runs."""

    def __init__(self, path: str, p: float) -> None:
        super().__init__()
        self.module, self.p = module_key(path), p
        self.keys_BL = torch.zeros(0, 0, dtype=torch.int32)

    def forward(self, x_BLD: torch.Tensor) -> torch.Tensor:
        keep = keep_mask(self.keys_BL.flatten(), self.module, x_BLD.shape[-1], self.p)
        return drop(x_BLD, keep.view(x_BLD.shape), self.p)


def dropping_loss(model: Any, job: LiveJob, step: int) -> tuple[torch.Tensor, float]:
    """PEFT's loss of a global batch, with Weft's masks if the job has dropout."""
    p = job.spec.adapter.lora_dropout
    if not p:
        return peft_loss(model, job, step)
    samples = [job.data.train.samples[i] for i in job.progress.order.batch(step)]
    keys_BL = torch.zeros(len(samples), max(s.length for s in samples), dtype=torch.int32)
    for row, sample in enumerate(samples):
        keys_BL[row, : sample.length] = torch.from_numpy(row_keys(mix(job.spec.seed, step, row), sample.length))
    for name, module in model.named_modules():
        dropouts = getattr(module, "lora_dropout", None) or getattr(module, "vera_dropout", None)
        if dropouts is not None:
            module.training = True
            dropouts["default"] = StatedDropout(name.removeprefix("base_model.model."), p)
            dropouts["default"].keys_BL = keys_BL
    return peft_loss(model, job, step)


def made(settings: list[dict[str, Any]]) -> list[Job]:
    """Jobs with an epsilon above the rounding, as the last of test_exact."""
    return [
        (job_spec(f"job{i}", max_steps=STEPS, seed=i, adam_epsilon=1e-3, **own), random_data(i, num_samples=14 + i))
        for i, own in enumerate(settings)
    ]


def test_dora_when_trained_beside_others_then_equals_peft_alone():
    """Biases, patterns, a start that has an effect, dropout, and a LoRA with dropout beside them."""
    pattern = {"q_proj": 2, r"layers\.1\.mlp\.down_proj": 6}
    settings: list[dict[str, Any]] = [
        {"adapter": {"method": "dora", "r": 4}, "weight_decay": 0.1, "global_batch_size": 6},
        {"adapter": {"method": "dora", "r": 3, "use_rslora": True, "init_lora_weights": False, "rank_pattern": pattern},
         "max_grad_norm": 0.05, "lr_scheduler_type": "cosine"},
        {"adapter": {"method": "dora", "r": 4, "lora_dropout": 0.3}, "loraplus_lr_ratio": 4.0},
        {"adapter": {"r": 4, "lora_dropout": 0.2}},
    ]  # fmt: skip
    assert_equal_peft("llama_bias", "reference", made(settings), dropping_loss)


def test_dora_when_weights_are_transposed_then_equals_peft_alone():
    assert_equal_peft(
        "gpt2", "reference", made([{"adapter": {"method": "dora", "r": 4, "lora_dropout": 0.2}}]), dropping_loss
    )


def test_vera_when_trained_beside_others_then_equals_peft_alone():
    """Ranks above and below the modules' sizes, on all and on some of them, and dropout; a DoRA beside them."""
    settings: list[dict[str, Any]] = [
        {"adapter": {"method": "vera"}, "weight_decay": 0.1, "global_batch_size": 6, "learning_rate": 2e-2},
        {"adapter": {"method": "vera", "vera_rank": 5, "projection_prng_key": 7, "lora_dropout": 0.3,
                     "target_modules": ["q_proj", "down_proj"]}, "max_grad_norm": 0.05, "learning_rate": 2e-2},
        {"adapter": {"method": "dora", "r": 4, "freeze_a": True}},
    ]  # fmt: skip
    assert_equal_peft("llama_bias", "reference", made(settings), dropping_loss)


@pytest.mark.parametrize("kernels", ["reference", "fused"])
def test_lora_when_a_is_frozen_then_equals_peft_without_gradients_of_a(kernels):
    settings: list[dict[str, Any]] = [
        {"adapter": {"r": 4, "freeze_a": True, "lora_dropout": 0.3}, "weight_decay": 0.1, "global_batch_size": 6},
        {"adapter": {"r": 8}},
    ]
    given = made(settings)
    outcomes = assert_equal_peft("llama_bias", kernels, given, dropping_loss)
    start = random_backbone("llama_bias").new_adapter(given[0][0].adapter, given[0][0].seed).tensors()
    assert all(outcomes["job0"].adapter[path][0].equal(a_RD) for path, (a_RD, _) in start.items())
