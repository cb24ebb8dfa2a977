"""A frozen weight multiplies as its dense form does, however it is stored; rows never meet, and parts share storage."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from weft.adapters.frozen import KINDS, Dense, FrozenWeight, describe, join, quantisation, quantise
from weft.adapters.routing import Routing
from weft.adapters.sites import SlotLinear
from weft.errors import ConfigError
from weft.kernels.storage import dequantise, quantise_rows

D, O, T = 128, 48, 128  # noqa: E741
STORED = {
    "none": lambda w: quantise(w, "none"),
    "fp8": lambda w: quantise(w, "fp8"),
    "fp8, one copy": lambda w: quantise(w, "fp8", copies=1),
    "nf4": lambda w: quantise(w, "nf4"),
    "int8": lambda w: quantise(w, "int8"),
}
ERRORS = {"none": 0.0, "fp8": 0.03, "fp8, one copy": 0.03, "nf4": 0.1, "int8": 0.01}
"""How far a weight may be from the dense one, relative to its norm."""
BYTES = {"none": 4, "fp8": 2, "fp8, one copy": 1, "nf4": 0.5, "int8": 1}
"""Per weight, without scales."""
every_kind = pytest.mark.parametrize("stored", STORED)


def weights() -> torch.Tensor:
    return torch.randn(O, D) * torch.logspace(-1, 1, O)[:, None]


def rounded(x_TK: torch.Tensor) -> torch.Tensor:
    """What an FP8 product makes of a factor."""
    return dequantise(*quantise_rows(x_TK), torch.float32)


def distance(x: torch.Tensor, y: torch.Tensor) -> float:
    return float((x.double() - y.double()).norm() / y.double().norm())


def test_conformance_tests_when_compared_with_the_registry_then_cover_every_kind():
    assert {name.split(",")[0] for name in STORED} == set(KINDS)


@every_kind
def test_weight_when_stored_then_is_near_the_dense_one_and_takes_its_bytes(stored):
    weight_OD = weights()
    frozen = STORED[stored](weight_OD)
    assert frozen.shape == (O, D) and frozen.kind == stored.split(",")[0]
    assert frozen.dense().shape == (O, D) and frozen.dense().dtype == torch.float32
    assert distance(frozen.dense(), weight_OD) <= ERRORS[stored]
    assert 0 <= frozen.num_bytes - BYTES[stored] * O * D <= 4 * O * 2
    assert not any(parameter.requires_grad for parameter in frozen.parameters())


@every_kind
def test_products_when_taken_then_are_those_of_the_dense_weight_and_what_fp8_makes_of_the_other_factor(stored):
    frozen = STORED[stored](weights())
    x_TD, dy_TO = torch.randn(T, D), torch.randn(T, O)
    w_OD = frozen.dense().double()
    forward_fp8, backward_fp8 = stored.startswith("fp8"), stored == "fp8"
    y_TO = (rounded(x_TD) if forward_fp8 else x_TD).double() @ w_OD.t()
    dx_TD = dy_TO.double() @ w_OD
    assert distance(frozen.product(x_TD), y_TO) < 1e-6
    if backward_fp8:
        scale_O = frozen.scale_O
        dx_TD = rounded(dy_TO * scale_O).double() @ (w_OD / scale_O[:, None])
    assert distance(frozen.input_gradient(dy_TO), dx_TD) < 1e-6
    assert distance(frozen.input_gradient(dy_TO), dy_TO.double() @ w_OD) < (0.04 if backward_fp8 else 1e-6)
    assert distance(frozen.product(x_TD), x_TD.double() @ w_OD.t()) < (0.04 if forward_fp8 else 1e-6)


@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_when_rows_lie_elsewhere_beside_nan_then_the_same_bits(stored, dtype):
    """In blocks of 128 rows, wherever a row lies and whatever the others are."""
    frozen = STORED[stored](weights().to(dtype))
    order = torch.randperm(2 * T)
    for multiply, width in ((frozen.product, D), (frozen.input_gradient, O)):
        x = torch.randn(2 * T, width).to(dtype)
        whole = multiply(x, 128)
        assert whole.dtype == dtype
        assert torch.equal(multiply(x[order], 128), whole[order])
        assert torch.equal(multiply(x[:T], 128), whole[:T])
        damaged = x.clone()
        damaged[3::4] = float("nan")
        mine = torch.arange(2 * T) % 4 != 3
        assert torch.equal(multiply(damaged, 128)[mine], whole[mine])
        assert multiply(damaged, 128)[~mine].isnan().all()


@every_kind
def test_part_when_taken_then_is_those_rows_and_shares_storage(stored):
    frozen = STORED[stored](weights())
    part = frozen.part(16, 48)
    assert part.shape == (32, D) and part.kind == frozen.kind
    assert torch.equal(part.dense(), frozen.dense()[16:48])
    x_TD, dy_TO = torch.randn(T, D), torch.randn(T, 32)
    torch.testing.assert_close(part.product(x_TD), frozen.product(x_TD)[:, 16:48])
    assert distance(part.input_gradient(dy_TO), dy_TO @ part.dense()) < 0.04
    for name, tensor in part.stored.items():
        assert tensor.untyped_storage().data_ptr() == frozen.stored[name].untyped_storage().data_ptr()


@every_kind
def test_join_when_parts_are_put_together_then_is_the_whole(stored):
    frozen = STORED[stored](weights())
    joined = join([frozen.part(0, 16), frozen.part(16, 32), frozen.part(32, 48)])
    assert joined.stored.keys() == frozen.stored.keys()
    for name, tensor in joined.stored.items():
        assert torch.equal(tensor.float(), frozen.stored[name].float())
    dy_TO = torch.randn(T, O)
    assert torch.equal(joined.input_gradient(dy_TO), frozen.input_gradient(dy_TO))


@every_kind
def test_slot_linear_when_its_weight_is_stored_so_then_autograd_goes_through_it(stored):
    """Output with bias, and the gradient of the input."""
    linear = nn.Linear(D, O)
    slotted = SlotLinear(linear, Routing(), torch.zeros((), requires_grad=True))
    slotted.frozen = frozen = STORED[stored](linear.weight)
    assert (slotted.in_features, slotted.out_features) == (D, O)
    assert torch.equal(slotted.weight, frozen.dense())
    x_TD, dy_TO = torch.randn(T, D, requires_grad=True), torch.randn(T, O)
    y_TO = slotted(x_TD)
    y_TO.backward(dy_TO)
    assert torch.equal(y_TO, frozen.product(x_TD.detach()) + linear.bias)
    assert torch.equal(x_TD.grad, frozen.input_gradient(dy_TO))


@every_kind
def test_slot_linear_when_the_routing_has_a_row_tile_then_every_product_is_over_that_many_rows(stored, monkeypatch):
    """At one row count a row's bits cannot depend on how many rows there are."""
    slotted = SlotLinear(nn.Linear(D, O), Routing(row_tile=64), torch.zeros((), requires_grad=True))
    slotted.frozen = STORED[stored](slotted.weight)
    counted: list[int] = []
    plain_mm = torch.mm

    def counting_mm(x: torch.Tensor, w: torch.Tensor, **options: torch.Tensor) -> torch.Tensor:
        counted.append(x.shape[0])
        return plain_mm(x, w, **options)

    monkeypatch.setattr(torch, "mm", counting_mm)
    slotted(torch.randn(192, D, requires_grad=True)).sum().backward()
    assert counted == [64] * 6


