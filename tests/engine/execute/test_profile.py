"""Measuring a device."""

from __future__ import annotations

import pytest
import torch

from weft.engine.execute.profile import (
    ProfileCase,
    TensorBytes,
    measure_case,
    measure_profile,
    profile_cases,
    stored_bytes,
)
from weft.errors import ConfigError
from weft.model.backbone import Backbone
from weft.model.load import Storage, make_backbone
from weft.plan.cost.profile import Profile
from weft.plan.cost.shape import SHAPES


def tiny(kernels: str = "reference") -> Backbone:
    return make_backbone(SHAPES["tiny"], Storage(), torch.float32, torch.device("cpu"), kernels)


@pytest.fixture(scope="module")
def found() -> Profile:
    return measure_profile(tiny(), capacity=256, repeats=1)


def test_tensor_bytes_when_tensors_come_and_go_then_counts_each_storage_once():
    with TensorBytes() as count:
        a = torch.zeros(100)
        view = a[10:]
        b = a + 1
        assert count.live == 800
        del b
        assert (count.live, count.peak) == (400, 800)
        del a
        assert count.live == 400, "a view keeps its storage"
        count.reset_peak()
        del view
        torch.zeros(50)
        assert (count.live, count.peak) == (0, 400)


def test_tensor_bytes_when_autograd_keeps_a_tensor_then_it_counts_until_the_backward():
    x = torch.ones(1000, requires_grad=True)
    with TensorBytes() as count:
        y = (x * 2).exp().sum()
        # exp's result is kept for its gradient though nothing here names it.
        assert count.live == 4000 + 4
        y.backward()
        del y
        assert count.live == 4000, "the gradient of x"


def test_stored_bytes_when_tensors_share_storage_then_counts_it_once():
    a = torch.zeros(64)
    assert stored_bytes([a, a[:8], torch.zeros(2, dtype=torch.float64), torch.empty(5, device="meta")]) == 256 + 16


def test_profile_cases_when_made_then_fit_the_capacity_and_go_from_narrow_to_wide():
    cases = profile_cases(8192, longest=100_000, widest=10_000)
    widths = [max(rank for rank, _ in case.jobs) for case in cases]
    assert widths == sorted(widths)
    assert all(sum(sum(own) for _, own in case.jobs) <= 8192 for case in cases)
    assert {case.held_out for case in cases} == {True, False}
    fitted = {case.jobs for case in cases if not case.held_out}
    assert not any(case.jobs in fitted for case in cases if case.held_out)


def test_profile_cases_when_samples_or_ranks_are_limited_then_stay_within():
    cases = profile_cases(1024, longest=100, widest=32)
    assert max(max(own) for case in cases for _, own in case.jobs) == 100
    assert max(rank for case in cases for rank, _ in case.jobs) == 32
    with pytest.raises(ConfigError, match="--capacity: got 64; at least 128 tokens"):
        profile_cases(64, 100, 32)


def test_profile_when_measured_then_memory_is_what_tensors_hold(found: Profile):
    """A parameter costs its four fp32 numbers, the fixed part holds the model, and held-out shapes are met."""
    prices = found.fits["peak_bytes"].prices
    model = stored_bytes(tiny().model.parameters())
    assert model < prices["fixed"] < 3 * model, "the model, and a block of the loss"
    assert prices["parameters"] == pytest.approx(16, rel=0.1)
    assert prices["rows"] > 2 * 4 * 10 * 64, "a layer keeps more than ten vectors of every row"
    assert found.errors["peak_bytes"].mape < 0.03


def test_profile_when_measured_then_names_what_was_measured(found: Profile):
    setup = found.setup
    assert (setup.device, setup.model, setup.kernels, setup.quantize) == ("cpu", "tiny", "reference", "none")
    assert (setup.hidden, setup.num_layers, setup.activation_bytes, setup.row_tile) == (64, 2, 4, 128)
    assert setup.layer_weights == 64 * 16 * (2 * 4 + 2 * 2) + 3 * 64 * 128
    assert setup.layer_adapter_width == (64 + 64) * 2 + (64 + 32) * 2 + (64 + 128) * 3
    measured = found.measurements
    assert len(measured) == 18 and sum(m.held_out for m in measured) == 6
    assert all(min(m.forward_s, m.backward_s, m.step_s) > 0 for m in measured)


def test_measure_case_when_repeated_then_memory_is_the_same_to_the_byte_and_slots_are_free():
    backbone = tiny("fused")
    case = ProfileCase(((8, (40, 24)), (16, (64,))), held_out=False)
    first, again = (measure_case(backbone, case, 128, 1) for _ in range(2))
    assert first.peak_bytes == again.peak_bytes > stored_bytes(backbone.model.parameters())
    assert first.load == again.load
    assert (first.load.rows, first.load.jobs, first.load.rank_rows) == (128, 2, 128 * 16)
    assert not backbone.path.table.entries
    assert not any(linear.slots for linear in backbone.linears.values())


def test_measure_case_when_jobs_are_added_then_their_adapters_and_moments_are_counted():
    """Sixteen bytes a parameter on a CPU: moments included, though they come with the first step."""
    backbone = tiny()
    one, two = (measure_case(backbone, ProfileCase(((32, (64,)),) * n, False), 128, 1) for n in (1, 2))
    more = two.load.parameters - one.load.parameters
    assert two.peak_bytes - one.peak_bytes >= 16 * more
