"""Jobs of every objective and method that turn NaN, diverge or are cancelled harm none of those beside them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from covering import slow
from test_distillation_exact import student
from test_heads_exact import OBJECTIVES as HEADS
from test_heads_exact import head_job
from test_preferences_exact import LOSSES, pair_job
from tiny_models import Job, assert_same_bits, job_spec, random_data, shallow_backbone, train

from weft.engine.engine import Engine
from weft.engine.events import Event, StepDone
from weft.methods.registry import METHODS

FATES = {"nan": "failed", "cancelled": "cancelled", "diverges": "failed"}
"""What befalls a job, and how it ends."""
METHOD_SETTINGS: dict[str, dict[str, Any]] = {
    "bottleneck": {"bottleneck_size": 4},
    "prompt_tuning": {"num_virtual_tokens": 2},
    "prefix_tuning": {"num_virtual_tokens": 2},
    "vera": {"vera_rank": 4},
}


def of_objective(name: str, seed: int) -> Job:
    if name in LOSSES:
        return pair_job(name, seed)
    if name in HEADS:
        return head_job(name, seed)
    if name == "distillation":
        return student("base", seed, teacher="base")
    return job_spec(name, seed=seed), random_data(seed)


def of_method(name: str, seed: int) -> Job:
    return job_spec(name, seed=seed, adapter={"method": name, **METHOD_SETTINGS.get(name, {})}), random_data(seed)


def named(job: Job, name: str, **changes: Any) -> Job:
    return replace(job[0], name=name, max_steps=5, **changes), job[1]


OBJECTIVE_NAMES = (*LOSSES, *HEADS, "distillation", "supervised")
KINDS = [(of_objective, name) for name in OBJECTIVE_NAMES] + [(of_method, name) for name in METHODS]


def neighbours() -> list[Job]:
    chosen = [of_objective(name, 50 + seed) for seed, name in enumerate(("supervised", "dpo", "kto", "words"))]
    return [named(job, f"good{i}") for i, job in enumerate([*chosen, of_method("dora", 60), of_method("ia3", 61)])]


def bad_jobs(fates: Sequence[Sequence[str]]) -> list[Job]:
    """One of each kind for each of its fates; kinds have the given ones in turn."""
    rates = {"diverges": {"learning_rate": 1e18, "max_grad_norm": 0.0}}
    return [
        named(make(name, seed), f"{fate}-{make.__name__}-{name}", **rates.get(fate, {}))
        for seed, (make, name) in enumerate(KINDS)
        for fate in fates[seed % len(fates)]
    ]


def befall(engine: Engine, event: Event) -> None:
    """After its first step a job gets the fault that its name states."""
    if not isinstance(event, StepDone) or event.step != 1:
        return
    if event.job.startswith("cancelled"):
        engine.cancel(event.job)
    elif event.job.startswith("nan"):
        adapter = engine.executor.jobs[event.job].weights.adapter
        for group in adapter.groups.values():
            group.params[0] = math.nan
        adapter.changed()


EACH_IN_TURN, ALL = [[fate] for fate in FATES], [list(FATES)]


@pytest.mark.parametrize(("kernels", "fates"), [("reference", ALL), ("fused", EACH_IN_TURN), slow("fused", ALL)])
def test_neighbours_when_jobs_of_any_kind_end_badly_then_have_the_bits_they_have_without_them(kernels, fates):
    backbone = shallow_backbone("llama_odd", kernels=kernels)
    undisturbed = train(backbone, neighbours(), capacity=120)
    found = train(backbone, [*bad_jobs(fates), *neighbours()], capacity=120, on_event=befall)
    for name, outcome in undisturbed.items():
        assert outcome.state == "succeeded"
        assert_same_bits(found[name], outcome)
    ends = {name: outcome.state for name, outcome in found.items() if name not in undisturbed}
    assert ends == {name: FATES[name.partition("-")[0]] for name in ends}
    assert len(ends) == len(fates[0]) * len(KINDS)
