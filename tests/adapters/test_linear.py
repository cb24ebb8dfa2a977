"""A slot linear computes, and differentiates, a frozen linear plus each slot's LoRA on its own rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from adapter_on import adapter_on
from tiny_models import random_sample
from whole_linear import WholeLinear

from weft.adapters.routing import Routing
from weft.adapters.sites import SlotLinear, tiled_mm
from weft.kernels.dropout import keep_mask, row_keys
from weft.model.packed import PackedBatch, SlotSample, pack_samples
from weft.spec import AdapterSpec

CPU = torch.device("cpu")
D, O, P = 20, 28, 0.4  # noqa: E741
PATH = "layers.0.q_proj"
LENGTHS, OWNERS, KEYS = (5, 9, 30, 2, 90), (0, None, 1, 0, 1), (11, 12, 13, 14, 15)


class Bench:
    """One slot linear with two adapters, and a way to run packed segments through it."""

    def __init__(self, *, bias: bool = True, dropout: float = P, scales: tuple[float, float] = (4.0, 9.0)) -> None:
        torch.manual_seed(0)
        linear = WholeLinear(D, O, bias=bias)
        self.routing = Routing()
        self.slotted = SlotLinear(linear, self.routing, torch.zeros((), requires_grad=True))
        self.linear = linear
        specs = [
            AdapterSpec(r=r, lora_alpha=scale * r, lora_dropout=dropout, init_lora_weights=False)
            for r, scale in zip((3, 6), scales, strict=True)
        ]
        self.adapters = [adapter_on({PATH: linear}, spec, seed) for seed, spec in enumerate(specs)]
        for slot, adapter in enumerate(self.adapters):
            self.slotted.slots[slot] = adapter.modules[PATH]

    def run(self, batch: PackedBatch, x_TD: torch.Tensor, dy_TO: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and input gradient; the adapters' gradients are added up in place."""
        self.routing.segments, self.routing.slots = batch.segments, batch.slots
        self.routing.dropout_keys_T, self.routing.row_tile = batch.dropout_keys_T, 128
        x_TD = x_TD.clone().requires_grad_()
        y_TO = self.slotted(x_TD)
        y_TO.backward(dy_TO)
        return y_TO.detach(), x_TD.grad

    def gradients(self) -> list[torch.Tensor]:
        weights = [adapter.modules[PATH] for adapter in self.adapters]
        return [g.clone() for w in weights for g in (w.grad_a_RD, w.grad_b_OR)]


def packed(dropout: bool = True, which: tuple[int, ...] = (0, 1, 2, 3, 4)) -> PackedBatch:
    rng = np.random.default_rng(0)
    drawn = [random_sample(rng, length) for length in LENGTHS]
    return pack_samples([SlotSample(drawn[i], OWNERS[i], 1.0, KEYS[i] if dropout else None) for i in which], 128, CPU)