@pytest.mark.parametrize(("outputs", "inputs"), [(40, 96), (48, 90)])
def test_quantise_when_fp8_products_do_not_take_the_shape_then_the_weight_stays_dense(outputs, inputs):
    weight_OD = torch.randn(outputs, inputs)
    frozen = quantise(weight_OD, "fp8")
    assert isinstance(frozen, Dense) and torch.equal(frozen.dense(), weight_OD)


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_quantise_when_the_shape_is_odd_then_other_kinds_take_it(kind):
    weight_OD = torch.randn(7, 75)
    assert distance(quantise(weight_OD, kind).dense(), weight_OD) < ERRORS[kind]


def test_quantise_when_the_kind_is_unknown_then_reports_what_is_accepted():
    with pytest.raises(ConfigError, match="got 'int4'; accepted are none, fp8, nf4, int8"):
        quantise(weights(), "int4")


def test_describe_when_some_stay_dense_then_reports_how_many():
    made: list[FrozenWeight] = [quantise(torch.randn(48, 96), "fp8"), quantise(torch.randn(40, 96), "fp8")]
    assert describe(made) == "fp8 (0.0 MB in 1 linears), 1 linears dense (0.0 MB)"
    assert describe(made[:1]) == "fp8 (0.0 MB in 1 linears)"
    assert describe(made[1:]) == "1 linears dense (0.0 MB)"
    assert (quantisation(made), quantisation(made[1:])) == ("fp8", "none")


def test_fp8_when_rows_come_rounded_then_they_are_multiplied_and_not_rounded_again():
    """The caller may round x or dy in advance; the product is the one of unrounded rows."""
    torch.manual_seed(9)
    weight = quantise(torch.randn(32, 48), "fp8")
    x_TD, dy_TO = torch.randn(5, 48), torch.randn(5, 32)
    assert weight.rounds_inputs and weight.gradient_columns is not None
    x8, dy8 = quantise_rows(x_TD), quantise_rows(dy_TO, weight.gradient_columns)
    nothing_TD, nothing_TO = torch.zeros_like(x_TD), torch.zeros_like(dy_TO)
    assert weight.product(nothing_TD, x8=x8).equal(weight.product(x_TD))
    assert weight.input_gradient(nothing_TO, dy8=dy8).equal(weight.input_gradient(dy_TO))


def test_weights_when_they_do_not_round_then_they_need_no_rounded_rows():
    """Also FP8 with one copy on the way back: its gradient is a product with the dense weight."""
    one_copy = quantise(torch.randn(32, 48), "fp8", copies=1)
    assert one_copy.rounds_inputs and one_copy.gradient_columns is None
    for kind in ("none", "int8", "nf4"):
        weight = quantise(torch.randn(64, 64), kind)
        assert not weight.rounds_inputs and weight.gradient_columns is None
