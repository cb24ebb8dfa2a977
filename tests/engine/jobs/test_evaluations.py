"""A long evaluation runs in slices: others train, commands take effect and prompts are answered between them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_models import (
    Outcome,
    assert_same_bits,
    finish,
    job_spec,
    random_data,
    shallow_backbone,
    small_job,
    submit,
    train,
)

from weft.engine.engine import Engine
from weft.engine.events import EvalDone, EvalSliceDone, Event, JobCancelled, MicrobatchDone, StepDone
from weft.engine.execute import evaluate
from weft.engine.jobs import evaluations
from weft.engine.jobs.live_job import LiveJob
from weft.spec import JobSpec
from weft.store.run_dir import RunDirectory

CAPACITY = 24
STEPS = 4


def long_job(name: str = "long", **settings: object) -> tuple[JobSpec, object]:
    """A job whose evaluation fills some twenty microbatches, after every second step."""
    data = random_data(5, num_samples=6, num_eval=40)
    return job_spec(name, eval_steps=2, max_steps=STEPS, early_stopping_patience=5, eval_data=40, **settings), data


@pytest.fixture(scope="module")
def whole():
    """The long job alone, each of its evaluations in one piece."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluations, "SLICE_MICROBATCHES", None)
        outcomes = train(shallow_backbone(), [long_job()], capacity=CAPACITY)
    assert len(outcomes["long"].eval_losses) == 2
    return outcomes["long"]


def test_evaluation_when_in_slices_then_has_the_bits_of_one_piece_and_others_train_between(whole):
    engine, events = Engine(shallow_backbone(), capacity=CAPACITY), list[Event]()
    submit(engine, long_job(), small_job("other", max_steps=40))
    outcomes = finish(engine, lambda _, event: events.append(event))
    assert_same_bits(outcomes["long"], whole)
    alone = train(shallow_backbone(), [small_job("other", max_steps=40)], capacity=CAPACITY)
    assert_same_bits(outcomes["other"], alone["other"])
    slices = [i for i, event in enumerate(events) if isinstance(event, EvalSliceDone)]
    assert len(slices) > 6
    first, last = slices[0], next(i for i, event in enumerate(events) if isinstance(event, EvalDone))
    between = [event for event in events[first:last] if isinstance(event, StepDone | MicrobatchDone)]
    assert sum(isinstance(event, MicrobatchDone) and event.jobs == ("other",) for event in between) >= 3
    assert not any(isinstance(event, StepDone) and event.job == "long" for event in between)


def test_evaluations_when_due_together_then_run_in_the_same_slices_and_their_jobs_go_on_together():
    """Both global batches fit into one microbatch, so the jobs step together, and do so again after the evaluation."""
    data = random_data(5, num_samples=2, lengths=(3, 5), num_eval=40)
    settings = {"global_batch_size": 2, "eval_steps": 2, "max_steps": STEPS, "eval_data": 40}
    engine, events = Engine(shallow_backbone(), capacity=CAPACITY), list[Event]()
    submit(engine, *((job_spec(name, **settings), data) for name in "ab"))
    finish(engine, lambda _, event: events.append(event))
    first, last = (next(i for i, e in enumerate(events) if isinstance(e, kind)) for kind in (EvalSliceDone, EvalDone))
    assert last - first > 2 and not any(isinstance(event, MicrobatchDone) for event in events[first:last])
    assert {event.jobs for event in events if isinstance(event, MicrobatchDone)} == {("a", "b")}


@pytest.mark.parametrize("number", [1, 3])
def test_cancel_when_given_during_an_evaluation_then_takes_effect_before_the_next_slice(number):
    engine, events = Engine(shallow_backbone(), capacity=CAPACITY), list[Event]()
    submit(engine, long_job(), small_job("other", max_steps=12))

    def cancel(engine: Engine, event: Event) -> None:
        events.append(event)
        if isinstance(event, EvalSliceDone) and sum(isinstance(e, EvalSliceDone) for e in events) == number:
            engine.cancel("long")

    outcomes = finish(engine, cancel)
    assert (outcomes["long"].state, outcomes["other"].state) == ("cancelled", "succeeded")
    assert sum(isinstance(event, EvalSliceDone) for event in events) == number
    assert any(isinstance(event, JobCancelled) for event in events)
    assert not any(isinstance(event, EvalDone) for event in events)


def test_job_when_paused_and_resumed_during_its_evaluation_then_ends_the_same(whole):
    engine, num_slices = Engine(shallow_backbone(), capacity=CAPACITY), 0
    submit(engine, long_job())

    def pause(engine: Engine, event: Event) -> None:
        nonlocal num_slices
        num_slices += isinstance(event, EvalSliceDone)
        if isinstance(event, EvalSliceDone) and num_slices == 2:
            engine.pause("long")

    assert finish(engine, pause)["long"].state == "paused"
    engine.resume("long")
    outcome = finish(engine)["long"]
    outcome.goes_on_from(Outcome({}, "", None, whole.losses[:2], accuracies=whole.accuracies[:2]))
    assert_same_bits(outcome, whole)


def test_run_when_stopped_during_an_evaluation_then_the_resumed_run_evaluates_and_ends_the_same(whole, tmp_path: Path):
    def run(path: Path, on_event: Callable[[Engine, Event], None] | None = None) -> tuple[Engine, Outcome]:
        engine = Engine(shallow_backbone(), capacity=CAPACITY)
        submit(engine, long_job())
        with RunDirectory.open(path, resume=RunDirectory.holds_run(path)) as directory:
            engine.keep_in(directory)
            return engine, finish(engine, on_event)["long"]

    engine, _ = run(tmp_path / "run", lambda engine, event: engine.stop() if isinstance(event, EvalSliceDone) else None)
    assert engine.jobs["long"].step == 2 and engine.jobs["long"].progress.best_eval is None
    _, outcome = run(tmp_path / "run")
    assert outcome.eval_losses == whole.eval_losses
    assert_same_bits(
        outcome.__class__(**{**vars(outcome), "losses": whole.losses, "accuracies": whole.accuracies}), whole
    )


def test_evaluation_of_several_when_one_fails_then_the_others_are_evaluated(whole, monkeypatch):
    look = evaluate.EvaluationInFlight.__init__

    def failing(self, backbone, requests, *given):
        if any(request.data.num_groups == 3 for request in requests):
            raise ZeroDivisionError("this job cannot be evaluated")
        look(self, backbone, requests, *given)

    monkeypatch.setattr(evaluate.EvaluationInFlight, "__init__", failing)
    engine = Engine(shallow_backbone(), capacity=CAPACITY)
    bad = job_spec("bad", eval_steps=2, max_steps=STEPS, eval_data=3), random_data(7, num_samples=6, num_eval=3)
    submit(engine, long_job(), bad)
    outcomes = finish(engine)
    assert outcomes["bad"].state == "failed"
    assert_same_bits(outcomes["long"], whole)


def test_tenants_share_when_a_job_is_evaluated_then_counts_a_third_of_its_tokens():
    engine = Engine(shallow_backbone(), capacity=CAPACITY)
    submit(engine, long_job())
    finish(engine)
    job: LiveJob = engine.jobs["long"]
    assert job.data.eval is not None
    assert job.evaluated_tokens == 2 * job.data.eval.summary.num_tokens
