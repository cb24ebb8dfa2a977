from __future__ import annotations

import numpy as np
import pytest

from weft.data.order import BatchSchedule, epoch_order
from weft.spec import JobSpec


def schedule(**values: object) -> BatchSchedule:
    settings = {"num_samples": 10, "batch_size": 4, "num_epochs": 2.0, "max_steps": None, "seed": 7, "shuffle": True}
    return BatchSchedule(**{**settings, **values})  # type: ignore[arg-type]


def test_epoch_order_when_shuffled_then_is_a_permutation_fixed_by_seed_and_epoch():
    order = epoch_order(100, seed=1, epoch=0, shuffle=True)
    assert sorted(order.tolist()) == list(range(100))
    assert order.tolist() != list(range(100))
    epoch_order.cache_clear()
    assert order.tolist() == epoch_order(100, seed=1, epoch=0, shuffle=True).tolist()
    assert order.tolist() != epoch_order(100, seed=1, epoch=1, shuffle=True).tolist()
    assert order.tolist() != epoch_order(100, seed=2, epoch=0, shuffle=True).tolist()


def test_epoch_order_when_drawn_today_then_is_the_order_of_the_first_release():
    assert epoch_order(8, seed=42, epoch=0, shuffle=True).tolist() == [4, 1, 3, 6, 0, 7, 2, 5]


def test_epoch_order_when_not_shuffled_then_is_the_order_of_the_rows():
    assert epoch_order(5, seed=1, epoch=3, shuffle=False).tolist() == [0, 1, 2, 3, 4]


def test_epoch_order_when_written_to_then_refuses():
    with pytest.raises(ValueError, match="read-only"):
        epoch_order(5, seed=1, epoch=0, shuffle=True)[0] = 3


def test_schedule_when_the_last_batch_is_short_then_no_batch_crosses_epochs():
    plan = schedule()
    assert (plan.steps_per_epoch, plan.num_steps) == (3, 6)
    sizes = [len(plan.batch(step)) for step in range(6)]
    assert sizes == [4, 4, 2, 4, 4, 2]
    for epoch in (0, 1):
        met = np.concatenate([plan.batch(3 * epoch + i) for i in range(3)])
        assert met.tolist() == epoch_order(10, seed=7, epoch=epoch, shuffle=True).tolist()


@pytest.mark.parametrize(
    ("num_epochs", "max_steps", "num_steps"),
    [(1.0, None, 3), (0.5, None, 2), (0.01, None, 1), (2.4, None, 8), (1.0, 100, 100), (5.0, 2, 2)],
)
def test_schedule_when_epochs_are_fractions_or_steps_are_given_then_counts_steps(
    num_epochs: float, max_steps: int | None, num_steps: int
):
    plan = schedule(num_epochs=num_epochs, max_steps=max_steps)
    assert plan.num_steps == num_steps
    assert len(plan.batch(num_steps - 1)) in (2, 4)
    with pytest.raises(AssertionError):
        plan.batch(num_steps)


def test_schedule_when_the_product_is_a_hair_above_a_whole_number_then_is_that_number():
    plan = schedule(num_samples=10, batch_size=1, num_epochs=0.1 + 0.2)
    assert (0.1 + 0.2) * 10 > 3
    assert plan.num_steps == 3


def test_schedule_when_asked_for_the_epoch_then_counts_epochs_done():
    assert schedule().epoch_of(0) == 0.0
    assert schedule().epoch_of(3) == 1.0
    assert schedule().epoch_of(4) == pytest.approx(4 / 3)


@pytest.mark.parametrize(("num_epochs", "max_steps"), [(2.4, None), (0.5, None), (1.0, 7), (3.0, None)])
def test_schedule_when_lengths_are_known_then_counts_the_tokens_of_every_batch(
    num_epochs: float, max_steps: int | None
):
    plan, lengths = schedule(num_epochs=num_epochs, max_steps=max_steps), [3**i for i in range(10)]
    met = [lengths[i] for step in range(plan.num_steps) for i in plan.batch(step)]
    assert plan.num_tokens(lengths) == sum(met)


@pytest.mark.parametrize(("eval_steps", "num_evals"), [(None, 3), (1, 8), (4, 2), (5, 2), (100, 1)])
def test_schedule_when_steps_between_evaluations_are_given_or_not_then_counts_them_with_the_last(
    eval_steps: int | None, num_evals: int
):
    assert schedule(num_epochs=2.4).num_evals(eval_steps) == num_evals


@pytest.mark.parametrize(("epochs", "max_steps"), [(1.0, None), (2.5, None), (0.3, None), (1.0, 1), (1.0, 7)])
def test_schedule_when_its_samples_are_counted_then_as_many_as_its_steps_hold(epochs: float, max_steps: int | None):
    """Counted without going through the steps, last small batch of an epoch and unfinished epoch included."""
    order = schedule(num_samples=11, batch_size=4, num_epochs=epochs, max_steps=max_steps)
    assert order.num_trained_samples == sum(len(order.batch(step)) for step in range(order.num_steps))


def test_schedule_when_made_for_a_job_then_follows_its_settings():
    job = JobSpec("j", ("t",), global_batch_size=3, num_train_epochs=2, max_steps=9, seed=4, shuffle=False)
    assert BatchSchedule.of(job, 10) == BatchSchedule(
        num_samples=10, batch_size=3, num_epochs=2, max_steps=9, seed=4, shuffle=False
    )
