"""Learning rates are those of transformers, at every step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from weft.engine.jobs.progress import check_steps, learning_rate, warmup_steps
from weft.errors import ConfigError
from weft.spec import JobSpec
from weft.spec.choices import SCHEDULE_SETTINGS, SCHEDULES

PEAK = 3e-3
SETTINGS: list[tuple[str, dict[str, Any]]] = [
    *((kind, {}) for kind in SCHEDULES if kind not in SCHEDULE_SETTINGS),
    ("cosine_with_restarts", {}),
    ("cosine_with_restarts", {"num_cycles": 3}),
    ("cosine_with_min_lr", {"min_lr": 1e-3}),
    ("cosine_with_min_lr", {"min_lr_rate": 0.1}),
    *(("warmup_stable_decay", {"num_decay_steps": 5, "decay_type": kind}) for kind in ("cosine", "linear", "1-sqrt")),
    ("warmup_stable_decay", {"num_decay_steps": 0, "min_lr_ratio": 0.2}),
    ("warmup_stable_decay", {"num_decay_steps": 4, "num_stable_steps": 3, "min_lr_ratio": 0.3}),
]
IDS = ["-".join([kind, *map(str, settings.values())]) for kind, settings in SETTINGS]


def rates_of_transformers(kind: str, num_steps: int, warmup: int, settings: dict[str, Any]) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    # It takes both, and warns of it.
    own = None if "num_stable_steps" in settings else num_steps
    schedule = transformers.get_scheduler(
        kind, optimizer, num_warmup_steps=warmup, num_training_steps=own, scheduler_specific_kwargs=settings
    )
    rates = [optimizer.param_groups[0]["lr"]]
    for _ in range(num_steps - 1):
        optimizer.step()
        schedule.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


@pytest.mark.parametrize(("kind", "settings"), SETTINGS, ids=IDS)
@pytest.mark.parametrize(
    ("num_steps", "warmup"), [(1, 0), (1, 1), (2, 1), (7, 0), (40, 0), (40, 1), (40, 13), (40, 39), (40, 40), (9, 20)]
)
def test_learning_rate_when_any_step_then_equals_transformers(kind, settings, num_steps, warmup):
    mine = [learning_rate(kind, PEAK, step, num_steps, warmup, settings) for step in range(num_steps)]
    assert mine == pytest.approx(rates_of_transformers(kind, num_steps, warmup, settings), rel=1e-12, abs=1e-18)


def test_decay_when_it_is_a_fraction_then_is_that_part_of_all_steps():
    given = [
        [learning_rate("warmup_stable_decay", 1.0, step, 40, 4, {"num_decay_steps": steps}) for step in range(40)]
        for steps in (0.25, 10)
    ]
    assert given[0] == given[1] and given[0].count(1.0) == 27


@pytest.mark.parametrize(
    ("steps", "warmup", "problem"),
    [
        (11, 0, "11 steps of decay are more than the 10 of the job."),
        (8, 0.25, "8 steps of decay and 3 of warm-up are more than the 10 of the job."),
        (8, 2, None),
        (0.75, 0.25, None),
    ],
)
def test_decay_when_it_does_not_fit_the_steps_then_is_refused(steps, warmup, problem):
    settings = {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_decay_steps": steps}}
    job = JobSpec("job", ("rows.jsonl",), warmup_steps=warmup, **settings)
    if problem is None:
        check_steps(job, 10)
        check_steps(job, 11)
        return
    with pytest.raises(ConfigError) as refused:
        check_steps(job, 10)
    assert str(refused.value) == f"lr_scheduler_kwargs.num_decay_steps: {problem}"


def test_rate_when_it_ends_above_its_peak_then_is_refused():
    settings = {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-3}}
    JobSpec("job", ("rows.jsonl",), learning_rate=1e-3, **settings)
    with pytest.raises(ConfigError) as refused:
        JobSpec("job", ("rows.jsonl",), learning_rate=5e-4, **settings)
    assert str(refused.value).startswith(
        "lr_scheduler_kwargs.min_lr: got 0.001, which is above the learning_rate of 0.0005"
    )


@pytest.mark.parametrize("setting", [0.0, 0.03, 0.1, 0.5, 0.99, 1.0, 3.0, 100.0])
@pytest.mark.parametrize("num_steps", [1, 7, 100])
def test_warmup_when_count_or_fraction_then_equals_transformers(setting, num_steps, tmp_path):
    arguments = transformers.TrainingArguments(output_dir=str(tmp_path), warmup_steps=setting, use_cpu=True)
    assert warmup_steps(setting, num_steps) == arguments.get_warmup_steps(num_steps)
