"""The engine as its users see it: jobs come, go, wait and go on while others train."""

from __future__ import annotations

import sys
import threading
from types import FrameType
from typing import Any

import numpy as np
import pytest
from tiny_models import (
    VOCABULARY,
    Job,
    assert_same_bits,
    dataset,
    finish,
    job_spec,
    random_backbone,
    random_data,
    train,
)

from weft.data.dataset import JobData
from weft.data.sample import Sample
from weft.engine import engine as engine_module
from weft.engine.engine import Engine
from weft.engine.events import Event, JobResumed, JobStarted, JobSucceeded, MicrobatchDone, StepDone
from weft.engine.live_job import JobState
from weft.errors import ConfigError, DataError


@pytest.fixture(scope="module")
def backbone():
    return random_backbone("llama_odd")


def a_job(name: str, seed: int = 0, **settings: Any) -> Job:
    return job_spec(name, seed=seed, adapter={"lora_dropout": 0.1}, **settings), random_data(seed, num_samples=7)


def submit(engine: Engine, *jobs: Job) -> None:
    for spec, data in jobs:
        engine.submit(spec, data)


def slots(backbone) -> set[int]:
    return {slot for linear in backbone.linears.values() for slot in linear.slots}


def test_run_when_done_then_returns_all_jobs_and_frees_their_slots(backbone):
    engine = Engine(backbone, capacity=48)
    submit(engine, a_job("a"), a_job("b", 1, max_steps=2))
    jobs = engine.run()
    assert {name: (job.state, job.step) for name, job in jobs.items()} == {
        "a": (JobState.SUCCEEDED, 6),
        "b": (JobState.SUCCEEDED, 2),
    }
    assert not slots(backbone)
    assert engine.run() is jobs, "a finished engine has nothing to do"


def test_events_when_a_job_trains_then_come_in_order(backbone):
    engine = Engine(backbone, capacity=48)
    spec = job_spec("a", max_steps=4, eval_data=2, eval_steps=2)
    submit(engine, (spec, random_data(0, num_eval=2)), a_job("b", 1))
    events = list(engine.events())
    mine = [event for event in events if event.job == "a"]
    expected = ["job_started", "step", "step", "eval", "step", "step", "eval", "succeeded"]
    assert [event.kind for event in mine] == expected
    assert [event.step for event in mine if isinstance(event, StepDone)] == [1, 2, 3, 4]
    last: dict[str, Event] = {}
    for event in events:
        if isinstance(event, StepDone):
            assert isinstance(last.get(event.job), MicrobatchDone | StepDone | JobStarted)
        for job in event.job.split(", "):
            assert not isinstance(last.get(job), JobSucceeded)
            last[job] = event
    assert [isinstance(last[job], JobSucceeded) for job in "ab"] == [True, True]


def test_events_when_a_step_is_done_then_its_figures_are_right(backbone):
    engine = Engine(backbone, capacity=48)
    spec, data = a_job("a", max_steps=None, num_train_epochs=2, global_batch_size=3, learning_rate=1e-3)
    submit(engine, (spec, data))
    steps = [event for event in engine.events() if isinstance(event, StepDone)]
    assert len(steps) == steps[0].num_steps == 6
    assert [event.epoch for event in steps] == pytest.approx([1 / 3, 2 / 3, 1, 4 / 3, 5 / 3, 2])
    assert [event.learning_rate for event in steps] == pytest.approx([1e-3 * (1 - i / 6) for i in range(6)])
    assert steps[-1].num_tokens == sum(event.tokens for event in steps) == 2 * data.train.summary.num_tokens
    assert all(a.seconds <= b.seconds for a, b in zip(steps, steps[1:], strict=False))


def test_events_when_microbatches_run_then_none_is_over_capacity(backbone):
    engine = Engine(backbone, capacity=40)
    submit(engine, *(a_job(f"job{i}", i) for i in range(4)))
    done = [event for event in engine.events() if isinstance(event, MicrobatchDone)]
    assert all(event.tokens <= 40 and event.rows % 128 == 0 for event in done)
    assert max(len(event.job.split(", ")) for event in done) >= 3


