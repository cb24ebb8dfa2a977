"""A bottleneck computes what autograd does, for every non-linearity, and sits where its variant puts it."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from adapter_on import adapter_on
from tiny_models import random_backbone
from torch import nn

from weft.adapters.routing import Routing, Rows, slot_rows
from weft.adapters.sites import BlockOutput
from weft.errors import AdapterFileError, ConfigError
from weft.kernels.methods.parts import ACTIVATIONS
from weft.spec import AdapterSpec
from weft.store.peft_files import CONFIG_FILE, read_adapter, write_adapter

D, W = 12, 5
PATH = "model.layers.0.mlp"


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_activation_when_computed_then_is_torchs_and_so_is_its_derivative(name):
    x = torch.linspace(-6, 6, 301, requires_grad=True)
    theirs = getattr(F, name)(x)
    theirs.sum().backward()
    torch.testing.assert_close(ACTIVATIONS[name].apply(x.detach()), theirs.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ACTIVATIONS[name].derivative(x.detach()), x.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_activation_when_a_row_lies_elsewhere_then_has_the_same_bits(name):
    """Numbers at the end of a tensor are computed as those in the middle of another."""
    x = torch.randn(4099)
    for function in (ACTIVATIONS[name].apply, ACTIVATIONS[name].derivative):
        whole = function(x)
        for start, size in ((0, 7), (3, 31), (4092, 7), (100, 777)):
            assert function(x[start : start + size].clone()).equal(whole[start : start + size])


@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_gradients_when_a_neighbour_is_nan_then_are_those_of_autograd(name):
    torch.manual_seed(0)
    block, routing = nn.Identity(), Routing(slots=(slot_rows(-1, [Rows(2, 5), Rows(5, 8)], 4, 10),))
    site = BlockOutput(block, D, routing)
    spec = AdapterSpec(method="bottleneck", bottleneck_size=W, bottleneck_activation=name, bottleneck_scale=0.5)
    adapter = adapter_on({PATH: site}, spec)
    adapter.put({group: x + 0.3 * torch.randn_like(x) for group, x in adapter.flat().items()})
    site.put(-1, adapter.modules[PATH])
    x_TD, dy_TD = torch.randn(10, D), torch.randn(10, D)
    x_TD[0], dy_TD[9] = torch.nan, torch.nan
    x_TD.requires_grad_()
    y_TD = block(x_TD)
    y_TD.backward(dy_TD)
    down_WD, bias_W, up_DW, bias_D = params = [tensor.requires_grad_() for tensor in adapter.tensors()[PATH]]
    own_LD = x_TD[2:8].detach().requires_grad_()
    expected_LD = own_LD + 0.5 * F.linear(getattr(F, name)(F.linear(own_LD, down_WD, bias_W)), up_DW, bias_D)
    expected_LD.backward(dy_TD[2:8])
    torch.testing.assert_close(y_TD[2:8], expected_LD, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(x_TD.grad[2:8], own_LD.grad, rtol=1e-5, atol=1e-5)
    for group, param in zip(adapter.groups.values(), params, strict=True):
        torch.testing.assert_close(group.grad, param.grad.flatten(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("variant", "blocks"), [("houlsby", {"self_attn", "mlp"}), ("pfeiffer", {"mlp"})])
def test_targets_when_auto_then_are_those_of_the_variant(variant, blocks):
    spec = AdapterSpec(method="bottleneck", bottleneck_size=W, bottleneck_variant=variant)
    modules = random_backbone().new_adapter(spec, 0).modules
    assert len(modules) == 2 * len(blocks) and {path.rpartition(".")[2] for path in modules} == blocks


def test_check_when_the_size_is_above_the_width_then_refused_in_one_sentence():
    with pytest.raises(ConfigError, match=r"33 is above the width of model.layers.0.self_attn \(32\)"):
        random_backbone().check_adapter(AdapterSpec(method="bottleneck", bottleneck_size=33))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"bottleneck_size": None}, "bottleneck_size is missing"),
        ({"bottleneck_size": 4}, r"has down \(5, 12\) and up \(12, 5\); expected \(4, width\) and \(width, 4\)"),
        ({"bottleneck_activation": "mish"}, "got 'mish'; accepted are silu, relu"),
        ({"r": 8}, "unknown setting r = 8"),
    ],
)
def test_read_when_the_config_means_something_else_then_refused_with_what_is_wrong(tmp_path, changes, sentence):
    spec = AdapterSpec(method="bottleneck", bottleneck_size=W, bottleneck_scale=2)
    tensors = (torch.ones(W, D), torch.ones(W), torch.ones(D, W), torch.ones(D))
    write_adapter(tmp_path / "a", spec, {PATH: tensors}, base_model="tiny", target_names=["mlp"])
    assert read_adapter(tmp_path / "a")[0].bottleneck_scale == 2
    path = tmp_path / "a" / CONFIG_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(AdapterFileError, match=sentence):
        read_adapter(tmp_path / "a")
