"""The engine as its users see it: what it accepts, what it reports, and what a job ends with."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from tiny_models import (
    VOCABULARY,
    assert_same_bits,
    dataset,
    finish,
    flat,
    job_spec,
    random_data,
    shallow_backbone,
    small_job,
    submit,
    taken_slots,
    train,
)

from weft.data.dataset import JobData
from weft.data.samples import Sample
from weft.engine.engine import Engine
from weft.engine.events import Event, JobEvent, JobStarted, JobSucceeded, MicrobatchDone, StepDone
from weft.errors import AdapterFileError, ConfigError, DataError
from weft.job_state import JobState
from weft.store.run_dir import RunDirectory


@pytest.fixture(scope="module")
def backbone():
    return shallow_backbone("llama_odd")


def test_run_when_done_then_returns_all_jobs_and_frees_their_taken_slots(backbone):
    engine = Engine(backbone, capacity=48)
    submit(engine, small_job("a"), small_job("b", 1, max_steps=2))
    jobs = engine.run()
    assert {name: (job.state, job.step) for name, job in jobs.items()} == {
        "a": (JobState.SUCCEEDED, 6),
        "b": (JobState.SUCCEEDED, 2),
    }
    assert not taken_slots(backbone)
    assert engine.run() is jobs, "a finished engine has nothing to do"


def test_events_when_a_job_trains_then_come_in_order(backbone):
    engine = Engine(backbone, capacity=48)
    spec = job_spec("a", max_steps=4, eval_data=2, eval_steps=2)
    submit(engine, (spec, random_data(0, num_eval=2)), small_job("b", 1))
    events = list(engine.events())
    mine = [event for event in events if isinstance(event, JobEvent) and event.job == "a"]
    expected = ["job_started", "step", "step", "eval", "step", "step", "eval", "succeeded"]
    assert [event.kind for event in mine] == expected
    assert [event.step for event in mine if isinstance(event, StepDone)] == [1, 2, 3, 4]
    last: dict[str, Event] = {}
    for event in events:
        if isinstance(event, StepDone):
            assert isinstance(last.get(event.job), MicrobatchDone | StepDone | JobStarted)
        for job in (event.job,) if isinstance(event, JobEvent) else event.jobs:
            assert not isinstance(last.get(job), JobSucceeded)
            last[job] = event
    assert [isinstance(last[job], JobSucceeded) for job in "ab"] == [True, True]


def test_events_when_a_step_is_done_then_its_figures_are_right(backbone):
    engine = Engine(backbone, capacity=48)
    spec, data = small_job("a", max_steps=None, num_train_epochs=2, global_batch_size=3, learning_rate=1e-3)
    submit(engine, (spec, data))
    steps = [event for event in engine.events() if isinstance(event, StepDone)]
    assert len(steps) == steps[0].num_steps == 6
    assert [event.epoch for event in steps] == pytest.approx([1 / 3, 2 / 3, 1, 4 / 3, 5 / 3, 2])
    assert [event.learning_rate for event in steps] == pytest.approx([1e-3 * (1 - i / 6) for i in range(6)])
    assert steps[-1].num_tokens == sum(event.tokens for event in steps) == 2 * data.train.summary.num_tokens
    assert all(a.seconds <= b.seconds for a, b in pairwise(steps))


def test_events_when_microbatches_run_then_none_is_over_capacity(backbone):
    engine = Engine(backbone, capacity=40)
    submit(engine, *(small_job(f"job{i}", i) for i in range(4)))
    done = [event for event in engine.events() if isinstance(event, MicrobatchDone)]
    assert all(event.tokens <= 40 and event.rows % 128 == 0 for event in done)
    assert max(len(event.jobs) for event in done) >= 3


@pytest.mark.parametrize("action", ["cancel", "pause", "resume"])
def test_command_when_the_job_is_unknown_then_names_those_there_are(backbone, action):
    engine = Engine(backbone, capacity=48)
    submit(engine, small_job("a"), small_job("b"))
    with pytest.raises(ConfigError, match="there is no job 'c'; there are a, b"):
        getattr(engine, action)("c")
    with pytest.raises(ConfigError, match="there are none"):
        Engine(backbone).adapter_of("a")


def test_submit_when_the_name_is_taken_then_refused_and_nothing_changes(backbone):
    engine = Engine(backbone, capacity=48)
    submit(engine, small_job("a"))
    with pytest.raises(ConfigError, match="there is already a job 'a'"):
        submit(engine, small_job("a", 1))
    assert_same_bits(finish(engine)["a"], train(backbone, [small_job("a")], capacity=48)["a"])


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"max_length": 49}, "max_length 49 is above the capacity"),
        (
            {"objective": "distillation", "distillation_top_k": 999},
            r"distillation_top_k: got 999; the backbone has \d+",
        ),
        ({"adapter": {"r": 37}}, "rank 37 is above the smaller side"),
        ({"adapter": {"target_modules": ["nonesuch"]}}, "no linear module 'nonesuch'"),
    ],
    ids=["length", "top_k", "rank", "target"],
)
def test_submit_when_the_job_does_not_fit_then_refused_and_forgotten(backbone, settings, reason):
    engine = Engine(backbone, capacity=48)
    with pytest.raises(ConfigError, match=reason):
        engine.submit(job_spec("a", **settings), random_data(0))
    assert not engine.jobs
    submit(engine, small_job("a"))
    assert engine.run()["a"].state is JobState.SUCCEEDED


@pytest.mark.parametrize("capacity", [512, 200])
def test_submit_when_max_length_is_above_the_positions_then_refused_with_the_smallest_limit(backbone, capacity):
    with pytest.raises(ConfigError, match=r"max_length 300 is above the backbone's positions \(128\)"):
        Engine(backbone, capacity=capacity).submit(job_spec("a", max_length=300), random_data(0))


def one_sample(tokens: Any, supervised: bool = True) -> JobData:
    tokens = np.asarray(tokens)
    return JobData(dataset([Sample(tokens, np.full(len(tokens), supervised))]), None)


@pytest.mark.parametrize(
    "data",
    [
        one_sample(np.full(60, 5)),
        one_sample(np.full(30, 5)),
        one_sample([4, VOCABULARY, 5]),
        one_sample([4, -1, 5]),
        one_sample([4, 5, 6], supervised=False),
        one_sample([4]),
    ],
    ids=["over capacity", "over positions", "unknown token", "negative token", "nothing to learn", "one token"],
)
def test_submit_when_a_sample_cannot_be_trained_on_then_refused_and_others_train(data):
    """What would raise inside a microbatch would take the neighbours with it."""
    engine = Engine(shallow_backbone("opt", max_position_embeddings=24), capacity=48)
    submit(engine, small_job("good", 1))
    with pytest.raises(DataError, match="bad"):
        engine.submit(job_spec("bad", global_batch_size=1), data)
    assert engine.run()["good"].state is JobState.SUCCEEDED


def test_submit_when_it_goes_on_from_an_adapter_then_starts_where_that_ended(backbone, tmp_path):
    first = Engine(backbone, capacity=48)
    with RunDirectory.open(tmp_path / "run", resume=False) as directory:
        first.keep_in(directory)
        submit(first, small_job("first"))
        first.run()
    engine = Engine(backbone, capacity=48)
    spec, data = small_job("second", 1, init_adapter="run/first/adapter")
    engine.submit(spec, data, base_dir=tmp_path)
    start = flat(engine.adapter_of("second"))
    assert all(x.equal(y) for x, y in zip(start, flat(first.adapter_of("first")), strict=True))
    assert engine.run()["second"].state is JobState.SUCCEEDED


def test_submit_when_the_adapter_to_go_on_from_does_not_fit_then_refused_and_forgotten(backbone, tmp_path):
    engine = Engine(backbone, capacity=48)
    spec, data = small_job("second", 1, init_adapter="nowhere")
    with pytest.raises(AdapterFileError, match="nowhere: there is no such adapter directory"):
        engine.submit(spec, data, base_dir=tmp_path)
    assert not engine.jobs


def test_early_stopping_when_patience_runs_out_then_the_best_weights_are_kept(backbone):
    spec = job_spec(
        "a", max_steps=40, learning_rate=0.03, eval_data=4, eval_steps=1, early_stopping_patience=3
    )  # fmt: skip
    data = random_data(1, num_samples=6, num_eval=4)
    engine = Engine(backbone, capacity=48)
    submit(engine, (spec, data))
    seen: list[float] = []
    weights: list[Any] = []
    ended: list[JobSucceeded] = []
    for event in engine.events():
        if event.kind == "eval":
            seen.append(event.eval_loss)
            weights.append(flat(engine.adapter_of("a")))
        if isinstance(event, JobSucceeded):
            ended.append(event)
    best = seen.index(min(seen))
    assert best == len(seen) - 4 and len(seen) < 40
    assert ended[0].early_stopped and ended[0].step == len(seen)
    assert all(x.equal(y) for x, y in zip(flat(engine.adapter_of("a")), weights[best], strict=True))
    assert not all(x.equal(y) for x, y in zip(weights[-1], weights[best], strict=True))


def test_early_stopping_when_never_needed_then_the_best_weights_are_still_the_ones_kept(backbone):
    spec = job_spec("a", max_steps=8, learning_rate=0.03, eval_data=4, eval_steps=1, early_stopping_patience=100)
    engine = Engine(backbone, capacity=48)
    submit(engine, (spec, random_data(1, num_samples=6, num_eval=4)))
    seen, weights = [], []
    for event in engine.events():
        if event.kind == "eval":
            seen.append(event.eval_loss)
            weights.append(flat(engine.adapter_of("a")))
    best = weights[seen.index(min(seen))]
    assert all(x.equal(y) for x, y in zip(flat(engine.adapter_of("a")), best, strict=True))
