"""Evaluation losses and accuracies are those of transformers, whatever shares their microbatches."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tiny_models import (
    attending_eagerly,
    dataset,
    finish,
    job_spec,
    random_backbone,
    random_data,
    random_model,
    random_sample,
)

from weft.data.samples import Sample
from weft.engine.engine import Engine
from weft.engine.execute.evaluate import ScoreRequest, mean_scores
from weft.spec import AdapterSpec


def samples(seed: int, number: int = 7) -> list[Sample]:
    rng = np.random.default_rng(seed)
    return [random_sample(rng, int(rng.integers(2, 20))) for _ in range(number)]


@pytest.mark.parametrize("name", ["llama", "gemma2", "opt"])
def test_mean_scores_when_bare_then_those_of_transformers(name):
    """On samples whose every third token is the model's own choice: random ones are hit too seldom."""
    backbone = random_backbone(name)
    total, num_hits, count, scored = 0.0, 0, 0, []
    with attending_eagerly(random_model(name)) as model, torch.no_grad():
        for drawn in samples(0):
            tokens = drawn.tokens.astype(np.int64)
            for index in range(2, drawn.length, 3):
                tokens[index] = int(model(torch.from_numpy(tokens[None, :index])).logits[0, -1].argmax())
            sample = Sample(tokens.astype(drawn.tokens.dtype), drawn.supervised)
            scored.append(sample)
            ids = torch.from_numpy(sample.tokens.astype(np.int64))
            rows = torch.from_numpy(sample.supervised.copy())[1:]
            logits = model(ids[None]).logits[0, :-1]
            total += F.cross_entropy(logits[rows], ids[1:][rows], reduction="sum").item()
            num_hits += int((logits.argmax(dim=-1) == ids[1:])[rows].sum())
            count += int(rows.sum())
    (mine,) = mean_scores(backbone, [ScoreRequest(None, dataset(scored))], 64, 128)
    assert mine.loss == pytest.approx(total / count, rel=1e-5)
    assert mine.accuracy == num_hits / count and 0.2 < mine.accuracy < 0.6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mean_scores_when_evaluated_together_or_apart_then_the_same_bits(dtype):
    backbone = random_backbone("llama_odd", dtype=dtype)
    adapters = [backbone.new_adapter(AdapterSpec(r=r, init_lora_weights=False, lora_dropout=0.5), r) for r in (1, 3, 8)]
    requests = [ScoreRequest(backbone.attach(adapter), dataset(samples(i))) for i, adapter in enumerate(adapters)]
    requests.append(ScoreRequest(None, dataset(samples(9))))
    alone = [mean_scores(backbone, [request], 24, 128)[0] for request in requests]
    assert len({means.loss for means in alone}) == 4
    for capacity in (20, 33, 300):
        assert mean_scores(backbone, requests, capacity, 128) == alone
    assert mean_scores(backbone, requests[::-1], 50, 128) == alone[::-1]


def test_mean_scores_when_nothing_is_supervised_then_nan():
    quiet = Sample(np.array([3, 4, 5]), np.zeros(3, dtype=bool))
    requests = [ScoreRequest(None, dataset(each)) for each in ([quiet], samples(0))]
    silent, other = mean_scores(random_backbone("llama"), requests, 64, 128)
    assert math.isnan(silent.loss) and math.isnan(silent.accuracy) and math.isfinite(other.loss)


def evaluated(*names: str) -> tuple[dict[str, list[float]], list[dict[str, int]]]:
    """The evaluation losses of jobs that train together, and who was evaluated with whom."""
    every = {"a": 2, "b": 2, "c": 3}
    engine = Engine(random_backbone("llama"), capacity=256)
    for name in names:
        seed = "abc".index(name)
        engine.submit(job_spec(name, seed=seed, eval_steps=every[name], eval_data=5), random_data(seed, num_eval=5))
    losses = {name: outcome.eval_losses for name, outcome in finish(engine).items()}
    return losses, [span.args["jobs"] for span in engine.timeline.spans if span.name == "eval"]


def test_evaluations_when_due_at_the_same_time_then_share_a_pass_and_keep_their_bits():
    losses, passes = evaluated("a", "b", "c")
    assert [sorted(jobs) for jobs in passes] == [["a", "b"], ["c"], ["a", "b"], ["a", "b", "c"]]
    assert all(losses[name] == evaluated(name)[0][name] for name in "abc")


def test_evaluation_when_a_job_is_stopped_by_anothers_result_then_none_is_evaluated_twice():
    engine = Engine(random_backbone("llama"), capacity=256)
    for seed, name in enumerate("ab"):
        engine.submit(job_spec(name, seed=seed, eval_steps=2, eval_data=5), random_data(seed, num_eval=5))
    evaluations = []
    for event in engine.events():
        if event.kind == "eval":
            evaluations.append((event.job, event.step))
            if event.job == "a":
                engine.cancel("b")
    assert evaluations == [("a", 2), ("b", 2), ("a", 4), ("a", 6)]
    assert sum(span.name == "eval" for span in engine.timeline.spans) == 3
