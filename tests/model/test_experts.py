"""Experts: a row's result depends on that row alone, and only `experts` chooses their weights."""

from __future__ import annotations

import pytest
import torch
from tiny_models import random_backbone

from weft.errors import ConfigError
from weft.model.packing import experts
from weft.spec import AdapterSpec

MIXTURES = ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe"]


@pytest.mark.parametrize("name", MIXTURES)
def test_router_when_there_are_several_tiles_then_sees_one_at_a_time(name):
    backbone = random_backbone(name)
    routers = [module for module in backbone.model.modules() if "forward" in vars(module)]
    assert len(routers) == 2
    forward = routers[0].forward
    whole = forward(x := torch.randn(24, 32))
    backbone.routing.row_tile = 8
    tiles = forward(x)
    assert all(torch.allclose(one, other) for one, other in zip(whole, tiles, strict=True))
    expected = forward.func(forward.args[0], backbone.routing, x[8:16])
    assert all(torch.equal(one[8:16], other) for one, other in zip(tiles, expected, strict=True))


@pytest.mark.parametrize("name", MIXTURES)
def test_experts_when_a_row_is_nan_then_no_other_notices(name):
    backbone = random_backbone(name)
    module = next(m for m in backbone.model.modules() if hasattr(m, "weft_sites"))
    x_TD, index_TK = torch.randn(40, 32), torch.randint(0, 4, (40, 2))
    weights_TK = torch.rand(40, 2)
    clean = experts.packed_experts(module, x_TD, index_TK, weights_TK)
    spoiled = experts.packed_experts(module, x_TD.index_fill(0, torch.tensor([3]), torch.nan), index_TK, weights_TK)
    others = torch.arange(40) != 3
    assert torch.equal(clean[others], spoiled[others])
    assert spoiled[3].isnan().all()


@pytest.mark.parametrize("targets", [["q_proj", "gate_proj"], ["w1"], ["gate_up_proj"], r".*\.experts\..*", r".*mlp.*"])
def test_adapter_when_it_requests_experts_then_refused(targets):
    backbone = random_backbone("qwen2_moe")
    with pytest.raises(ConfigError, match=r"mlp\.experts\..* is a weight of routed experts") as caught:
        backbone.new_adapter(AdapterSpec(r=1, target_modules=targets), 0)
    assert caught.value.where == "adapter.target_modules"


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj"], ["shared_expert.gate_proj"]])
def test_adapter_when_it_requests_linears_beside_experts_then_has_them(targets):
    adapter = random_backbone("qwen2_moe").new_adapter(AdapterSpec(r=1, target_modules=targets), 0)
    assert adapter.modules
    assert not any(".experts." in path or path.endswith("shared_expert_gate") for path in adapter.modules)


def test_router_when_it_is_named_then_adapted():
    adapter = random_backbone("qwen2_moe").new_adapter(AdapterSpec(r=1, target_modules=["shared_expert_gate"]), 0)
    assert len(adapter.modules) == 2


@pytest.mark.parametrize("name", MIXTURES)
def test_router_when_scores_are_equal_then_takes_the_lower_index(name):
    backbone = random_backbone(name)
    router = next(module for module in backbone.model.modules() if "forward" in vars(module))
    # Releases of transformers return it in other places.
    index_TK = next(found for found in router.forward(torch.zeros(5, 32)) if found.dtype == torch.int64)
    assert index_TK.tolist() == [[0, 1]] * 5
