"""A job that goes wrong costs the others nothing: they end with the bits they would have had beside a healthy one."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from covering import each_value
from tiny_models import (
    TWO_LINEARS,
    VOCABULARY,
    Job,
    Outcome,
    assert_same_bits,
    job_spec,
    random_backbone,
    random_data,
    train,
)

from weft.engine.engine import Engine
from weft.engine.events import Event, JobFailed, JobStarted, StepDone
from weft.engine.execute import local
from weft.engine.execute.microbatch import ExecutedJob
from weft.engine.execute.optimizers.adamw import AdamW
from weft.engine.execute.protocol import ReplicaFaultError
from weft.engine.execute.weights import JobWeights
from weft.engine.recorder import RunRecorder
from weft.job_state import ReasonCode

STEPS = 6
Damage = Callable[[JobWeights], None]


def bad_job(**settings) -> Job:
    """The one to be damaged; it alone uses the last word of the vocabulary."""
    adapter = {"lora_dropout": 0.1, "target_modules": TWO_LINEARS}
    spec = job_spec("bad", adapter=adapter, **{"max_steps": STEPS, "learning_rate": 1e-3, **settings})
    return spec, random_data(1, num_samples=9)


def good_jobs() -> list[Job]:
    return [
        (
            job_spec(
                f"good{i}", adapter={"r": 3 + i, "lora_dropout": 0.2 * i}, max_steps=STEPS - 2 + i, eval_data=2, seed=i
            ),
            random_data(10 + i, num_samples=9, num_eval=2, high=VOCABULARY - 1),
        )
        for i in range(2)
    ]


@pytest.fixture(scope="module")
def backbone():
    return random_backbone("llama_odd")


@pytest.fixture(scope="module")
def healthy(backbone) -> dict[str, Outcome]:
    outcomes = train(backbone, all_jobs())
    assert all(outcome.state == "succeeded" for outcome in outcomes.values())
    return outcomes


def all_jobs(**settings) -> list[Job]:
    first, *others = good_jobs()
    return [first, bad_job(**settings), *others]


def train_damaged(
    backbone, damage: Damage, step: int, jobs: list[Job] | None = None
) -> tuple[dict[str, Outcome], list[Event]]:
    """Damages the bad job after one of its steps; 0: before its first."""
    events: list[Event] = []

    def on_event(engine: Engine, event: Event) -> None:
        events.append(event)
        if isinstance(event, StepDone | JobStarted) and (event.job, event.step) == ("bad", step):
            damage(engine.executor.jobs["bad"].weights)

    return train(backbone, all_jobs() if jobs is None else jobs, on_event=on_event), events


def assert_others_unharmed(outcomes: dict[str, Outcome], healthy: dict[str, Outcome]) -> None:
    for spec, _ in good_jobs():
        assert_same_bits(outcomes[spec.name], healthy[spec.name])


def assert_failed(outcome: Outcome, events: list[Event], backbone) -> None:
    """The job failed with a reason that names its step and learning rate, and left its slot."""
    (failure,) = [event for event in events if isinstance(event, JobFailed)]
    assert outcome.state == "failed"
    assert outcome.reason == failure.reason.text and failure.reason.code is ReasonCode.DIVERGED
    last = [event for event in events if isinstance(event, StepDone) and event.job == "bad"][-1]
    assert f"(step {last.step}, learning rate {last.learning_rate:g})" in failure.reason.text
    assert all(not linear.slots for linear in backbone.linears.values())


def nan_in_a(weights: JobWeights) -> None:
    weights.adapter.groups["a"].params[5] = math.nan


def nan_in_b(weights: JobWeights) -> None:
    weights.adapter.groups["b"].params[5] = math.nan


def infinite_b(weights: JobWeights) -> None:
    weights.adapter.groups["b"].params[5] = math.inf


def nan_in_optimizer(group: str, moment: str) -> Damage:
    def damage(weights: JobWeights) -> None:
        state = weights.optimizer.states[group]
        if moment in state:
            state[moment][7] = math.nan

    damage.__name__ = f"nan_in_{moment}_of_{group}"
    return damage


DAMAGES = [nan_in_a, nan_in_b, infinite_b, *(nan_in_optimizer(s, m) for s in "ab" for m in ("exp_avg", "exp_avg_sq"))]


@pytest.mark.parametrize(("damage", "step"), each_value(DAMAGES, [1, 3]))
def test_neighbours_when_a_job_turns_nan_then_unharmed_and_it_fails(backbone, healthy, damage, step):
    outcomes, events = train_damaged(backbone, damage, step)
    assert_others_unharmed(outcomes, healthy)
    assert_failed(outcomes["bad"], events, backbone)


@pytest.mark.parametrize(("damage", "step"), each_value(DAMAGES, [STEPS - 2, STEPS - 1]))
def test_job_when_it_turns_nan_in_its_last_steps_then_fails_instead_of_handing_out_nan(backbone, damage, step):
    outcomes, events = train_damaged(backbone, damage, step, [bad_job()])
    assert_failed(outcomes["bad"], events, backbone)


@pytest.mark.parametrize("damage", [nan_in_a, nan_in_b], ids=lambda d: d.__name__)
def test_neighbours_when_a_job_is_nan_from_the_start_then_unharmed_and_it_fails(backbone, healthy, damage):
    outcomes, events = train_damaged(backbone, damage, 0)
    assert_others_unharmed(outcomes, healthy)
    assert_failed(outcomes["bad"], events, backbone)


@pytest.mark.parametrize("rate", [1e10, 1e18])
def test_neighbours_when_a_learning_rate_is_absurd_then_unharmed_and_it_fails(backbone, healthy, rate):
    events: list[Event] = []
    jobs = all_jobs(learning_rate=rate, max_grad_norm=0)
    outcomes = train(backbone, jobs, on_event=lambda _, event: events.append(event))
    assert_others_unharmed(outcomes, healthy)
    assert_failed(outcomes["bad"], events, backbone)
    assert f"learning rate {rate:g}" in outcomes["bad"].reason


@pytest.fixture
def spoiled(monkeypatch):
    """Changes the bad job's gradients before some of its steps."""

    def arm(spoil: Callable[[JobWeights], None], step: int, times: int) -> None:
        begin, done = local.take_steps, Counter[str]()

        def take_steps(jobs: Any, orders: Any, *finite: Any) -> Any:
            for order in orders:
                if order.job == "bad" and step <= done["bad"] < step + times:
                    spoil(jobs["bad"].weights)
                done[order.job] += 1
            return begin(jobs, orders, *finite)

        monkeypatch.setattr(local, "take_steps", take_steps)

    return arm


