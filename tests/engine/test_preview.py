from types import SimpleNamespace

import pytest
import torch
from tiny_models import assert_same_bits, finish, job_spec, random_data, shallow_backbone, train

from weft.engine.engine import Engine
from weft.engine.events import MicrobatchDone, StepDone
from weft.engine.execute.memory import measure
from weft.engine.preview import preview
from weft.plan.pack import pack
from weft.plan.types import Limits


@pytest.fixture(scope="module")
def backbone():
    return shallow_backbone("llama_odd")


def jobs():
    return [
        (job_spec("a", adapter={"lora_dropout": 0.2}, max_steps=5), random_data(1)),
        (job_spec("b", adapter={"r": 2}, max_steps=None, num_train_epochs=1.5, priority=1), random_data(2)),
    ]


def prepared(backbone, capacity=48, **settings) -> Engine:
    engine = Engine(backbone, capacity=capacity, **settings)
    for spec, data in jobs():
        engine.submit(spec, data)
    return engine


def test_preview_when_taken_before_training_then_every_bit_is_as_without(backbone):
    engine = prepared(backbone)
    preview(engine)
    preview(engine)
    assert not any(linear.slots for linear in backbone.linears.values())
    outcomes = finish(engine)
    without = train(backbone, jobs(), capacity=48)
    for name in "ab":
        assert_same_bits(outcomes[name], without[name])


def test_preview_when_read_then_its_figures_are_those_of_the_run(backbone):
    engine = prepared(backbone)
    plan = preview(engine)
    events = list(engine.events())
    microbatches = [event for event in events if isinstance(event, MicrobatchDone)]
    last = {event.job: event for event in events if isinstance(event, StepDone)}
    assert plan.num_tokens == sum(event.tokens for event in microbatches)
    assert {job.name: (job.num_steps, job.num_tokens) for job in plan.jobs} == {
        name: (event.num_steps, event.num_tokens) for name, event in last.items()
    }
    assert [job.num_parameters for job in plan.jobs] == [
        job.weights.adapter.num_parameters for job in engine.executor.jobs.values()
    ]
    assert plan.num_microbatches == len(microbatches)
    assert plan.capacity == 48 and 0.5 < plan.fill <= 1
    assert plan.seconds > 0 and plan.activation_bytes > 0
    assert plan.total_bytes == plan.backbone_bytes + plan.adapter_bytes + plan.activation_bytes


@pytest.mark.parametrize("kernels", ["reference", "fused"])
def test_preview_when_no_memory_can_be_measured_then_it_is_estimated_and_reports_it(kernels):
    """The fused step leaves nothing to autograd, which is what is measured on a CPU."""
    backbone = shallow_backbone("llama_odd", kernels=kernels)
    plan = preview(prepared(backbone))
    assert plan.is_memory_measured is (kernels == "reference")
    fullest = round(plan.capacity * plan.fill)
    assert plan.activation_bytes > fullest * backbone.model.config.hidden_size * 4


class CapturingGpu:
    """An allocator's account of a step that is captured: a replay allocates the loss alone."""

    held, activations, loss = 16_000, 25_000, 600

    def __init__(self, monkeypatch) -> None:
        self.peak, self.is_captured = self.held, False
        self.replays: list[bool] = []
        self.backbone = SimpleNamespace(device=torch.device("cuda"), path=SimpleNamespace(forget=self.forget))
        given = {
            "memory_allocated": lambda _: self.held,
            "max_memory_allocated": lambda _: self.peak,
            "reset_peak_memory_stats": self.reset,
            "synchronize": lambda _: None,
            "empty_cache": lambda: None,
        }
        for name, stand_in in given.items():
            monkeypatch.setattr(torch.cuda, name, stand_in)

    def reset(self, _: torch.device) -> None:
        self.peak = self.held

    def forget(self) -> None:
        self.is_captured = False

    def run(self) -> None:
        self.replays.append(self.is_captured)
        self.peak = max(self.peak, self.held + (self.loss if self.is_captured else self.activations))
        self.is_captured = True


def test_memory_when_steps_are_captured_then_that_of_the_capture_counts_and_the_time_is_a_replays(monkeypatch):
    gpu = CapturingGpu(monkeypatch)
    tried = measure(gpu.backbone, gpu.run)
    assert tried.held_bytes == gpu.activations and tried.seconds >= 0
    assert gpu.replays == [False, False, True]


def test_preview_when_jobs_wait_for_a_seat_then_the_plan_waits_too(backbone):
    """With one place the jobs' microbatches are not shared, in the plan as in training."""
    alone, together = (preview(prepared(backbone, 200, max_jobs=n)).num_microbatches for n in (1, None))
    events = prepared(backbone, 200, max_jobs=1).events()
    assert alone == sum(isinstance(event, MicrobatchDone) for event in events)
    assert alone > together


def test_preview_when_a_planner_is_given_then_the_plan_is_that_planners(backbone):
    """Every program is the engine's planner's, not the greedy one's."""

    def one_by_one(queues, limits):
        return pack(queues, Limits(max(n for q in queues for b in q.batches for n in b.lengths)))

    engine = prepared(backbone, planner=one_by_one)
    assert preview(engine).num_microbatches > preview(prepared(backbone)).num_microbatches


@pytest.mark.parametrize("state", ["running", "done"])
def test_preview_when_taken_during_or_after_training_then_no_job_changes(state):
    """A preview changes no job, whatever state the job is in."""
    backbone = shallow_backbone("llama_odd")
    engine = prepared(backbone)
    if state == "done":
        engine.run()
        before = {name: (job.state, job.step, engine._placement.has_seat(job)) for name, job in engine.jobs.items()}
        preview(engine)
        assert {
            name: (job.state, job.step, engine._placement.has_seat(job)) for name, job in engine.jobs.items()
        } == before
        return

    def look(engine: Engine, event) -> None:
        if isinstance(event, StepDone) and (event.job, event.step) == ("a", 2):
            preview(engine)

    outcomes = finish(engine, look)
    without = train(backbone, jobs(), capacity=48)
    for name in "ab":
        assert_same_bits(outcomes[name], without[name])