@pytest.mark.parametrize("action", ["cancel", "pause", "resume"])
def test_command_when_the_job_is_unknown_then_names_those_there_are(backbone, action):
    engine = Engine(backbone, capacity=48)
    submit(engine, a_job("a"), a_job("b"))
    with pytest.raises(ConfigError, match="there is no job 'c'; there are a, b"):
        getattr(engine, action)("c")
    with pytest.raises(ConfigError, match="there are none"):
        Engine(backbone).adapter_of("a")


def test_submit_when_the_name_is_taken_then_refused_and_nothing_changes(backbone):
    engine = Engine(backbone, capacity=48)
    submit(engine, a_job("a"))
    with pytest.raises(ConfigError, match="there is already a job 'a'"):
        submit(engine, a_job("a", 1))
    assert_same_bits(finish(engine)["a"], train(backbone, [a_job("a")], capacity=48)["a"])


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"max_length": 49}, "max_length 49 is above the capacity"),
        ({"adapter": {"r": 37}}, "rank 37 is above the smaller side"),
        ({"adapter": {"target_modules": ["nonesuch"]}}, "no linear module 'nonesuch'"),
    ],
    ids=["length", "rank", "target"],
)
def test_submit_when_the_job_does_not_fit_then_refused_and_forgotten(backbone, settings, reason):
    engine = Engine(backbone, capacity=48)
    with pytest.raises(ConfigError, match=reason):
        engine.submit(job_spec("a", **settings), random_data(0))
    assert not engine.jobs
    submit(engine, a_job("a"))
    assert engine.run()["a"].state is JobState.SUCCEEDED


def test_submit_when_max_length_is_above_the_positions_then_refused(backbone):
    with pytest.raises(ConfigError, match=r"max_length 300 is above the backbone's positions \(128\)"):
        Engine(backbone, capacity=512).submit(job_spec("a", max_length=300), random_data(0))


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
    engine = Engine(random_backbone("opt", max_position_embeddings=24), capacity=48)
    submit(engine, a_job("good", 1))
    with pytest.raises(DataError, match="bad"):
        engine.submit(job_spec("bad", global_batch_size=1), data)
    assert engine.run()["good"].state is JobState.SUCCEEDED


@pytest.fixture(scope="module")
def undisturbed(backbone):
    return train(backbone, [a_job("a"), a_job("b", 1, max_steps=12), a_job("c", 2)], capacity=48)


def test_commands_when_given_from_another_thread_then_obeyed_and_others_keep_their_bits(backbone, undisturbed):
    """One thread submits, pauses, resumes and cancels while another trains."""
    engine = Engine(backbone, capacity=48)
    submit(engine, a_job("a"), a_job("b", 1, max_steps=12))
    reached = {name: threading.Event() for name in ("started", "paused")}

    def command() -> None:
        assert reached["started"].wait(20)
        submit(engine, a_job("c", 2), a_job("d", 3, max_steps=500))
        engine.pause("a")
        assert reached["paused"].wait(20)
        engine.resume("a")
        engine.cancel("d")

    thread = threading.Thread(target=command)
    thread.start()

    def watch(_: Engine, event: Event) -> None:
        if isinstance(event, StepDone) and event.job == "b" and event.step == 2:
            reached["started"].set()
            thread.join(0.2)
        if event.kind == "paused":
            reached["paused"].set()
            thread.join(5)

    outcomes = finish(engine, watch)
    thread.join(20)
    assert outcomes["d"].state == "cancelled"
    for name in "abc":
        assert_same_bits(outcomes[name], undisturbed[name])


def test_submit_when_another_thread_calls_it_at_any_moment_then_the_loop_goes_on():
    """Jobs arrive between any two bytecodes of the event loop."""
    engine = Engine(random_backbone("llama_odd"), capacity=48)
    small = {"r": 1, "target_modules": ["q_proj"], "layers_to_transform": [0]}
    data = random_data(0, num_samples=1)

    def submit_one() -> None:
        engine.submit(job_spec(f"job{len(engine.jobs)}", adapter=small, max_steps=1), data)

    submit_one()
    visited = set()

    def trace(frame: FrameType, what: str, _: Any) -> Any:
        if frame.f_code.co_filename != engine_module.__file__:
            return None
        frame.f_trace_opcodes = True
        place = (frame.f_code, frame.f_lasti)
        if what == "opcode" and place not in visited and frame.f_code.co_name in ("events", "<listcomp>", "_execute"):
            visited.add(place)
            other = threading.Thread(target=submit_one)
            other.start()
            other.join()
        return trace

    sys.settrace(trace)
    try:
        jobs = engine.run()
    finally:
        sys.settrace(None)
    assert len(jobs) > 60
    assert {job.state for job in jobs.values()} == {JobState.SUCCEEDED}


