"""Jobs without room wait, give way and go on, and every one ends to the bit as if it had never waited."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import (
    Outcome,
    assert_same_bits,
    finish,
    flat,
    random_data,
    random_model,
    shallow_backbone,
    small_job,
    submit,
    taken_slots,
    train,
)

from weft.adapters.adapter import Adapter
from weft.engine.engine import Engine
from weft.engine.events import Event, JobFailed, JobPreempted, JobResumed, JobStarted, JobWaiting, StepDone
from weft.engine.jobs.room import Placement
from weft.errors import JobError
from weft.job_state import JobState
from weft.model.backbone import Backbone
from weft.plan.admit import QUANTUM_TOKENS
from weft.store.run_dir import RunDirectory, RunRecord

STATE = (JobWaiting, JobStarted, JobPreempted, JobResumed)


@pytest.fixture(scope="module")
def backbone():
    return shallow_backbone("llama_odd")


@pytest.fixture(scope="module")
def undisturbed(backbone) -> dict[str, Outcome]:
    early = {"eval_data": 2, "eval_steps": 1, "early_stopping_patience": 9}
    jobs = [small_job("a"), small_job("b", 1, max_steps=12), small_job("c", 2), evaluated("evaluated", **early)]
    return train(backbone, jobs, capacity=48)


def evaluated(name: str, **settings: Any) -> Any:
    """A job with evaluations, whose best weights are state too."""
    spec, _ = small_job(name, 3, **settings)
    return spec, random_data(3, num_samples=7, num_eval=2)


def run(engine: Engine, act: Callable[[Engine, Event], None] | None = None) -> tuple[dict[str, Outcome], list[Event]]:
    """Runs to the end while checking that no job trains without a seat."""
    events: list[Event] = []

    def watch(engine: Engine, event: Event) -> None:
        events.append(event)
        for job in engine.jobs.values():
            has_seat = engine.executor.jobs[job.name].weights.slot is not None
            assert has_seat == engine._placement.has_seat(job) == job.is_running, job.name
        if act is not None:
            act(engine, event)

    return finish(engine, watch), events


def changes(events: list[Event]) -> list[str]:
    return [f"{event.kind} {event.job}" for event in events if isinstance(event, STATE)]


def test_run_when_everything_fits_then_nothing_waits(backbone):
    engine = Engine(backbone, capacity=48)
    submit(engine, small_job("a"), small_job("b", 1))
    _, events = run(engine)
    assert changes(events) == ["job_started a", "job_started b"]


def test_run_when_max_jobs_is_one_then_jobs_go_one_after_another_with_the_same_bits(backbone, undisturbed):
    engine = Engine(backbone, capacity=48, max_jobs=1)
    submit(engine, small_job("a"), small_job("b", 1, max_steps=12), small_job("c", 2))
    outcomes, events = run(engine)
    assert changes(events) == ["job_started a", "waiting b", "waiting c", "job_started b", "job_started c"]
    assert next(e.reason.text for e in events if isinstance(e, JobWaiting)).startswith("waits for a seat: 1 job trains")
    for name in "abc":
        assert_same_bits(outcomes[name], undisturbed[name])
    assert not taken_slots(backbone)


def test_run_when_a_higher_priority_comes_then_a_job_gives_way_and_ends_with_the_same_bits(backbone, undisturbed):
    """Twice preempted, once in the middle of a global batch: the same adapter, the same losses, no step twice."""
    engine = Engine(backbone, capacity=30, max_jobs=1)
    early = {"eval_data": 2, "eval_steps": 1, "early_stopping_patience": 9}
    submit(engine, evaluated("evaluated", **early))

    def act(engine: Engine, event: Event) -> None:
        if isinstance(event, StepDone) and event.job == "evaluated" and event.step == 2:
            submit(engine, small_job("a", priority=1))
        job = engine.jobs["evaluated"]
        if event.kind == "microbatch" and (job.step, job.progress.index > 0, "c" in engine.jobs) == (4, True, False):
            submit(engine, small_job("c", 2, priority=2))

    outcomes, events = run(engine, act)
    assert changes(events) == [
        "job_started evaluated", "preempted evaluated", "job_started a", "resumed evaluated",
        "preempted evaluated", "job_started c", "resumed evaluated",
    ]  # fmt: skip
    assert [e.reason.text for e in events if isinstance(e, JobPreempted)] == ["gives way to a", "gives way to c"]
    alone = train(backbone, [evaluated("evaluated", **early), small_job("a"), small_job("c", 2)], capacity=30)
    for name in ("evaluated", "a", "c"):
        assert_same_bits(outcomes[name], alone[name])


def test_run_when_memory_is_short_then_only_as_many_train_as_fit(backbone, undisturbed):
    probe = Engine(backbone, capacity=48)
    submit(probe, small_job("a"))
    each = probe.jobs["a"].num_parameters * 16
    engine = Engine(backbone, capacity=48, job_memory=2 * each + each // 2)
    submit(engine, small_job("a"), small_job("b", 1, max_steps=12), small_job("c", 2))
    together: set[int] = set()
    outcomes, events = run(engine, lambda _, __: together.add(len(taken_slots(backbone))))
    assert max(together) == 2
    assert "waits for memory: it needs" in next(e.reason.text for e in events if isinstance(e, JobWaiting))
    for name in "abc":
        assert_same_bits(outcomes[name], undisturbed[name])


def test_submit_when_a_job_can_never_fit_then_refused_with_the_arithmetic(backbone):
    engine = Engine(backbone, capacity=48, job_memory=1000)
    with pytest.raises(JobError, match=r"a: can never fit: it needs .* KiB, and of 1,000 bytes only 1,000 bytes are"):
        submit(engine, small_job("a"))
    assert not engine.jobs


def test_tenants_when_one_floods_then_the_others_job_comes_in_turn(backbone):
    engine = Engine(backbone, capacity=48, max_jobs=2)
    submit(engine, *(small_job(f"x{i}", i, tenant="x") for i in range(4)), small_job("y", 9, tenant="y"))
    _, events = run(engine)
    assert changes(events)[:2] == ["job_started x0", "job_started y"]


@pytest.mark.parametrize("weight", [1.0, 2.0])
def test_tenants_when_one_comes_late_then_it_starts_level_with_those_present(backbone, weight):
    """Its lack of history is no credit, and a long history of others is no debt; level is by weight."""
    engine = Engine(backbone, capacity=48, max_jobs=1, tenant_weights={"y": weight})
    submit(engine, small_job("x", tenant="x"), small_job("z", tenant="z"))
    engine.jobs["x"].progress.num_tokens = 50 * QUANTUM_TOKENS
    list_of_shares: list[dict[str, Any]] = []

    def act(engine: Engine, event: Event) -> None:
        if isinstance(event, StepDone) and event.job == "z" and event.step == 2:
            submit(engine, small_job("y", 1, tenant="y"))

    placement: Placement = engine._placement
    decide = placement._shares

    def spy(*arguments: Any) -> Any:
        list_of_shares.append(decide(*arguments))
        return list_of_shares[-1]

    placement._shares = spy  # type: ignore[method-assign]
    run(engine, act)
    since = [shares for shares in list_of_shares if "y" in shares]
    level = since[0]["y"].served_tokens
    assert level == weight * min(since[0]["x"].served_tokens, since[0]["z"].served_tokens) > 0
    assert len(since) > 1 and all(shares["y"].served_tokens >= level for shares in since), "it keeps its start"


def test_tenants_when_one_weighs_more_then_it_has_more_seats(backbone):
    """Three seats, and a tenant of weight 2 beside one of weight 1: two of them are its own."""
    engine = Engine(backbone, capacity=48, max_jobs=3, tenant_weights={"y": 2.0})
    jobs = [small_job(f"{tenant}{i}", i, tenant=tenant) for tenant in "xy" for i in range(3)]
    submit(engine, *jobs)
    _, events = run(engine)
    assert changes(events)[:3] == ["job_started x0", "job_started y0", "job_started y1"]


def test_pause_when_a_job_waits_then_it_holds_back_and_resume_queues_it_again(backbone, undisturbed):
    engine = Engine(backbone, capacity=48, max_jobs=1)
    submit(engine, small_job("b", 1, max_steps=12), small_job("a"), small_job("c", 2))
    engine.pause("a")

    def act(engine: Engine, event: Event) -> None:
        if event.kind == "succeeded" and event.job == "c":
            assert engine.jobs["a"].state is JobState.PAUSED
            engine.resume("a")

    outcomes, events = run(engine, act)
    assert [line for line in changes(events) if "started" in line] == [f"job_started {name}" for name in "bca"]
    assert_same_bits(outcomes["a"], undisturbed["a"])


def test_pause_when_a_job_trains_then_its_seat_is_free_for_who_waits(backbone, undisturbed):
    engine = Engine(backbone, capacity=48, max_jobs=1)
    submit(engine, small_job("a"), small_job("b", 1, max_steps=12))

    def act(engine: Engine, event: Event) -> None:
        if isinstance(event, StepDone) and (event.job, event.step) == ("a", 3):
            engine.pause("a")
        if isinstance(event, StepDone) and (event.job, event.step) == ("b", 4):
            engine.resume("a")

    outcomes, events = run(engine, act)
    # Who came first goes first, also after a pause.
    assert changes(events) == ["job_started a", "waiting b", "job_started b", "preempted b", "resumed a", "resumed b"]
    for name in "ab":
        assert_same_bits(outcomes[name], undisturbed[name])


def test_stop_when_a_job_is_preempted_then_it_is_saved_and_a_resumed_run_ends_with_the_same_bits(
    backbone, undisturbed, tmp_path: Path
):
    path = tmp_path / "run"

    def begin() -> tuple[Engine, RunDirectory]:
        engine = Engine(backbone, capacity=48, max_jobs=1)
        directory = RunDirectory.open(path, resume=(path / "run.json").exists())
        directory.write_run(RunRecord())
        engine.keep_in(directory)
        submit(engine, small_job("b", 1, max_steps=12))
        return engine, directory

    engine, directory = begin()

    def act(engine: Engine, event: Event) -> None:
        if isinstance(event, StepDone) and (event.job, event.step) == ("b", 5):
            submit(engine, small_job("a", priority=1))
        if isinstance(event, StepDone) and (event.job, event.step) == ("a", 2):
            status = json.loads((path / "b" / "status.json").read_text())
            assert (status["state"], status["step"], status["reason"]) == ("queued", 5, "gives way to a")
            engine.stop()

    with directory:
        first, _ = run(engine, act)
    assert {name: outcome.state for name, outcome in first.items()} == {"a": "paused", "b": "paused"}
    engine, directory = begin()
    with directory:
        second, events = run(engine)
    assert events[0] == JobStarted("b", 5, 12)
    second["b"].goes_on_from(first["b"])
    assert_same_bits(second["b"], undisturbed["b"])


def test_stop_when_a_job_has_not_started_then_it_stays_queued_and_its_checkpoint_is_untouched(backbone, tmp_path: Path):
    with RunDirectory.open(tmp_path / "run", resume=False) as directory:
        engine = Engine(backbone, capacity=48, max_jobs=1)
        engine.keep_in(directory)
        submit(engine, small_job("a"), small_job("b", 1))
        run(engine, lambda engine, event: engine.stop() if isinstance(event, StepDone) else None)
    assert {name: str(job.state) for name, job in engine.jobs.items()} == {"a": "paused", "b": "queued"}
    assert not list((tmp_path / "run").glob("b/checkpoints/*"))


def test_start_when_the_first_in_line_is_found_complete_then_the_next_gets_its_seat(backbone, tmp_path: Path):
    """It ends without a microbatch, so nothing but the line itself keeps the engine going."""
    with RunDirectory.open(tmp_path / "run", resume=False) as directory:
        directory.write_run(RunRecord())
        engine = Engine(backbone, capacity=48)
        engine.keep_in(directory)
        submit(engine, small_job("a"))
        engine.run()
    with RunDirectory.open(tmp_path / "run", resume=True) as directory:
        engine = Engine(backbone, capacity=48, max_jobs=1)
        engine.keep_in(directory)
        submit(engine, small_job("a"), small_job("b", 1))
        outcomes, _ = run(engine)
    assert {name: outcome.state for name, outcome in outcomes.items()} == {"a": "succeeded", "b": "succeeded"}


def test_pause_when_a_job_waits_for_its_start_then_its_checkpoint_stays_the_newest(
    backbone, undisturbed, tmp_path: Path
):
    """What is in memory before the first start is a fresh adapter, not the job's state."""
    with RunDirectory.open(tmp_path / "run", resume=False) as directory:
        directory.write_run(RunRecord())
        engine = Engine(backbone, capacity=48)
        engine.keep_in(directory)
        submit(engine, small_job("a"))
        first, _ = run(engine, lambda e, event: e.stop() if isinstance(event, StepDone) and event.step == 3 else None)
    with RunDirectory.open(tmp_path / "run", resume=True) as directory:
        engine = Engine(backbone, capacity=48)
        engine.keep_in(directory)
        submit(engine, small_job("a"))
        engine.pause("a")
        run(engine)
        assert [path.name for path in (tmp_path / "run" / "a" / "checkpoints").iterdir()] == ["step-00000003"]
        engine.resume("a")
        second, events = run(engine)
    assert events[0] == JobStarted("a", 3, 6)
    second["a"].goes_on_from(first["a"])
    assert_same_bits(second["a"], undisturbed["a"])


