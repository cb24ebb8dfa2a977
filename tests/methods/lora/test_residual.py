"""A LoRA that starts as a part of the weight changes nothing at the start, on any base, and refuses the rest."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from adapter_on import adapter_on
from torch import nn
from whole_linear import WholeLinear

from weft.adapters.frozen import quantise
from weft.adapters.parts import HEAD
from weft.adapters.routing import Routing, Rows, slot_rows
from weft.adapters.sites import SlotLinear
from weft.errors import ConfigError
from weft.methods.lora.principal import starting_part
from weft.methods.registry import cost_ranks
from weft.objectives.heads import Reward
from weft.spec import AdapterSpec, JobSpec
from weft.store.peft_files import read_adapter, write_adapter

PATH = "model.layers.0.self_attn.k_proj"
CPU = torch.device("cpu")
D, O, R = 24, 20, 4  # noqa: E741


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def test_part_when_pissa_then_is_the_best_of_its_rank_over_the_scale():
    torch.manual_seed(0)
    weight_OD = torch.randn(O, D)
    a_RD, b_OR = starting_part(weight_OD, "pissa", R, 2.0, generator())
    u, values, vt = torch.linalg.svd(weight_OD)
    torch.testing.assert_close(2.0 * b_OR @ a_RD, (u[:, :R] * values[:R]) @ vt[:R], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(a_RD.norm(dim=1), b_OR.norm(dim=0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(O, D), (D, O)])
def test_part_when_loftq_then_no_other_of_its_rank_comes_nearer(shape):
    torch.manual_seed(0)
    lost = torch.randn(shape)
    a, b = starting_part(lost, "loftq", R, 2.0, generator())
    best = torch.linalg.svdvals(lost)[R:].norm()
    torch.testing.assert_close((lost - 2.0 * b @ a).norm(), best, rtol=1e-5, atol=0)
    torch.testing.assert_close(a.norm(dim=1), b.norm(dim=0), rtol=1e-4, atol=1e-5)
    assert all(part.isfinite().all() for part in starting_part(torch.zeros(shape), "loftq", R, 2.0, generator()))


def test_part_when_pissa_is_iterated_then_comes_near_it_by_its_own_generator():
    torch.manual_seed(0)
    weight_OD = torch.randn(O, D) @ torch.diag(0.4 ** torch.arange(D))
    exact_a, exact_b = starting_part(weight_OD, "pissa", R, 1.0, generator())
    before = torch.random.get_rng_state()
    a_RD, b_OR = starting_part(weight_OD, "pissa_niter_16", R, 1.0, generator())
    assert torch.random.get_rng_state().equal(before)
    torch.testing.assert_close(b_OR @ a_RD, exact_b @ exact_a, rtol=1e-3, atol=1e-4)
    assert starting_part(weight_OD, "pissa_niter_16", R, 1.0, generator())[0].equal(a_RD)


@pytest.mark.parametrize("kind", ["none", "nf4", "fp8"])
@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "olora"])
def test_linear_when_the_adapter_is_fresh_then_computes_what_the_base_does(init, kind):
    torch.manual_seed(0)
    routing = Routing(slots=(slot_rows(0, [Rows(1, 4)], None, 6),))
    slotted = SlotLinear(nn.Linear(64, 32), routing, torch.zeros((), requires_grad=True))
    slotted.frozen = quantise(slotted.weight.detach(), kind)
    adapter = adapter_on({PATH: slotted}, AdapterSpec(r=R, init_lora_weights=init))
    assert list(adapter.groups) == ["a", "b"] and adapter.num_parameters == R * (64 + 32)
    x_TD = torch.randn(6, 64)
    before_TO = slotted(x_TD)
    slotted.put(0, adapter.modules[PATH])
    torch.testing.assert_close(slotted(x_TD), before_TO, rtol=1e-4, atol=1e-5)
    adapter.groups["b"].params.mul_(1.5)
    assert (slotted(x_TD)[1:4] - before_TO[1:4]).abs().max() > 1e-2


def test_files_when_the_job_has_a_head_then_it_is_written_beside_the_doubled_modules(tmp_path):
    spec = AdapterSpec(r=R, lora_alpha=6, init_lora_weights="pissa", target_modules=("k_proj",))
    adapter = adapter_on({PATH: WholeLinear(D, O).requires_grad_(False)}, spec)
    adapter.groups["b"].params.mul_(1.5)
    tensors = {**adapter.tensors(), HEAD: (torch.ones(1, D),)}
    write_adapter(tmp_path / "a", spec, tensors, base_model="tiny", target_names=["k_proj"], head=Reward())
    found, read, _ = read_adapter(tmp_path / "a")
    assert (found.r, found.scale_for(PATH), found.init_lora_weights) == (2 * R, spec.scale_for(PATH), True)
    a_RD, b_OR, start_a_RD, start_b_OR = tensors[PATH]
    torch.testing.assert_close(read[PATH][1] @ read[PATH][0], b_OR @ a_RD - start_b_OR @ start_a_RD)
    assert read[HEAD][0].equal(tensors[HEAD][0])


def test_cost_when_the_start_is_kept_then_counts_both_halves():
    ranks = cost_ranks(AdapterSpec(r=8, rank_pattern={"q_proj": 16}, init_lora_weights="pissa"))
    assert (ranks.usual, ranks.widest) == (16, 32)


@pytest.mark.parametrize(
    ("settings", "where", "sentence"),
    [
        ({"lora_dropout": 0.1}, "lora_dropout", "pissa starts as a part of the weight, which is never dropped; use 0."),
        ({"method": "dora"}, "init_lora_weights", "pissa is a start of lora, not of dora."),
        ({"alpha_pattern": {"q_proj": 0}}, "lora_alpha", "pissa needs an alpha above 0."),
    ],
)
def test_spec_when_a_start_as_weight_does_not_go_with_it_then_refused_with_the_reason(
    settings: dict[str, Any], where, sentence
):
    with pytest.raises(ConfigError) as caught:
        AdapterSpec(init_lora_weights="pissa", **settings)
    assert (caught.value.where, caught.value.message) == (where, sentence)


def test_job_when_it_goes_on_from_an_adapter_then_has_no_start_as_weight():
    with pytest.raises(ConfigError, match="init_adapter: continues an adapter, which then cannot start by olora"):
        JobSpec("a", ("rows",), adapter=AdapterSpec(init_lora_weights="olora"), init_adapter="before")


def test_adapter_when_twice_the_rank_does_not_fit_then_is_refused_by_name():
    with pytest.raises(ConfigError, match=rf"of rank 11 is written as one of 22, which is above .* {PATH} \(20 x 24\)"):
        adapter_on({PATH: WholeLinear(D, O)}, AdapterSpec(r=11, init_lora_weights="pissa"))