def test_commands_when_given_between_events_then_take_effect_at_the_next_boundary(backbone, undisturbed):
    engine = Engine(backbone, capacity=48)
    submit(engine, a_job("a"), a_job("b", 1, max_steps=12), a_job("c", 2))
    order: list[str] = []
    for event in engine.events():
        order.append(f"{event.kind} {event.job}")
        if isinstance(event, StepDone) and event.job == "b" and event.step == 2:
            engine.pause("a")
            engine.pause("a")
        if isinstance(event, StepDone) and event.job == "b" and event.step == 5:
            engine.resume("a")
            engine.cancel("c")
    between = order[order.index("paused a") + 1 : order.index("resumed a")]
    assert order.count("paused a") == order.count("resumed a") == order.count("cancelled c") == 1
    assert not any(" a" in line.replace(",", "") for line in between)
    assert not any(line.endswith(" c") or ", c" in line for line in order[order.index("cancelled c") + 1 :])
    for name in "ab":
        assert all(
            x.equal(y) for x, y in zip(flat(engine.adapter_of(name)), flat(undisturbed[name].adapter), strict=True)
        )
    assert not slots(backbone)


def flat(adapter: Any) -> list[Any]:
    return [tensor for pair in adapter.values() for tensor in pair]


def test_cancel_when_queued_paused_or_done_then_means_what_it_says(backbone):
    engine = Engine(backbone, capacity=48)
    submit(engine, a_job("queued"), a_job("paused", 1), a_job("done", 2, max_steps=1))
    engine.cancel("queued")
    for event in engine.events():
        if isinstance(event, StepDone) and event.job == "paused" and event.step == 3:
            engine.pause("paused")
    assert [str(job.state) for job in engine.jobs.values()] == ["cancelled", "paused", "succeeded"]
    assert engine.jobs["queued"].step == 0
    engine.cancel("paused")
    engine.cancel("done")
    engine.resume("done")
    engine.run()
    assert [str(job.state) for job in engine.jobs.values()] == ["cancelled", "cancelled", "succeeded"]
    assert not slots(backbone)


def test_pause_when_all_jobs_wait_then_events_end_and_go_on_after_resume(backbone, undisturbed):
    engine = Engine(backbone, capacity=48)
    submit(engine, a_job("a"))
    first = finish(engine, lambda e, event: e.pause("a") if isinstance(event, StepDone) and event.step == 2 else None)
    assert first["a"].state == "paused"
    engine.resume("a")
    events: list[Event] = []
    second = finish(engine, lambda _, event: events.append(event))["a"]
    assert events[0] == JobResumed("a", 2)
    second.losses[:0] = first["a"].losses
    assert_same_bits(second, undisturbed["a"])


def test_stop_when_called_then_every_job_waits_at_a_step_and_can_go_on(backbone, undisturbed):
    engine = Engine(backbone, capacity=48)
    submit(engine, a_job("a"), a_job("b", 1, max_steps=12), a_job("c", 2))

    def stop(engine: Engine, event: Event) -> None:
        if isinstance(event, StepDone) and event.job == "b" and event.step == 2:
            engine.stop()

    first = finish(engine, stop)
    assert {outcome.state for outcome in first.values()} == {"paused"}
    for name in "abc":
        engine.resume(name)
    second = finish(engine)
    for name in "abc":
        second[name].losses[:0] = first[name].losses
        assert_same_bits(second[name], undisturbed[name])


@pytest.mark.parametrize("step", [2, 6])
def test_events_when_the_reader_leaves_and_comes_back_then_the_job_ends_the_same(undisturbed, step):
    """Leaving a `for` loop over the events is no reason to lose the end of a step."""
    engine = Engine(random_backbone("llama_odd"), capacity=48)
    submit(engine, a_job("a"))
    for event in engine.events():
        if isinstance(event, StepDone) and event.step == step:
            break
    assert engine.run()["a"].state is JobState.SUCCEEDED
    assert all(x.equal(y) for x, y in zip(flat(engine.adapter_of("a")), flat(undisturbed["a"].adapter), strict=True))


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
