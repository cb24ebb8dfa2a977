"""An average of the weights: torch's, kept with a job, and what is evaluated and exported of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import job_spec, random_data, shallow_backbone, submit, train
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

from weft.engine.engine import Engine
from weft.engine.events import EvalDone, StepDone
from weft.engine.execute.weights import JobWeights, WeightAverage
from weft.kernels.adamw import Updated
from weft.store.peft_files import read_adapter


@pytest.fixture(scope="module")
def backbone():
    return shallow_backbone("llama_odd")


def weights(backbone: Any, **settings: Any) -> JobWeights:
    spec = job_spec("me", ema_decay=0.8, **settings)
    return JobWeights(spec, backbone.new_adapter(spec.adapter, 1))


def test_average_when_it_follows_many_steps_then_equals_torch(backbone):
    """Over 24 steps, and without those that were left out."""
    mine = weights(backbone)
    module = torch.nn.ParameterDict({name: params.clone() for name, params in mine.adapter.flat().items()})
    oracle = AveragedModel(module, avg_fn=get_ema_avg_fn(0.8))
    for step in range(24):
        for name, params in mine.adapter.flat().items():
            params.add_(torch.randn(params.shape, generator=torch.Generator().manual_seed(step)))
            module[name].data.copy_(params)
        mine.after_step(Updated(1.0, 1.0, skipped=step == 7))
        if step != 7:
            oracle.update_parameters(module)
    assert mine.average is not None and mine.average.count == 23
    for name, params in mine.average.params.items():
        assert (params - oracle.module[name]).norm() <= 1e-6 * params.norm()


def test_average_when_it_is_shown_then_the_last_weights_come_back_to_the_bit(backbone):
    """Nothing is shown before the first step."""
    mine = weights(backbone)
    first = {name: params.clone() for name, params in mine.adapter.flat().items()}
    with mine.average_shown():
        assert all(params.equal(first[name]) for name, params in mine.adapter.flat().items())
    mine.after_step(Updated(1.0, 1.0, skipped=False))
    mine.adapter.groups["b"].params.add_(1.0)
    last = {name: params.clone() for name, params in mine.adapter.flat().items()}
    with mine.average_shown():
        assert all(params.equal(first[name]) for name, params in mine.adapter.flat().items())
    assert all(params.equal(last[name]) for name, params in mine.adapter.flat().items())


def test_job_when_it_keeps_an_average_then_trains_as_without_and_hands_the_average_out(backbone, tmp_path):
    """Losses stay; evaluations, the written adapter and what Python gets are those of the average."""
    data = random_data(3, num_eval=4)
    settings = {"eval_data": 4, "eval_steps": 1, "max_steps": 5, "save_steps": 2}
    plain = train(backbone, [(job_spec("me", **settings), data)])["me"]
    seen: list[Any] = []
    engine = Engine(backbone, capacity=64)
    engine.keep_in(tmp_path / "run")
    submit(engine, (job_spec("me", ema_decay=0.5, **settings), data))
    oracle: WeightAverage | None = None
    for event in engine.events():
        seen.append(event)
        if isinstance(event, StepDone):
            adapter = engine.executor.jobs["me"].weights.adapter  # type: ignore[attr-defined]
            oracle = oracle or WeightAverage(adapter, 0.5)
            oracle.follow(adapter)
    assert [event.loss for event in seen if isinstance(event, StepDone)] == plain.losses
    evals = [event.eval_loss for event in seen if isinstance(event, EvalDone)]
    assert evals[0] == plain.eval_losses[0] and evals[1:] != plain.eval_losses[1:]
    assert oracle is not None
    expected = adapter.split(oracle.params)
    _, written, _ = read_adapter(tmp_path / "run" / "me" / "adapter")
    for found in (engine.adapter_of("me"), written):
        assert all(x.equal(y) for path, own in expected.items() for x, y in zip(own, found[path], strict=True))


def test_best_when_an_average_is_kept_then_is_the_average_that_was_evaluated(backbone):
    mine = weights(backbone, eval_data=1, early_stopping_patience=1)
    mine.after_step(Updated(1.0, 1.0, skipped=False))
    evaluated = {name: params.clone() for name, params in mine.adapter.flat().items()}
    mine.adapter.groups["a"].params.add_(1.0)
    mine.keep_best()
    mine.after_step(Updated(1.0, 1.0, skipped=False))
    mine.use_best()
    assert all(params.equal(evaluated[name]) for name, params in mine.adapter.flat().items())
