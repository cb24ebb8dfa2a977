"""Jobs of every method equal the same jobs trained alone by PEFT, with the dropout masks that Weft draws."""

from __future__ import annotations

import copy
from typing import Any

import peft
import pytest
import torch
from covering import slow
from test_exact import (
    BOUND,
    CAPACITY,
    STEPS,
    assert_equal_peft,
    largest_difference,
    peft_loss,
    peft_model,
    train_peft_model,
)
from tiny_models import Job, finish, job_spec, random_backbone, random_data, random_model, submit
from torch import nn

from weft.engine.engine import Engine
from weft.engine.inference.attach import attach_adapter, read_named
from weft.engine.jobs.live_job import LiveJob
from weft.kernels.dropout import drop, keep_mask, mix, module_key, row_keys
from weft.model.packed import SlotSample, pack_samples
from weft.store.peft_files import write_adapter


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


@pytest.mark.parametrize("kernels", [slow("reference"), "fused"])
def test_lora_when_a_is_frozen_then_equals_peft_without_gradients_of_a(kernels):
    settings: list[dict[str, Any]] = [
        {"adapter": {"r": 4, "freeze_a": True, "lora_dropout": 0.3}, "weight_decay": 0.1, "global_batch_size": 6},
        {"adapter": {"r": 8}},
    ]
    given = made(settings)
    outcomes = assert_equal_peft("llama_bias", kernels, given, dropping_loss)
    start = random_backbone("llama_bias").new_adapter(given[0][0].adapter, given[0][0].seed).tensors()
    assert all(outcomes["job0"].adapter[path][0].equal(a_RD) for path, (a_RD, _) in start.items())


@pytest.mark.filterwarnings("ignore:Using Rank-Stabilized LoRA")
@pytest.mark.parametrize("init", ["pissa", slow("olora")])
def test_lora_when_it_starts_as_a_part_of_the_weight_then_equals_peft_and_fits_the_base_as_it_was(init, tmp_path):
    """PEFT takes the part out of the base; Weft subtracts it, and writes a LoRA of twice the rank."""
    settings = {"r": 3, "lora_alpha": 5, "init_lora_weights": init, "use_rslora": True, "rank_pattern": {"q_proj": 2}}
    plain, backbone = random_model("llama_bias"), random_backbone("llama_bias")
    plain.set_attn_implementation("eager")
    engine = Engine(backbone, capacity=CAPACITY)
    given = made([{"adapter": settings, "weight_decay": 0.1}, {"adapter": {"r": 4}}])
    submit(engine, *given)
    live, start = engine.jobs["job0"], engine.executor.adapter_of("job0")
    outcome = finish(engine)["job0"]
    model = peft_model(plain, live, {path: tensors[:2] for path, tensors in start.items()})
    torch.testing.assert_close(plain_logits(model, live), plain_logits(plain, live), rtol=1e-3, atol=1e-4)
    trained, losses, _ = train_peft_model(model, live, list(start))
    assert outcome.losses == pytest.approx(losses, rel=BOUND)
    mine = {path: tensors[:2] for path, tensors in outcome.adapter.items()}
    assert largest_difference(mine, trained) <= BOUND
    spec, names = live.spec.adapter, ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    write_adapter(tmp_path / "a", spec, outcome.adapter, base_model="tiny", target_names=names)
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(plain), tmp_path / "a")
    torch.testing.assert_close(plain_logits(loaded, live), plain_logits(model, live), rtol=1e-4, atol=1e-4)
    slot = attach_adapter(backbone, read_named(str(tmp_path / "a")))
    sample = live.data.train.samples[0]
    found = backbone.logits(pack_samples([SlotSample(sample, slot)], None, backbone.device))
    torch.testing.assert_close(found, plain_logits(loaded, live), rtol=1e-4, atol=1e-4)


def plain_logits(model: Any, job: LiveJob) -> torch.Tensor:
    """Of the job's first sample."""
    tokens = torch.from_numpy(job.data.train.samples[0].tokens.astype("int64"))
    with torch.no_grad():
        return model(tokens[None]).logits[0]
