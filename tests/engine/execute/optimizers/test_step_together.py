"""The fused step of many jobs is the step torch takes for each of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import assert_same_bits, finish, job_spec, random_data, shallow_backbone, submit, train

from weft.engine.engine import Engine
from weft.engine.execute.optimizers.adamw import AdamW
from weft.engine.execute.optimizers.optimizer import Optimizer, step_by_kind, step_together


@pytest.fixture(scope="module")
def backbone():
    return shallow_backbone("llama_odd")


def optimizers(backbone: Any, num: int = 3) -> list[Optimizer]:
    """Jobs that clip, decay and train B faster than A; none of them alike."""
    made = []
    for i in range(num):
        settings = {"max_grad_norm": (0.0, 0.5, 1e6)[i % 3], "weight_decay": 0.1 * i, "adam_beta2": 0.99}
        spec = job_spec(f"job{i}", adapter={"r": 2 + i}, loraplus_lr_ratio=4.0 if i == 1 else None, **settings)
        made.append(AdamW(backbone.new_adapter(spec.adapter, i), spec))
    return made


def set_gradients(given: list[Optimizer], seed: int) -> None:
    for i, optimizer in enumerate(given):
        generator = torch.Generator().manual_seed(97 * i + seed)
        for grad in (optimizer.adapter.groups["a"].grad, optimizer.adapter.groups["b"].grad):
            grad.copy_(torch.randn(grad.shape, generator=generator))


def test_step_by_kind_when_memory_ends_among_the_first_moments_then_can_be_taken_again(backbone, monkeypatch):
    """A job whose second moments found no room has none at all, and steps as if nothing had happened."""
    failed, smooth = optimizers(backbone), optimizers(backbone)
    for given in (failed, smooth):
        set_gradients(given, 1)
    real, calls = torch.zeros_like, []

    def zeros_like(tensor: torch.Tensor) -> torch.Tensor:
        calls.append(tensor)
        if len(calls) == 4:
            raise torch.OutOfMemoryError("none left")
        return real(tensor)

    monkeypatch.setattr(torch, "zeros_like", zeros_like)
    with pytest.raises(torch.OutOfMemoryError):
        step_by_kind(failed, [True] * 3)()
    step_by_kind(failed, [True] * 3)()
    step_by_kind(smooth, [True] * 3)()
    for one, other in zip(failed, smooth, strict=True):
        assert one.adapter.groups["b"].params.equal(other.adapter.groups["b"].params)
        assert all(tensor.equal(other.tensors()[name]) for name, tensor in one.tensors().items())


def test_step_by_kind_when_taken_twenty_times_then_equals_torch(backbone):
    """Also with a step left out, which does not count."""
    fused, plain = optimizers(backbone), optimizers(backbone)
    for step in range(20):
        finite = [True, step != 4, True]
        for given in (fused, plain):
            set_gradients(given, step)
            for optimizer in given:
                optimizer.set_rate(1e-2 / (step + 1))
        mine, others = step_by_kind(fused, finite)(), step_together(plain, finite)()
        assert [u.skipped for u in mine] == [u.skipped for u in others] == [False, step == 4, False]
        for x, y in zip(mine, others, strict=True):
            assert (x.grad_norm, x.largest) == pytest.approx((y.grad_norm, y.largest), rel=1e-6)
    for x, y in zip(fused, plain, strict=True):
        assert x.tensors().keys() == y.tensors().keys()
        for name, tensor in x.tensors().items():
            assert (tensor - y.tensors()[name]).norm() <= 1e-6 * tensor.norm(), name
        assert (x.adapter.groups["b"].params - y.adapter.groups["b"].params).norm() <= 1e-6 * y.adapter.groups[
            "b"
        ].params.norm()
        assert not x.adapter.groups["a"].grad.any() and not x.adapter.groups["b"].grad.any()
    assert float(fused[1].states["a"]["step"]) == 19


def test_take_when_a_checkpoint_is_taken_up_then_both_ways_go_on_from_it(backbone):
    """A checkpoint does not record which of them wrote it."""
    first = optimizers(backbone, 1)
    set_gradients(first, 0)
    step_together(first, [True])()
    saved = {name: tensor.clone() for name, tensor in first[0].tensors().items()}
    ends = []
    for step in (step_by_kind, step_together):
        again = optimizers(backbone, 1)
        again[0].adapter.groups["a"].params.copy_(first[0].adapter.groups["a"].params)
        again[0].take({name: tensor.clone() for name, tensor in saved.items()})
        set_gradients(again, 1)
        step(again, [True])()
        ends.append(again[0].adapter.groups["a"].params)
        assert float(again[0].states["b"]["step"]) == 2
    assert (ends[0] - ends[1]).norm() <= 1e-6 * ends[1].norm()
    assert float(saved["optimizer_a.step"]) == 1, "the checkpoint itself stays as it is"


def test_steps_when_weights_change_then_their_adapters_are_notified(backbone, monkeypatch):
    given = optimizers(backbone, 2)
    notified: list[int] = []
    for i, optimizer in enumerate(given):
        monkeypatch.setattr(optimizer.adapter, "changed", lambda i=i: notified.append(i))
    step_together(given, [True, True])
    assert notified == [0, 1]


def test_jobs_when_stepped_by_the_fused_way_then_end_as_with_torch_and_alone_as_together(backbone, monkeypatch):
    """The whole engine on the fused path: close to torch, and the same bits alone as together."""
    jobs = [
        (job_spec(f"job{i}", seed=i, max_steps=8, weight_decay=0.05 * i, max_grad_norm=0.3), random_data(i))
        for i in range(3)
    ]
    expected = train(backbone, jobs, capacity=64)
    monkeypatch.setattr("weft.engine.execute.microbatch.step_together", step_by_kind)
    together = Engine(backbone, capacity=64)
    submit(together, *jobs)
    outcomes = finish(together)
    alone = train(backbone, jobs[1:2], capacity=64)
    assert_same_bits(outcomes["job1"], alone["job1"])
    for name, outcome in outcomes.items():
        assert outcome.losses == pytest.approx(expected[name].losses, rel=1e-5)
