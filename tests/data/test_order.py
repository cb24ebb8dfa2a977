from __future__ import annotations

import numpy as np
import pytest

from weft.data.order import BatchSchedule, Mixture, epoch_order
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


def test_schedule_when_steps_are_done_then_counts_finished_epochs():
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


MIXED = Mixture((6, 2, 12), (2.0, 1.0, 1.0))


def test_mixture_when_counted_then_shares_add_up_to_an_epoch_of_all_sources():
    assert MIXED.counts == (10, 5, 5)
    assert Mixture((4, 3), (1.0, 1.0)).counts == (4, 3)
    assert Mixture((5, 5), (0.1, 0.2)).counts == (3, 7)


@pytest.mark.parametrize("shuffle", [True, False])
def test_mixture_when_epochs_pass_then_samples_of_a_source_are_met_equally_often(shuffle: bool):
    """A source goes on where it stopped: after any number of epochs two of its samples differ by one at most."""
    met = np.zeros(20, np.int64)
    for epoch in range(7):
        order = MIXED.epoch(3, epoch, shuffle=shuffle)
        met += np.bincount(order, minlength=20)
        sources = np.split(met, [6, 8])
        assert [int(each.sum()) for each in sources] == [(epoch + 1) * count for count in MIXED.counts]
        assert all(each.max() - each.min() <= 1 for each in sources)
        assert MIXED.met(epoch + 1, 3, shuffle=shuffle).tolist() == met.tolist()


def test_mixture_when_not_shuffled_then_sources_alternate_in_their_shares():
    assert Mixture((2, 4), (1.0, 2.0)).epoch(0, 0, shuffle=False).tolist() == [2, 0, 3, 4, 1, 5]


def test_schedule_when_sources_have_weights_then_batches_are_a_function_of_the_seed_alone():
    """A resumed job begins with the batch that would have come next: no batch depends on those before it."""
    job = JobSpec("a", ({"path": "x", "weight": 2}, "y"), num_train_epochs=2.5, global_batch_size=4)  # type: ignore[arg-type]
    lengths = np.arange(1, 11)
    plan = BatchSchedule.of(job, 8, 2)
    forward = [plan.batch(step).tolist() for step in range(plan.num_steps)]
    epoch_order.cache_clear()
    assert [plan.batch(step).tolist() for step in reversed(range(plan.num_steps))][::-1] == forward
    assert plan.num_tokens(lengths) == sum(int(lengths[batch].sum()) for batch in forward)
    assert sum(index >= 8 for index in forward[0] + forward[1] + forward[2]) == 3
