"""Jobs with virtual tokens equal the same jobs trained by PEFT's prompt and prefix tuning."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from test_exact import BOUND, peft_loss
from tiny_models import finish, job_spec, random_backbone, random_data, random_model

from weft.engine.engine import Engine

COUNT, STEPS = 3, 12
CONFIGS: dict[str, Any] = {"prompt_tuning": peft.PromptTuningConfig, "prefix_tuning": peft.PrefixTuningConfig}


def joined(adapter: dict[str, Any]) -> torch.Tensor:
    """All rows as PEFT has them, layer after layer."""
    return torch.cat([rows for (rows,) in adapter.values()], dim=1)


def of_samples(model: Any) -> Any:
    """The model without the logits of virtual tokens."""
    return lambda input_ids, **more: SimpleNamespace(
        logits=model(input_ids=input_ids, **more).logits[:, -input_ids.shape[1] :]
    )


@pytest.mark.parametrize("kind", tuple(CONFIGS))
def test_job_when_trained_then_equals_peft(kind):
    spec = job_spec(
        "me", adapter={"method": kind, "num_virtual_tokens": COUNT}, max_steps=STEPS, learning_rate=0.05,
        adam_epsilon=1e-3, lr_scheduler_type="constant", warmup_steps=0,
    )  # fmt: skip
    engine = Engine(random_backbone("llama_odd"), capacity=64)
    engine.submit(spec, random_data(4, num_samples=12))
    start = joined(engine.executor.adapter_of("me"))
    outcome = finish(engine)["me"]
    plain = random_model("llama_odd")
    plain.set_attn_implementation("eager")
    model = peft.get_peft_model(plain, CONFIGS[kind](task_type="CAUSAL_LM", num_virtual_tokens=COUNT))
    model.prompt_encoder["default"].embedding.weight.data.copy_(start)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.05, eps=1e-3, weight_decay=spec.weight_decay)
    for step, loss in enumerate(outcome.losses):
        theirs, _ = peft_loss(of_samples(model), engine.jobs["me"], step)
        theirs.backward()
        torch.nn.utils.clip_grad_norm_(trained, spec.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        assert loss == pytest.approx(theirs.item(), rel=BOUND)
    assert len(outcome.losses) == STEPS
    ours, expected = joined(outcome.adapter), trained[0].detach()
    assert float((ours - expected).abs().max() / expected.abs().max()) <= BOUND
    assert not torch.allclose(ours, start, atol=1e-2), "the job learned nothing"
