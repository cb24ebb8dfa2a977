"""Jobs with a head equal the same jobs trained alone by PEFT on transformers' models for classification."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import torch.nn.functional as F
import transformers
from test_exact import BOUND, STEPS, largest_difference, peft_optimizer
from tiny_models import Job, assert_same_bits, finish, job_spec, random_backbone, random_data, random_model, small_job
from tiny_models import train as train_jobs

from weft.adapters.parts import HEAD
from weft.data.dataset import JobData
from weft.data.samples import Sample, Samples
from weft.engine.engine import Engine
from weft.engine.jobs.live_job import LiveJob
from weft.objectives.heads import Classification, Reward, TokenClassification
from weft.store.peft_files import read_adapter, read_head, write_adapter

OBJECTIVES: dict[str, Any] = {
    "texts": Classification(("a", "b", "c")),
    "words": TokenClassification(("O", "B", "I", "X")),
    "reward": Reward(),
}


def labelled(name: str, sample: Sample, number: int) -> Sample:
    """A random sample with what its objective reads."""
    if name == "words":
        labels = np.where(sample.supervised, sample.tokens % 4, np.nan).astype(np.float32)
        labels[0] = number % 4
        return Sample(sample.tokens, ~np.isnan(labels), None, labels)
    return sample.labelled_end(number % 3 if name == "texts" else (number // 2 % 3) / 4)


def head_job(name: str, seed: int = 0, **settings: Any) -> Job:
    adapter = {"method": "ia3"} if name == "texts" else {"r": 4}
    options: dict[str, Any] = {
        "max_steps": STEPS,
        **({} if settings.get("optim") == "lion" else {"adam_epsilon": 1e-3}),
        "global_batch_size": 3,
        "seed": seed,
        **settings,
    }
    spec = job_spec(name, adapter=adapter, **options)
    data = random_data(seed, num_samples=16, num_eval=4)
    assert data.eval is not None
    train, held = (
        replace(
            part,
            objective=OBJECTIVES[name],
            samples=Samples.of([labelled(name, s, i) for i, s in enumerate(part.samples)]),
        )
        for part in (data.train, data.eval)
    )
    return spec, JobData(train, held)


def classifier(name: str, plain: Any) -> Any:
    """Transformers' own model for the task, on the same weights."""
    kind = (
        transformers.AutoModelForTokenClassification
        if name == "words"
        else (transformers.AutoModelForSequenceClassification)
    )
    config = type(plain.config)(**{**plain.config.to_dict(), "num_labels": OBJECTIVES[name].num_labels})
    config.pad_token_id, config.classifier_dropout, config._attn_implementation = 0, 0.0, "eager"
    model = kind.from_config(config)
    model.model.load_state_dict(plain.model.state_dict())
    return model


def padded(samples: list[Sample]) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids, and the labels of words."""
    ids = torch.zeros(len(samples), max(s.length for s in samples), dtype=torch.long)
    labels = torch.full(ids.shape, -100)
    for row, sample in enumerate(samples):
        ids[row, : sample.length] = torch.from_numpy(sample.tokens.astype("int64"))
        known = torch.from_numpy(np.nan_to_num(sample.labels, nan=-100))
        labels[row, : sample.length] = known.long()
    return ids, labels


def loss_of(model: Any, job: LiveJob, step: int) -> torch.Tensor:
    data = job.data.train
    samples = [data.samples[i] for group in job.progress.order.batch(step) for i in data.sample_indices(int(group))]
    ids, tags = padded(samples)
    inputs = {"input_ids": ids, "attention_mask": (ids != 0).long()}
    if job.name == "words":
        return model(**inputs, labels=tags).loss
    if job.name == "texts":
        return model(**inputs, labels=torch.tensor([int(s.label) for s in samples])).loss
    rewards = model(**inputs).logits[:, 0]
    margins = torch.tensor([s.label for s in samples[::2]])
    return -F.logsigmoid(rewards[::2] - rewards[1::2] - margins).mean()


def peft_model(plain: Any, job: LiveJob, directory: Path) -> Any:
    """The job's starting adapter, as PEFT loads it from our files."""
    return peft.PeftModel.from_pretrained(classifier(job.name, plain), directory, is_trainable=True)


def test_heads_when_trained_together_then_each_job_equals_peft_alone(tmp_path):
    """Files load in PEFT at the start and at the end: losses, weights and logits are equal."""
    plain = random_model("llama_odd")
    engine = Engine(random_backbone("llama_odd"), capacity=120)
    for seed, name in enumerate(OBJECTIVES):
        engine.submit(*head_job(name, seed))
    engine.submit(*small_job("plain"))

    def write(name: str, stage: str) -> Path:
        write_adapter(
            tmp_path / f"{stage}-{name}", engine.jobs[name].spec.adapter, engine.executor.adapter_of(name),
            base_model="random", target_names=engine.executor.target_names(name), head=OBJECTIVES[name],
        )  # fmt: skip
        return tmp_path / f"{stage}-{name}"

    starts = {name: write(name, "start") for name in OBJECTIVES}
    outcomes = finish(engine)
    for name in OBJECTIVES:
        live = engine.jobs[name]
        model = peft_model(plain, live, starts[name])
        optimizer = peft_optimizer(model, live.spec)
        schedule = transformers.get_scheduler("linear", optimizer, 0, STEPS)
        losses = []
        for step in range(STEPS):
            loss = loss_of(model, live, step)
            loss.backward()
            torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert outcomes[name].losses == pytest.approx(losses, rel=BOUND, abs=BOUND), name
        model.save_pretrained(tmp_path / "peft" / name, save_embedding_layers=False)
        _, expected, _ = read_adapter(tmp_path / "peft" / name)
        assert largest_difference(outcomes[name].adapter, expected) <= BOUND, name
        started = read_adapter(starts[name])[1]
        assert largest_difference({HEAD: expected[HEAD]}, {HEAD: started[HEAD]}) > 0.01, "the head learned nothing"
        ours = peft_model(plain, live, write(name, "end")).eval()
        ids = padded([live.data.train.samples[0]])[0]
        torch.testing.assert_close(ours(input_ids=ids).logits, model.eval()(input_ids=ids).logits)
        directory = tmp_path / f"end-{name}"
        _, tensors, config = read_adapter(directory)
        assert read_head(directory, config, tensors).labels == OBJECTIVES[name].labels


@pytest.mark.parametrize("kernels", ["reference", "fused"])
def test_heads_when_trained_beside_others_then_have_the_bits_of_being_alone(kernels):
    backbone = random_backbone("llama", kernels=kernels)
    short = {"max_steps": 5, "eval_steps": 2}
    optimizers = dict(zip(OBJECTIVES, ("adamw", "muon", "lion"), strict=True))
    mine = [head_job(name, optim=optimizers[name], **short) for name in OBJECTIVES]
    together = train_jobs(backbone, [small_job("n0", 0), *mine, small_job("n1", 1)])
    for job in mine:
        assert_same_bits(train_jobs(backbone, [job])[job[0].name], together[job[0].name])
    assert_same_bits(train_jobs(backbone, [small_job("n0", 0)])["n0"], together["n0"])
