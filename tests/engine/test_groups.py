"""A job whose rows become groups: planned whole, scored by log-probabilities, and alone beside any neighbours."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from tiny_models import assert_same_bits, finish, job_spec, random_data, shallow_backbone, small_job, submit, train

from weft.data.dataset import JobData
from weft.data.samples import Samples
from weft.engine.engine import Engine
from weft.engine.events import EvalDone, StepDone
from weft.errors import DataError
from weft.objectives.preference import Dpo, Kto
from weft.store.run_dir import RunDirectory, RunRecord


def pair_job(name: str = "pairs", **settings):
    """Six rows to train on and two to evaluate on, each a pair."""
    data = random_data(5, num_samples=12, num_eval=4, lengths=(3, 9))
    assert data.eval is not None
    spec = job_spec(name, global_batch_size=3, max_steps=6, eval_steps=2, adapter={"lora_dropout": 0.1}, **settings)
    return spec, JobData(replace(data.train, objective=Dpo(0.3)), replace(data.eval, objective=Dpo(0.3)))


def labelled_job(name: str = "answers"):
    """The same samples as single answers, of which every other one is good."""
    spec, data = pair_job(name)
    assert data.eval is not None
    train, evaluated = (
        replace(part, objective=Kto(0.3), samples=Samples.of([s.labelled(i % 2) for i, s in enumerate(part.samples)]))
        for part in (data.train, data.eval)
    )
    return spec, JobData(train, evaluated)


@pytest.mark.parametrize("kernels", ["reference", "fused"])
@pytest.mark.parametrize(("make", "start"), [(pair_job, 0.6931), (labelled_job, 0.5)])
def test_groups_when_trained_beside_supervised_jobs_then_both_have_the_bits_of_being_alone(make, start, kernels):
    neighbours = [small_job(f"n{i}", i) for i in range(2)]
    backbone = shallow_backbone("llama", kernels=kernels)
    alone = train(backbone, [make("mine")])["mine"]
    together = train(backbone, [neighbours[0], make("mine"), neighbours[1]])
    assert_same_bits(alone, together["mine"])
    assert_same_bits(train(backbone, neighbours[:1])["n0"], together["n0"])
    assert alone.losses[0] == pytest.approx(start, abs=1e-3) and alone.losses[-1] < alone.losses[0]


def test_pairs_when_planned_then_a_global_batch_counts_rows_and_every_group_is_whole():
    engine = Engine(shallow_backbone("llama"), capacity=64)
    submit(engine, pair_job())
    progress = engine.jobs["pairs"].progress
    batch = progress.queue(0).batches[0]
    assert progress.num_steps == 6 and progress.order.steps_per_epoch == 2
    assert batch.groups == (2, 2, 2) and len(batch.lengths) == 6


def test_pairs_when_a_group_is_above_the_capacity_then_the_job_is_refused():
    engine = Engine(shallow_backbone("llama"), capacity=12)
    with pytest.raises(DataError, match=r"pairs: a row's samples have \d+ tokens together; the capacity .* is 12\."):
        submit(engine, pair_job(max_length=10))


def test_further_metrics_when_steps_and_evaluations_are_reported_then_are_in_events_and_metrics(tmp_path):
    engine, received = Engine(shallow_backbone("llama"), capacity=64), []
    with RunDirectory.open(tmp_path / "run", resume=False) as directory:
        directory.write_run(RunRecord())
        engine.keep_in(directory)
        submit(engine, pair_job())
        finish(engine, lambda _, event: received.append(event))
    steps = [event.fields()["rewards/margins"] for event in received if isinstance(event, StepDone)]
    evals = [event.fields()["eval_rewards/margins"] for event in received if isinstance(event, EvalDone)]
    lines = [json.loads(line) for line in (tmp_path / "run" / "pairs" / "metrics.jsonl").read_text().splitlines()]
    assert [line["rewards/margins"] for line in lines if "loss" in line] == steps and len(steps) == 6 and any(steps)
    assert [line["eval_rewards/margins"] for line in lines if "eval_loss" in line] == evals and len(evals) == 3