class FullGpu(Backbone):
    """A backbone with memory for so many adapters, whatever admission believes."""

    def __init__(self, room: int) -> None:
        super().__init__(random_model("llama_odd", num_hidden_layers=1), SimpleNamespace(eos_token_id=None), "full")
        self.room = room
        self.failures = 0

    def attach(self, adapter: Adapter) -> int:
        if len(taken_slots(self)) >= self.room:
            self.failures += 1
            raise torch.OutOfMemoryError("no room")
        return super().attach(adapter)


def test_start_when_memory_turns_out_short_then_the_job_waits_for_another_to_end(undisturbed):
    backbone = FullGpu(1)
    engine = Engine(backbone, capacity=48)
    submit(engine, small_job("b", 1, max_steps=12), small_job("a"), small_job("c", 2))
    outcomes, events = run(engine)
    # Both are tried once; that there is room for one only is remembered over the many decisions that follow.
    assert backbone.failures == 2
    expected = ["job_started b", "waiting a", "waiting c", "job_started a", "job_started c"]
    assert changes(events) == expected
    for name in "abc":
        assert_same_bits(outcomes[name], undisturbed[name])


def test_start_when_there_is_no_memory_even_alone_then_the_job_fails_and_reports_it():
    engine = Engine(FullGpu(0), capacity=48)
    submit(engine, small_job("a"))
    outcomes, events = run(engine)
    assert outcomes["a"].state == "failed"
    assert isinstance(events[-1], JobFailed) and "no memory for its adapter, even alone" in events[-1].reason.text


