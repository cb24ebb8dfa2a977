"""Jobs that learn from pairs equal the same jobs trained alone by PEFT, with the loss written out on its logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_exact import BOUND, STEPS, largest_difference, train_with_peft
from tiny_models import Job, finish, job_spec, random_backbone, random_data, random_model

from weft.data.dataset import JobData
from weft.data.samples import Samples
from weft.engine.engine import Engine
from weft.engine.jobs.live_job import LiveJob
from weft.objectives.preference import Cpo, Dpo, Kto, Orpo, SimPo

LOSSES: dict[str, Any] = {
    "dpo": Dpo(0.4),
    "smooth": Dpo(1.0, label_smoothing=0.1),
    "hinge": Dpo(0.3, "hinge"),
    "ipo": Dpo(0.5, "ipo"),
    "cpo": Cpo(0.2, alpha=0.5),
    "simpo": SimPo(2.0, gamma=0.3),
    "orpo": Orpo(0.3),
    "kto": Kto(0.4, desirable_weight=1.5),
}


def pair_job(name: str, seed: int) -> Job:
    """A job on random pairs; an epsilon above the rounding takes chance out of Adam, as in test_exact."""
    spec = job_spec(name, max_steps=STEPS, seed=seed, adapter={"r": 4}, adam_epsilon=1e-3, global_batch_size=3)
    data = random_data(seed, num_samples=16)
    train = replace(data.train, objective=LOSSES[name])
    if name == "kto":
        train = replace(train, samples=Samples.of([s.labelled(i % 3 == 0) for i, s in enumerate(train.samples)]))
    return spec, JobData(train, None)


def answer_logprobs(model: Any, samples: list[Any]) -> torch.Tensor:
    """The log-probability of each sample's supervised tokens together, of one padded batch."""
    ids = torch.zeros(len(samples), max(s.length for s in samples), dtype=torch.long)
    mask, counted = torch.zeros_like(ids), torch.zeros(ids.shape)
    for row, sample in enumerate(samples):
        ids[row, : sample.length] = torch.from_numpy(sample.tokens.astype("int64"))
        mask[row, : sample.length] = 1
        counted[row, : sample.length] = torch.from_numpy(sample.supervised.astype("float32"))
    logprobs = model(input_ids=ids, attention_mask=mask).logits[:, :-1].log_softmax(dim=-1)
    return (logprobs.gather(2, ids[:, 1:, None])[..., 0] * counted[:, 1:]).sum(dim=1)


def kto_loss(model: Any, job: LiveJob, step: int) -> torch.Tensor:
    """The mean loss of the answers of a global batch, each beside its prompt with the next row's answer."""
    data, losses = job.data.train, []
    objective = data.objective
    assert isinstance(objective, Kto)
    for group in job.progress.order.batch(step):
        samples = [member.sample for member in data.members(int(group))[:2]]
        with torch.no_grad(), model.disable_adapter():
            references = answer_logprobs(model, samples)
        gain, other = answer_logprobs(model, samples) - references
        ahead = objective.beta * (gain - other.detach().clamp(min=0))
        if samples[0].label:
            losses.append(objective.desirable_weight * (1 - torch.sigmoid(ahead)))
        else:
            losses.append(objective.undesirable_weight * (1 - torch.sigmoid(-ahead)))
    return torch.stack(losses).mean()


def peft_loss(model: Any, job: LiveJob, step: int) -> tuple[torch.Tensor, float]:
    """The mean loss of the pairs of a global batch; accuracy is of no interest here."""
    data = job.data.train
    if isinstance(data.objective, Kto):
        return kto_loss(model, job, step), 0.0
    samples = [data.samples[i] for group in job.progress.order.batch(step) for i in data.sample_indices(group)]
    objective, lengths = data.objective, torch.tensor([s.num_supervised for s in samples])
    sums = answer_logprobs(model, samples)
    means = sums / lengths
    if isinstance(objective, Orpo):
        odds = means - torch.log1p(-means.exp())
        return (-means[::2] - objective.beta * F.logsigmoid(odds[::2] - odds[1::2])).mean(), 0.0
    if isinstance(objective, SimPo):
        return -F.logsigmoid(objective.beta * (means[::2] - means[1::2]) - objective.gamma).mean(), 0.0
    if isinstance(objective, Cpo):
        return (-F.logsigmoid(objective.beta * (sums[::2] - sums[1::2])) - objective.alpha * means[::2]).mean(), 0.0
    with torch.no_grad(), model.disable_adapter():
        references = answer_logprobs(model, samples)
    gains = (sums - references) / (lengths if objective.loss_type == "ipo" else 1)
    margins = gains[::2] - gains[1::2]
    if objective.loss_type == "ipo":
        return (margins - 1 / (2 * objective.beta)).square().mean(), 0.0
    if objective.loss_type == "hinge":
        return F.relu(1 - objective.beta * margins).mean(), 0.0
    logits, smooth = objective.beta * margins, objective.label_smoothing
    return (-(1 - smooth) * F.logsigmoid(logits) - smooth * F.logsigmoid(-logits)).mean(), 0.0


def test_pairs_when_trained_together_then_each_job_equals_peft_alone():
    plain = random_model("llama_odd")
    plain.set_attn_implementation("eager")
    engine = Engine(random_backbone("llama_odd"), capacity=120)
    for seed, name in enumerate(LOSSES):
        engine.submit(*pair_job(name, seed))
    starts = {job: engine.executor.adapter_of(job) for job in engine.jobs}
    outcomes = finish(engine)
    for job, live in engine.jobs.items():
        expected, losses, _ = train_with_peft(plain, live, starts[job], peft_loss)
        assert outcomes[job].losses == pytest.approx(losses, rel=BOUND, abs=BOUND), job
        assert largest_difference(outcomes[job].adapter, expected) <= BOUND, job
        assert largest_difference(outcomes[job].adapter, starts[job]) > 0.01, "the job learned nothing"
