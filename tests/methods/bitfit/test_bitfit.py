"""BitFit trains what autograd trains when only biases need gradients, and merges where there is a bias."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tiny_families import plain_model
from tiny_models import finish, job_spec, random_backbone, random_data
from torch import nn

from weft.adapters.method import ModuleTensors
from weft.engine.engine import Engine
from weft.engine.jobs.live_job import LiveJob
from weft.errors import AdapterFileError
from weft.methods.registry import METHODS
from weft.spec import AdapterSpec

SPEC = {"method": "bitfit"}


def train_plainly(name: str, job: LiveJob, paths: list[str]) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The job alone by transformers, autograd and torch.optim, on biases of its own; returns what they changed by."""
    model, before = plain_model(name).requires_grad_(False), {}
    for path in paths:
        linear = model.get_submodule(path)
        given = torch.zeros(linear.out_features) if linear.bias is None else linear.bias.detach()
        linear.bias, before[path] = nn.Parameter(given.clone()), given.clone()
    biases = {path: model.get_submodule(path).bias for path in paths}
    rate, epsilon = job.spec.learning_rate, job.spec.adam_epsilon
    optimizer, losses = torch.optim.AdamW(biases.values(), lr=rate, eps=epsilon, weight_decay=0.0), []
    for step in range(job.progress.order.num_steps):
        samples = [job.data.train.samples[i] for i in job.progress.order.batch(step)]
        total = torch.zeros(())
        for sample in samples:
            tokens = torch.from_numpy(sample.tokens.astype("int64"))
            targets = torch.where(torch.from_numpy(sample.supervised.copy()), tokens, -100)[1:]
            total = total + F.cross_entropy(model(tokens[None]).logits[0, :-1], targets, reduction="sum")
        loss = total / sum(int(sample.supervised[1:].sum()) for sample in samples)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(biases.values(), job.spec.max_grad_norm)
        optimizer.step()
        losses.append(float(loss.detach()))
    return {path: bias.detach() - before[path] for path, bias in biases.items()}, losses


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt_neox"])
def test_job_when_trained_beside_others_then_equals_plain_autograd(name):
    """Twenty steps in fp32: without biases, with some, and with all.

    Biases of keys hardly matter to a softmax; the epsilon keeps AdamW from making steps of their rounding errors.
    """
    engine = Engine(random_backbone(name), capacity=40)
    settings = {"max_steps": 20, "lr_scheduler_type": "constant", "learning_rate": 3e-2, "adam_epsilon": 1e-3}
    engine.submit(job_spec("me", adapter=SPEC, seed=2, **settings), random_data(2))
    engine.submit(job_spec("lora", seed=4), random_data(4))
    start = engine.adapter_of("me")
    mine = finish(engine)["me"]
    changes, losses = train_plainly(name, engine.jobs["me"], list(start))
    assert len(losses) == 20 and mine.losses == pytest.approx(losses, rel=1e-5)
    for path, (change,) in mine.adapter.items():
        torch.testing.assert_close(change, changes[path], rtol=1e-5, atol=1e-5)
        assert not torch.equal(change, start[path][0]), "it has not learned"


def test_merge_when_the_base_has_no_bias_then_refused_in_one_sentence():
    tensors: ModuleTensors = (torch.ones(4),)
    with pytest.raises(AdapterFileError, match=r"layers.0.q_proj of the base has no bias that could hold"):
        METHODS["bitfit"].merge(AdapterSpec(**SPEC), "layers.0.q_proj", tensors, nn.Linear(3, 4, bias=False))