def nan_gradient(weights: JobWeights) -> None:
    weights.adapter.groups["a"].grad[3] = math.nan


def infinite_gradient(weights: JobWeights) -> None:
    weights.adapter.groups["b"].grad[3] = math.inf


def huge_gradient(weights: JobWeights) -> None:
    weights.adapter.groups["a"].grad.mul_(1e6)
    weights.adapter.groups["b"].grad.mul_(1e6)


@pytest.mark.parametrize(
    ("spoil", "step"), each_value([nan_gradient, infinite_gradient, huge_gradient], [0, 2, STEPS - 1])
)
def test_neighbours_when_a_gradient_is_bad_once_then_unharmed(backbone, healthy, spoiled, spoil, step):
    events: list[Event] = []
    spoiled(spoil, step, 1)
    outcomes = train(backbone, all_jobs(), on_event=lambda _, event: events.append(event))
    assert_others_unharmed(outcomes, healthy)
    assert outcomes["bad"].state == "succeeded"
    steps = [event for event in events if isinstance(event, StepDone) and event.job == "bad"]
    assert [event.skipped for event in steps] == [event.step == step + 1 and spoil != huge_gradient for event in steps]


@pytest.mark.parametrize(("spoil", "step"), each_value([nan_gradient, infinite_gradient], [0, 3]))
def test_neighbours_when_gradients_are_bad_three_times_then_unharmed_and_it_fails(
    backbone, healthy, spoiled, spoil, step
):
    events: list[Event] = []
    spoiled(spoil, step, 3)
    outcomes = train(backbone, all_jobs(), on_event=lambda _, event: events.append(event))
    assert_others_unharmed(outcomes, healthy)
    assert_failed(outcomes["bad"], events, backbone)


def test_job_when_a_step_is_skipped_then_its_weights_and_moments_stay(backbone, spoiled):
    before: dict[int, list[torch.Tensor]] = {}

    def remember(engine: Engine, event: Event) -> None:
        if isinstance(event, StepDone):
            weights = engine.executor.jobs["bad"].weights
            before[event.step] = [
                t.clone() for name, t in sorted(weights.tensors().items()) if not name.endswith("step")
            ]

    spoiled(nan_gradient, 2, 1)
    train(backbone, [bad_job()], on_event=remember)
    assert all(torch.equal(x, y) for x, y in zip(before[2], before[3], strict=True))
    assert not all(torch.equal(x, y) for x, y in zip(before[3], before[4], strict=True))