def inputs(batch: PackedBatch, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    num_rows = len(batch.input_ids_T)
    return torch.randn(num_rows, D, generator=generator), torch.randn(num_rows, O, generator=generator)


def reference(bench: Bench, batch: PackedBatch, x_TD: torch.Tensor, dy_TO: torch.Tensor, dropout: bool):
    """The same by autograd, segment by segment, in double precision."""
    x_TD = x_TD.double().requires_grad_()
    pairs = []
    for adapter in bench.adapters:
        weights = adapter.modules[PATH]
        pairs.append([w.double().detach().requires_grad_() for w in (weights.a_RD, weights.b_OR)])
    bias = None if bench.linear.bias is None else bench.linear.bias.double()
    y_TO = F.linear(x_TD, bench.linear.weight.double(), bias)
    for segment, owner, key in zip(batch.segments, OWNERS, KEYS, strict=True):
        if owner is None:
            continue
        weights = bench.adapters[owner].modules[PATH]
        x_LD = x_TD[segment.start : segment.end]
        if dropout:
            keys = torch.from_numpy(row_keys(key, segment.end - segment.start).copy())
            x_LD = x_LD * keep_mask(keys, weights.key, D, weights.dropout) / (1 - weights.dropout)
        a_RD, b_OR = pairs[owner]
        update = weights.scale * (x_LD @ a_RD.t() @ b_OR.t())
        y_TO = y_TO.index_add(0, torch.arange(segment.start, segment.end), update)
    y_TO.backward(dy_TO.double())
    return y_TO.detach(), x_TD.grad, [p.grad for pair in pairs for p in pair]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dropout", [True, False])
def test_linear_when_segments_of_two_slots_are_packed_then_output_and_gradients_are_those_of_autograd(bias, dropout):
    """With dropout on, equal gradients mean that backward drops exactly what forward dropped."""
    bench = Bench(bias=bias)
    batch = packed(dropout)
    x_TD, dy_TO = inputs(batch)
    y_TO, dx_TD = bench.run(batch, x_TD, dy_TO)
    expected_y, expected_dx, expected = reference(bench, batch, x_TD, dy_TO, dropout)
    torch.testing.assert_close(y_TO.double(), expected_y, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(dx_TD.double(), expected_dx, rtol=1e-5, atol=1e-4)
    for mine, other in zip(bench.gradients(), expected, strict=True):
        torch.testing.assert_close(mine.double(), other, rtol=1e-5, atol=1e-3)


def test_linear_when_the_microbatch_is_split_then_outputs_and_gradients_keep_every_bit():
    """Each sample alone, two and three, or all five: the same masks, the same sums in the same order."""
    whole = packed()
    x_TD, dy_TO = inputs(whole)
    reference_bench = Bench()
    y_TO, dx_TD = reference_bench.run(whole, x_TD, dy_TO)
    for split in (((0,), (1,), (2,), (3,), (4,)), ((0, 1), (2, 3, 4)), ((0, 1, 2, 3), (4,))):
        bench = Bench()
        for which in split:
            part = packed(which=which)
            rows = torch.cat([torch.arange(whole.segments[i].start, whole.segments[i].end) for i in which])
            x_part, dy_part = torch.zeros(len(part.input_ids_T), D), torch.zeros(len(part.input_ids_T), O)
            x_part[: len(rows)], dy_part[: len(rows)] = x_TD[rows], dy_TO[rows]
            y_part, dx_part = bench.run(part, x_part, dy_part)
            assert torch.equal(y_part[: len(rows)], y_TO[rows])
            assert torch.equal(dx_part[: len(rows)], dx_TD[rows])
        for mine, other in zip(bench.gradients(), reference_bench.gradients(), strict=True):
            assert torch.equal(mine, other)


@pytest.mark.parametrize("where", ["rows", "weights"])
def test_linear_when_a_neighbour_is_nan_then_my_output_and_gradients_keep_every_bit(where):
    batch = packed()
    x_TD, dy_TO = inputs(batch)
    healthy, damaged = Bench(), Bench()
    y_TO, dx_TD = healthy.run(batch, x_TD, dy_TO)
    mine = torch.ones(len(x_TD), dtype=torch.bool)
    for segment, owner in zip(batch.segments, OWNERS, strict=True):
        mine[segment.start : segment.end] = owner != 1
    if where == "rows":
        x_TD, dy_TO = x_TD.clone(), dy_TO.clone()
        x_TD[~mine], dy_TO[~mine] = float("nan"), float("nan")
    else:
        damaged.adapters[1].groups["a"].params.fill_(float("nan"))
        damaged.adapters[1].groups["b"].params.fill_(float("inf"))
    y_damaged, dx_damaged = damaged.run(batch, x_TD, dy_TO)
    assert torch.equal(y_damaged[mine], y_TO[mine])
    assert torch.equal(dx_damaged[mine], dx_TD[mine])
    assert all(torch.equal(x, y) for x, y in zip(damaged.gradients()[:2], healthy.gradients()[:2], strict=True))
    assert damaged.gradients()[2].isnan().any()


def test_linear_when_dropout_differs_between_slots_then_each_uses_its_own():
    bench = Bench(dropout=0.0)
    bench.adapters[1].modules[PATH].dropout = P
    batch = packed()
    x_TD, dy_TO = inputs(batch)
    y_TO, _ = bench.run(batch, x_TD, dy_TO)
    plain, _ = Bench(dropout=0.0).run(batch, x_TD, dy_TO)
    dropped, _ = Bench(dropout=P).run(batch, x_TD, dy_TO)
    for segment, owner in zip(batch.segments, OWNERS, strict=True):
        expected = dropped if owner == 1 else plain
        own = slice(segment.start, segment.end)
        assert torch.equal(y_TO[own], expected[own])
    assert not torch.equal(plain, dropped)


def test_linear_when_no_slot_is_active_then_it_is_the_frozen_linear_and_saves_nothing():
    bench = Bench()
    bench.slotted.slots.clear()
    batch = packed()
    x_TD, _ = inputs(batch)
    bench.routing.segments, bench.routing.slots, bench.routing.row_tile = batch.segments, batch.slots, 128
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        y_TO = bench.slotted(x_TD.clone().requires_grad_())
    torch.testing.assert_close(y_TO, bench.linear(x_TD))
    assert [t.shape for t in saved] == [(O, D)]


def test_linear_when_only_the_first_module_has_a_slot_then_its_gradient_is_still_made():
    """The input of the first adapted module needs no gradient; the slot does."""
    bench = Bench()
    batch = packed()
    x_TD, dy_TO = inputs(batch)
    bench.routing.segments, bench.routing.slots, bench.routing.row_tile = batch.segments, batch.slots, 128
    bench.slotted(x_TD).backward(dy_TO)
    assert all(gradient.abs().sum() > 0 for gradient in bench.gradients())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("features", "outputs"), [(20, 48), (33, 1), (64, 50), (500, 500), (512, 192)])
def test_tiled_mm_when_rows_lie_elsewhere_then_the_same_bits(dtype, features, outputs):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, features, generator=generator).to(dtype)
    w = torch.randn(outputs, features, generator=generator).to(dtype).t()
    whole = tiled_mm(x, w, 128)
    torch.testing.assert_close(whole, x @ w, rtol=2e-2, atol=2e-2 * features**0.5)
    order = torch.randperm(256, generator=generator)
    assert torch.equal(tiled_mm(x[order], w, 128), whole[order])
    assert torch.equal(tiled_mm(x[:128], w, 128), whole[:128])
    onto = torch.randn_like(whole)
    added = tiled_mm(x, w, 128, onto.clone())
    torch.testing.assert_close(added, whole + onto, rtol=1e-2, atol=1e-2 * features**0.5)
    assert torch.equal(tiled_mm(x[order], w, 128, onto[order]), added[order])
