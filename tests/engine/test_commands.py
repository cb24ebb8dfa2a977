"""Jobs come, go, wait and go on while others train, from any thread and between any two events."""

from __future__ import annotations

import sys
import threading
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest
from tiny_models import (
    assert_same_bits,
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

from weft.engine import engine as engine_module
from weft.engine.engine import Engine
from weft.engine.events import Event, JobEvent, JobResumed, StepDone
from weft.job_state import JobState


@pytest.fixture(scope="module")
def backbone():
    return shallow_backbone("llama_odd")


@pytest.fixture(scope="module")
def undisturbed(backbone):
    return train(backbone, [small_job("a"), small_job("b", 1, max_steps=12), small_job("c", 2)], capacity=48)


def test_job_when_held_at_a_step_then_stands_there_until_it_may_go_on_and_ends_the_same(backbone, undisturbed):
    """A job that is held keeps its position and takes no step beyond; the others do not notice."""
    engine = Engine(backbone, capacity=48)
    submit(engine, small_job("a"), small_job("b", 1, max_steps=12), small_job("c", 2))
    engine.hold("a", 2)
    engine.hold("b", 5)
    steps = [(event.job, event.step) for event in engine.events() if isinstance(event, StepDone)]
    assert max(step for job, step in steps if job == "a") == 2
    assert max(step for job, step in steps if job == "b") == 5
    assert engine.jobs["a"].state is JobState.RUNNING and engine.jobs["c"].state is JobState.SUCCEEDED
    assert not list(engine.events()), "no job can go on"

    def release(_: Engine, event: Event) -> None:
        if isinstance(event, StepDone) and event.job == "b" and event.step == 7:
            engine.hold("a", 6)

    engine.hold("b", 12)
    outcomes = finish(engine, release)
    for name, held_at in (("a", 2), ("b", 5)):
        expected = replace(undisturbed[name], losses=undisturbed[name].losses[held_at:])
        assert_same_bits(outcomes[name], replace(expected, accuracies=undisturbed[name].accuracies[held_at:]))


def test_commands_when_given_from_another_thread_then_applied_and_others_keep_their_bits(backbone, undisturbed):
    """One thread submits, pauses, resumes and cancels while another trains."""
    engine = Engine(backbone, capacity=48)
    submit(engine, small_job("a"), small_job("b", 1, max_steps=12))
    reached = {name: threading.Event() for name in ("started", "paused")}

    def command() -> None:
        assert reached["started"].wait(600)
        submit(engine, small_job("c", 2), small_job("d", 3, max_steps=500))
        engine.pause("a")
        assert reached["paused"].wait(600)
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
            thread.join(600)

    outcomes = finish(engine, watch)
    thread.join(600)
    assert outcomes["d"].state == "cancelled"
    for name in "abc":
        assert_same_bits(outcomes[name], undisturbed[name])


def test_submit_when_another_thread_calls_it_at_any_moment_then_the_loop_goes_on():
    """Jobs arrive between any two bytecodes of the event loop."""
    engine = Engine(shallow_backbone("llama_odd"), capacity=48)
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
        at = (frame.f_code, frame.f_lasti)
        if what == "opcode" and at not in visited and frame.f_code.co_name in ("events", "<listcomp>", "_execute"):
            visited.add(at)
            other = threading.Thread(target=submit_one)
            other.start()
            other.join()
        return trace

    sys.settrace(trace)
    try:
        engine.run()
    finally:
        sys.settrace(None)
    jobs = engine.run()  # Those that came after the loop had seen that nothing was left.
    assert len(jobs) > 60
    assert {job.state for job in jobs.values()} == {JobState.SUCCEEDED}


def test_commands_when_given_between_events_then_take_effect_at_the_next_boundary(backbone, undisturbed):
    engine = Engine(backbone, capacity=48)
    submit(engine, small_job("a"), small_job("b", 1, max_steps=12), small_job("c", 2))
    order: list[str] = []
    for event in engine.events():
        order.append(f"{event.kind} {event.job}" if isinstance(event, JobEvent) else event.kind)
        if isinstance(event, StepDone) and event.job == "b" and event.step == 2:
            engine.pause("a")
            engine.pause("a")
        if isinstance(event, StepDone) and event.job == "b" and event.step == 4:
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
    assert not taken_slots(backbone)


def test_cancel_when_queued_paused_or_done_then_ends_only_what_has_not_ended(backbone):
    engine = Engine(backbone, capacity=48)
    submit(engine, small_job("queued"), small_job("paused", 1), small_job("done", 2, max_steps=1))
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
    assert not taken_slots(backbone)


def test_pause_when_all_jobs_wait_then_events_end_and_go_on_after_resume(backbone, undisturbed):
    engine = Engine(backbone, capacity=48)
    submit(engine, small_job("a"))
    first = finish(engine, lambda e, event: e.pause("a") if isinstance(event, StepDone) and event.step == 2 else None)
    assert first["a"].state == "paused"
    engine.resume("a")
    events: list[Event] = []
    second = finish(engine, lambda _, event: events.append(event))["a"]
    assert events[0] == JobResumed("a", 2)
    second.goes_on_from(first["a"])
    assert_same_bits(second, undisturbed["a"])


def test_stop_when_called_then_every_job_waits_at_a_step_and_can_go_on(backbone, undisturbed):
    engine = Engine(backbone, capacity=48)
    submit(engine, small_job("a"), small_job("b", 1, max_steps=12), small_job("c", 2))

    def stop(engine: Engine, event: Event) -> None:
        if isinstance(event, StepDone) and event.job == "b" and event.step == 2:
            engine.stop()

    first = finish(engine, stop)
    assert {outcome.state for outcome in first.values()} == {"paused"}
    for name in "abc":
        engine.resume(name)
    second = finish(engine)
    for name in "abc":
        second[name].goes_on_from(first[name])
        assert_same_bits(second[name], undisturbed[name])


@pytest.mark.parametrize("step", [2, 6])
def test_events_when_the_reader_leaves_and_comes_back_then_the_job_ends_the_same(undisturbed, step):
    """Leaving a `for` loop over the events is no reason to lose the end of a step."""
    engine = Engine(shallow_backbone("llama_odd"), capacity=48)
    submit(engine, small_job("a"))
    for event in engine.events():
        if isinstance(event, StepDone) and event.step == step:
            break
    assert engine.run()["a"].state is JobState.SUCCEEDED
    assert all(x.equal(y) for x, y in zip(flat(engine.adapter_of("a")), flat(undisturbed["a"].adapter), strict=True))
