import pytest
import torch
import transformers

from weft.engine.progress import learning_rate, warmup_steps
from weft.spec.job import SCHEDULES

PEAK = 3e-3


def rates_of_transformers(kind: str, num_steps: int, warmup: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    schedule = transformers.get_scheduler(kind, optimizer, num_warmup_steps=warmup, num_training_steps=num_steps)
    rates = [optimizer.param_groups[0]["lr"]]
    for _ in range(num_steps - 1):
        optimizer.step()
        schedule.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize(
    ("num_steps", "warmup"), [(1, 0), (1, 1), (2, 1), (7, 0), (40, 0), (40, 1), (40, 13), (40, 39), (40, 40), (9, 20)]
)
def test_learning_rate_when_any_step_then_equals_transformers(kind, num_steps, warmup):
    mine = [learning_rate(kind, PEAK, step, num_steps, warmup) for step in range(num_steps)]
    assert mine == pytest.approx(rates_of_transformers(kind, num_steps, warmup), rel=1e-12, abs=1e-18)


@pytest.mark.parametrize("setting", [0.0, 0.03, 0.1, 0.5, 0.99, 1.0, 3.0, 100.0])
@pytest.mark.parametrize("num_steps", [1, 7, 100])
def test_warmup_when_count_or_fraction_then_equals_transformers(setting, num_steps, tmp_path):
    arguments = transformers.TrainingArguments(output_dir=str(tmp_path), warmup_steps=setting, use_cpu=True)
    assert warmup_steps(setting, num_steps) == arguments.get_warmup_steps(num_steps)