def test_stretches_when_they_run_then_are_watched_also_where_memory_runs_out(undisturbed, monkeypatch):
    noted: list[str] = []

    class Noting(Placement):
        @contextmanager
        def watched(self, capacity: int) -> Iterator[None]:
            noted.append("begin")
            with super().watched(capacity):
                yield
            noted.append("end")

        def ran_out(self) -> None:
            noted.append("ran out")
            super().ran_out()

    class Once(Backbone):
        def launch(self, *given: Any) -> Any:
            if "ran out" not in noted:
                raise torch.OutOfMemoryError("no room")
            return super().launch(*given)

    monkeypatch.setattr("weft.engine.engine.Placement", Noting)
    engine = Engine(
        Once(random_model("llama_odd", num_hidden_layers=1), SimpleNamespace(eos_token_id=None), "once"), capacity=96
    )
    submit(engine, small_job("a"))
    outcomes, _ = run(engine)
    assert noted[:4] == ["begin", "ran out", "end", "begin"] and noted.count("ran out") == 1
    assert_same_bits(outcomes["a"], undisturbed["a"])


def test_start_when_a_job_gets_its_seat_then_it_holds_all_that_admission_counts(backbone):
    """Moments too, before its first step; so what a first microbatch takes beside it can be measured."""
    engine = Engine(backbone, capacity=48)
    submit(engine, evaluated("evaluated", eval_data=2, eval_steps=1, early_stopping_patience=9))
    job, seen = engine.executor.jobs["evaluated"].weights, []

    def act(engine: Engine, event: Event) -> None:
        if isinstance(event, JobStarted | StepDone) and job.slot is not None:
            adapter = job.adapter
            held = [tensor for group in adapter.groups.values() for tensor in (group.params, group.grad)]
            held += (job.best_params or {}).values()
            held += [state[name] for state in job.optimizer.states.values() for name in ("exp_avg", "exp_avg_sq")]
            seen.append(event.kind)
            assert sum(tensor.nbytes for tensor in held) == sum(engine._placement._allocated_bytes().values())

    run(engine, act)
    assert seen[0] == "job_started" and "step" in seen


