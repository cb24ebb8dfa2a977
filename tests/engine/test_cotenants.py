"""An adapter has the same bits with any neighbours, wherever its microbatches are cut, and whatever others do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from covering import chosen, each_value
from tiny_models import Job, Outcome, assert_same_bits, finish, job_spec, random_backbone, random_data, train

from weft.engine.engine import Engine
from weft.engine.events import Event, MicrobatchDone, StepDone

RANKS = (4, 1, 3, 8, 2, 16, 5, 7)
MODELS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama_odd", {}),
    ("llama_bias", {"dtype": torch.bfloat16}),
    ("llama_odd", {"dtype": torch.bfloat16}),
    ("gemma2", {}),
    ("gemma3_text", {}),
    ("phi3", {"dtype": torch.bfloat16}),
    ("opt_projected", {}),
    ("gpt_neox", {}),
    ("gpt2", {}),
    ("gpt_neo", {}),
    ("falcon", {}),
    ("mixtral", {}),
    ("qwen2_moe", {"dtype": torch.bfloat16}),
    ("llama_odd", {"kernels": "fused"}),
    ("qwen3", {"kernels": "fused", "dtype": torch.bfloat16}),
]
FIRST = (1, 2, 4, 9, 13, 14, 15)
"""Both types and paths, odd sizes, windows, other products than linears and experts: what `make test` trains."""
IDS = ["-".join([name, *(str(value).removeprefix("torch.") for value in options.values())]) for name, options in MODELS]


def me(**settings: Any) -> Job:
    adapter = {"r": 4, "lora_dropout": 0.3, **settings.pop("adapter", {})}
    settings = {"max_steps": 5, "eval_steps": 2, "eval_data": 3, "weight_decay": 0.1, "seed": 3, **settings}
    return job_spec("me", adapter=adapter, **settings), random_data(3, num_samples=10, num_eval=3)


def neighbours(number: int, seed: int = 100) -> list[Job]:
    """Jobs that differ in rank, size, dropout, speed and length."""
    return [
        (
            job_spec(
                f"other{i}",
                adapter={"r": RANKS[-1 - i % 8], "lora_dropout": 0.1 * (i % 3)},
                seed=seed + i,
                global_batch_size=1 + i % 5,
                max_steps=2 + i % 4,
                learning_rate=1e-2,
                priority=i % 3 - 1,
            ),
            random_data(seed + i, num_samples=8, lengths=(2, 5 + 3 * (i % 6))),
        )
        for i in range(number)
    ]


@pytest.mark.parametrize(("name", "options"), chosen(MODELS, *FIRST), ids=IDS)
def test_job_when_1_or_7_train_beside_it_then_same_bits_as_alone(name, options):
    backbone = random_backbone(name, **options)
    job = me(max_steps=3)
    alone = train(backbone, [job])["me"]
    assert alone.state == "succeeded" and len(alone.losses) == 3 and len(alone.eval_losses) == 2
    for number in (1, 7):
        beside = train(backbone, [*neighbours(number), job])["me"]
        assert_same_bits(beside, alone)


@pytest.mark.parametrize(("name", "options"), chosen(MODELS[:4], 0, 3), ids=IDS[:4])
def test_jobs_when_capacity_differs_then_same_bits(name, options):
    """Other capacities cut the microbatches elsewhere and pad them to other sizes."""
    backbone = random_backbone(name, **options)
    narrow, other = me(adapter={"r": 1}, max_steps=3), neighbours(1)[0]
    three = replace(narrow[0], name="three", adapter=replace(narrow[0].adapter, r=3)), narrow[1]
    alone = {job[0].name: train(backbone, [job], capacity=64)[job[0].name] for job in (narrow, three)}
    for capacity in (24, 37, 300):
        found = train(backbone, [narrow, other, three], capacity=capacity)
        for job, outcome in alone.items():
            assert_same_bits(found[job], outcome)


@pytest.mark.slow
def test_job_when_the_model_is_wide_enough_for_row_counts_to_matter_then_same_bits():
    """From about 500 features on, a bfloat16 product over 128 rows and one over 384 differ in their last bits, if the
    processor has such products. One that has none takes 30 ms for a million multiplications: the rest is narrow."""
    sizes = {"hidden_size": 64, "intermediate_size": 768, "initializer_range": 0.05}
    backbone = random_backbone("llama", dtype=torch.bfloat16, **sizes)
    job = job_spec("me", max_length=120, max_steps=2), random_data(3, num_samples=8, lengths=(80, 120))
    alone = train(backbone, [job], capacity=128)["me"]
    assert_same_bits(train(backbone, [job, *neighbours(3)], capacity=512)["me"], alone)


@pytest.mark.parametrize("name", chosen(["llama_odd", "mistral"], 1))
def test_job_when_samples_span_several_tiles_then_same_bits(name):
    backbone = random_backbone(name, max_position_embeddings=512)
    data = random_data(5, num_samples=6, lengths=(90, 300), num_eval=1)
    spec = job_spec("me", adapter={"lora_dropout": 0.2}, max_length=300, max_steps=2, eval_data=1, eval_steps=1)
    others = [
        (job_spec(f"other{i}", max_length=300, max_steps=2, global_batch_size=2), random_data(20 + i, lengths=(3, 300)))
        for i in range(2)
    ]
    alone = train(backbone, [(spec, data)], capacity=300)["me"]
    assert_same_bits(train(backbone, [*others, (spec, data)], capacity=1000)["me"], alone)


@pytest.mark.parametrize("seed", chosen(range(4), 0, 3))
def test_job_when_beside_a_random_crowd_then_same_bits(seed):
    rng = np.random.default_rng(seed)
    name, options = MODELS[seed]
    backbone = random_backbone(name, **options)
    job = me(max_steps=3, global_batch_size=int(rng.integers(1, 9)), adapter={"r": int(rng.choice(RANKS))})
    alone = train(backbone, [job], capacity=int(rng.integers(24, 300)))["me"]
    crowd = [*neighbours(int(rng.integers(1, 9)), seed=1000 * seed), job]
    order = rng.permutation(len(crowd))
    beside = train(backbone, [crowd[i] for i in order], capacity=int(rng.integers(24, 300)))["me"]
    assert_same_bits(beside, alone)


def at_my_step(step: int, action: Callable[[Engine], None]) -> Callable[[Engine, Event], None]:
    def on_event(engine: Engine, event: Event) -> None:
        if isinstance(event, StepDone) and (event.job, event.step) == ("me", step):
            action(engine)

    return on_event


@pytest.fixture(scope="module")
def backbone():
    return random_backbone("llama_odd")


@pytest.fixture(scope="module")
def alone(backbone) -> Outcome:
    return train(backbone, [me()])["me"]


@pytest.mark.parametrize("step", chosen([1, 3], 1))
def test_job_when_neighbours_join_late_then_same_bits(backbone, alone, step):
    late = neighbours(5)

    def join(engine: Engine) -> None:
        for spec, data in late:
            engine.submit(spec, data)

    outcomes = train(backbone, [me()], on_event=at_my_step(step, join))
    assert_same_bits(outcomes["me"], alone)
    together = train(backbone, late)
    for spec, _ in late:
        assert_same_bits(outcomes[spec.name], together[spec.name])


@pytest.mark.parametrize("step", chosen([1, 4], 0))
def test_job_when_neighbours_leave_then_same_bits(backbone, alone, step):
    def leave(engine: Engine) -> None:
        engine.cancel("other1")
        engine.cancel("other3")

    outcomes = train(backbone, [*neighbours(4), me(max_steps=5)], on_event=at_my_step(step, leave))
    assert outcomes["other3"].state == "cancelled"
    assert_same_bits(outcomes["me"], alone)


def test_job_when_neighbours_pause_and_go_on_then_same_bits_for_all(backbone, alone):
    others = neighbours(3)

    def pause_and_resume(engine: Engine, event: Event) -> None:
        at_my_step(1, lambda e: e.pause("other2"))(engine, event)
        at_my_step(3, lambda e: e.resume("other2"))(engine, event)

    outcomes = train(backbone, [me(), *others], on_event=pause_and_resume)
    assert_same_bits(outcomes["me"], alone)
    assert_same_bits(outcomes["other2"], train(backbone, [others[2]])["other2"])


@pytest.mark.parametrize(("microbatch", "capacity"), each_value([1, 2, 4], [24, 64]))
def test_job_when_paused_inside_a_global_batch_and_resumed_then_same_bits(backbone, alone, capacity, microbatch):
    seen: list[Event] = []

    def pause_then_resume(engine: Engine, event: Event) -> None:
        if isinstance(event, MicrobatchDone) and "me" in event.jobs:
            seen.append(event)
            if len(seen) == microbatch:
                engine.pause("me")
        if event.kind == "paused":
            assert engine.jobs["me"].progress.index == 0
        if isinstance(event, StepDone) and event.job == "other3" and event.step == 5:
            engine.resume("me")

    outcomes = train(backbone, [me(), *neighbours(4)], capacity=capacity, on_event=pause_then_resume)
    assert len(seen) > microbatch
    assert_same_bits(outcomes["me"], alone)


def test_job_when_paused_until_all_others_ended_then_same_bits(backbone, alone):
    engine = Engine(backbone, capacity=50)
    for spec, data in [me(), *neighbours(2)]:
        engine.submit(spec, data)
    first = finish(engine, at_my_step(2, lambda e: e.pause("me")))
    assert first["me"].state == "paused" and first["other1"].state == "succeeded"
    engine.resume("me")
    second = finish(engine)["me"]
    second.goes_on_from(first["me"])
    assert_same_bits(second, alone)


@pytest.mark.parametrize(
    "change",
    [{"seed": 4}, {"learning_rate": 4.999e-3}, {"adapter": {"lora_dropout": 0.31}}, {"global_batch_size": 5}],
    ids=["seed", "rate", "dropout", "batch"],
)
def test_job_when_its_own_settings_differ_then_other_bits(backbone, alone, change):
    """The comparison notices the smallest of changes, so equality above means something."""
    other = train(backbone, [me(**change)])["me"]
    assert not all(torch.equal(b, alone.adapter[path][1]) for path, (_, b) in other.adapter.items())
