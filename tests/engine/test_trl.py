"""Jobs that learn from pairs equal PEFT's adapters trained by the losses of TRL's own trainers, on the same batches.

TRL's part of a loss that is of the chosen answers' tokens alone (CPO, ORPO) is a mean over all tokens of a batch, so
that a pair counts by its length; here it is one over pairs. With one pair a batch both are the same. In ORPO TRL lets
prompts count there too: both are the same where all is answer.

TRL brings much that no other test should find installed, so it lies beside the suite: `make test-all` puts it there and
runs this file with it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_exact import BOUND, STEPS, largest_difference, peft_model, train_peft_model
from test_preferences_exact import LOSSES, pair_job
from tiny_models import finish, random_backbone, random_model
from tiny_tokenizer import make_tokenizer

from weft.data.dataset import JobData
from weft.data.samples import Sample, Samples
from weft.engine.engine import Engine
from weft.engine.jobs.live_job import LiveJob

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

SETTINGS: dict[str, dict[str, Any]] = {
    "dpo": {"beta": 0.4},
    "hinge": {"beta": 0.3, "loss_type": ["hinge"]},
    "ipo": {"beta": 0.5, "loss_type": ["ipo"]},
    "cpo": {"beta": 0.2, "cpo_alpha": 0.5, "alpha": 0.0},
    "simpo": {"beta": 2.0, "simpo_gamma": 0.3, "loss_type": "simpo", "cpo_alpha": 0.0},
    "orpo": {"beta": 0.3},
}
"""By the names of `LOSSES`, in TRL's words."""


def trainer_of(name: str, model: Any, folder: Path) -> Any:
    """TRL's trainer of a loss, for a model of ours; its `train` is never called."""
    import trl
    from datasets import Dataset
    from trl.experimental.cpo import CPOConfig, CPOTrainer
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    kinds = {"cpo": (CPOTrainer, CPOConfig), "simpo": (CPOTrainer, CPOConfig), "orpo": (ORPOTrainer, ORPOConfig)}
    make, config = kinds.get(name, (trl.DPOTrainer, trl.DPOConfig))
    tokenizer = make_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    trainer = make(
        model=model,
        args=config(
            str(folder), use_cpu=True, bf16=False, gradient_checkpointing=False, report_to=[], **SETTINGS[name]
        ),
        train_dataset=Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}]),
        processing_class=tokenizer,
    )
    # The tiny model has fewer words than the tokenizer, which is not used for anything else.
    trainer.pad_token_id = trainer.padding_value = 0
    return trainer


def padded(samples: list[Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, which of them there are, and which are answers."""
    ids = torch.zeros(len(samples), max(s.length for s in samples), dtype=torch.long)
    mask, answers = torch.zeros_like(ids), torch.zeros_like(ids)
    for row, sample in enumerate(samples):
        ids[row, : sample.length] = torch.from_numpy(sample.tokens.astype("int64"))
        mask[row, : sample.length] = 1
        answers[row, : sample.length] = torch.from_numpy(sample.supervised.astype("int64"))
    return ids, mask, answers


def trl_batch(name: str, samples: list[Any]) -> dict[str, torch.Tensor]:
    """Pairs as TRL's collators hand them on."""
    if name in ("dpo", "hinge", "ipo"):
        ids, mask, answers = padded(samples[::2] + samples[1::2])
        return {"input_ids": ids, "attention_mask": mask, "completion_mask": answers}
    found = {}
    for side, own in (("chosen", samples[::2]), ("rejected", samples[1::2])):
        ids, mask, answers = padded(own)
        labels = ids.masked_fill(answers == 0, -100)
        found |= {f"{side}_input_ids": ids, f"{side}_attention_mask": mask, f"{side}_labels": labels}
    return found


@pytest.mark.parametrize("name", SETTINGS)
def test_pairs_when_trl_makes_the_loss_then_the_job_equals_it_step_by_step(name, tmp_path):
    assert name in LOSSES
    spec, data = pair_job(name, 3)
    spec = replace(spec, max_steps=STEPS)
    if name in ("cpo", "orpo"):
        spec = replace(spec, global_batch_size=1)
    if name == "orpo":
        whole = [Sample(sample.tokens, np.arange(sample.length) > 0) for sample in data.train.samples]
        data = JobData(replace(data.train, samples=Samples.of(whole)), None)
    engine = Engine(random_backbone("llama_odd"), capacity=120)
    engine.submit(spec, data)
    start = engine.executor.adapter_of(name)
    outcome = finish(engine)[name]
    plain = random_model("llama_odd")
    plain.set_attn_implementation("eager")
    model = peft_model(plain, engine.jobs[name], start)
    trainer = trainer_of(name, model, tmp_path)

    def loss_of(_: Any, job: LiveJob, step: int) -> tuple[torch.Tensor, float]:
        of = job.data.train
        samples = [of.samples[i] for group in job.progress.order.batch(step) for i in of.sample_indices(group)]
        return trainer.compute_loss(trainer.model, trl_batch(name, samples)), 0.0

    expected, losses, _ = train_peft_model(model, engine.jobs[name], list(start), loss_of)
    assert len(losses) == STEPS
    assert outcome.losses == pytest.approx(losses, rel=BOUND, abs=BOUND)
    assert largest_difference(outcome.adapter, expected) <= BOUND
    assert largest_difference(outcome.adapter, start) > 0.01, "the job learned nothing"