def test_move_when_memory_runs_out_on_the_way_then_the_job_is_whole_on_the_cpu(backbone, monkeypatch):
    engine = Engine(backbone, capacity=48)
    submit(engine, small_job("a"))
    engine.run()
    job = engine.executor.jobs["a"].weights
    before = job.tensors()

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("no room")

    with monkeypatch.context() as full:
        full.setattr(torch, "zeros_like", fail)
        with pytest.raises(torch.OutOfMemoryError):
            job.move_to(backbone.device)
    after = job.tensors()
    assert before.keys() == after.keys() and all(before[name].equal(after[name]) for name in before)


def test_move_when_a_job_is_taken_off_then_its_tensors_are_its_own_and_unchanged(backbone):
    engine = Engine(backbone, capacity=48)
    submit(engine, small_job("a"))
    for event in engine.events():
        if isinstance(event, StepDone) and event.step == 3:
            break
    job = engine.executor.jobs["a"].weights
    before, slotted = job.tensors(), job.adapter.groups["a"].params
    engine._placement.take(engine.jobs["a"])
    assert job.slot is None and job.adapter.groups["a"].params is not slotted
    after = job.tensors()
    assert before.keys() == after.keys() and all(before[name].equal(after[name]) for name in before)
    slotted.zero_()
    assert all(x.equal(y) for x, y in zip(flat(job.adapter.tensors()), flat(engine.adapter_of("a")), strict=True))
    assert job.adapter.groups["a"].params.abs().sum() > 0 and not job.adapter.groups["a"].grad.any()