def test_neighbours_when_the_backbone_is_nan_for_a_word_only_one_job_uses_then_only_that_job_fails(healthy):
    damaged = random_backbone("llama_odd")
    with torch.no_grad():
        damaged.model.get_input_embeddings().weight[VOCABULARY - 1] = math.nan
    events: list[Event] = []
    assert any((VOCABULARY - 1) in sample.tokens for sample in bad_job()[1].train.samples)
    outcomes = train(damaged, all_jobs(), on_event=lambda _, event: events.append(event))
    assert_others_unharmed(outcomes, healthy)
    skipped = [event.skipped for event in events if isinstance(event, StepDone) and event.job == "bad"]
    assert any(skipped)
    assert not any(event.skipped for event in events if isinstance(event, StepDone) and event.job != "bad")


def test_jobs_when_padding_rows_are_nan_then_unharmed(healthy):
    """Padding is made of word 0, which no sample has."""
    damaged = random_backbone("llama_odd")
    with torch.no_grad():
        damaged.model.get_input_embeddings().weight[0] = math.nan
    outcomes = train(damaged, all_jobs())
    for name, outcome in outcomes.items():
        assert_same_bits(outcome, healthy[name])


@pytest.mark.parametrize("family", ["gemma2", "mistral", "opt"])
def test_neighbours_when_a_job_is_nan_on_another_family_then_unharmed(family):
    backbone = random_backbone(family)
    healthy = train(backbone, all_jobs())
    outcomes, events = train_damaged(backbone, nan_in_b, 1)
    assert_others_unharmed(outcomes, healthy)
    assert_failed(outcomes["bad"], events, backbone)


BUG = ValueError("value cannot be converted to type float without overflow")


def is_bad(thing: Any) -> bool:
    """Whether a call is about the bad job, whatever it is given of it."""
    spec = getattr(thing, "spec", thing)
    return getattr(spec, "name", spec) == "bad"


@pytest.fixture
def broken(monkeypatch):
    """Makes the calls of a function about the bad job raise, from the n-th on."""

    def arm(owner: Any, name: str, job: Callable[..., Any], after: int = 0, error: Exception = BUG) -> None:
        call, met = getattr(owner, name), Counter[str]()

        def breaks(*arguments: Any, **options: Any) -> Any:
            if is_bad(job(*arguments)):
                met["bad"] += 1
                if met["bad"] > after:
                    raise error
            return call(*arguments, **options)

        monkeypatch.setattr(owner, name, breaks)

    return arm


BREAKS: dict[str, tuple[Any, str, Callable[..., Any], int]] = {
    "its seat": (local.LocalExecutor, "seat", lambda executor, job: job, 0),
    "its first sample": (ExecutedJob, "sample_of", lambda executed, *_: executed.given, 0),
    "a later sample": (ExecutedJob, "sample_of", lambda executed, *_: executed.given, 7),
    "its first step": (AdamW, "step", lambda optimizer, is_finite: optimizer, 0),
    "a later step": (AdamW, "step", lambda optimizer, is_finite: optimizer, 3),
    "its first checkpoint": (RunRecorder, "start_checkpoint", lambda keeper, job, *_: job, 0),
    "its end": (local.LocalExecutor, "use_best", lambda executor, job: job, 0),
}


@pytest.mark.parametrize("where", BREAKS)
def test_neighbours_when_a_job_raises_an_unexpected_error_then_unharmed_and_it_alone_fails(
    backbone, healthy, broken, where
):
    """Whatever one job raises, wherever it does, ends that job: the others go on with the same bits."""
    broken(*BREAKS[where])
    events: list[Event] = []
    outcomes = train(backbone, all_jobs(save_steps=2), on_event=lambda _, event: events.append(event))
    assert_others_unharmed(outcomes, healthy)
    (failure,) = [event for event in events if isinstance(event, JobFailed)]
    assert (failure.job, failure.reason.code) == ("bad", ReasonCode.INTERNAL)
    assert failure.reason.text == f"internal error: ValueError: {BUG}"
    assert outcomes["bad"].state == "failed"
    assert all(not linear.slots for linear in backbone.linears.values())


def test_engine_when_the_device_has_failed_then_it_is_reported_and_blames_no_job(backbone, broken):
    """A failed device fails for everybody: only another process can go on."""
    fault = RuntimeError("CUDA error: an illegal memory access was encountered")
    broken(local, "pack_microbatch", lambda *_: "bad", 2, fault)
    events: list[Event] = []
    with pytest.raises(ReplicaFaultError, match="illegal memory access"):
        train(backbone, all_jobs(), on_event=lambda _, event: events.append(event))
    assert not any(isinstance(event, JobFailed) for event in events)
