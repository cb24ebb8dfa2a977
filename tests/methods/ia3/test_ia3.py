"""IA³ scales the outputs of a linear, or the inputs of a feed-forward one, as PEFT does."""

from __future__ import annotations

import json

import peft
import pytest
import torch
from adapter_on import adapter_on
from tiny_models import job_spec, random_backbone, random_data, random_model, train
from torch import nn
from whole_linear import WholeLinear

from weft.adapters.routing import Routing, Rows, slot_rows
from weft.adapters.sites import SlotLinear
from weft.errors import AdapterFileError
from weft.spec import AdapterSpec
from weft.store.peft_files import CONFIG_FILE, adapter_files, read_adapter, write_adapter

D, O = 12, 10  # noqa: E741
DOWN, KEY = "model.layers.0.mlp.down_proj", "model.layers.0.self_attn.k_proj"


@pytest.mark.parametrize("path", [DOWN, KEY])
def test_linear_when_inputs_need_no_gradient_then_the_scales_have_theirs(path):
    """Nothing below the first adapted module needs gradients; a NaN beside its rows stays there."""
    torch.manual_seed(0)
    linear, routing = nn.Linear(D, O), Routing(slots=(slot_rows(-1, [Rows(2, 5), Rows(5, 8)], None, 10),))
    slotted = SlotLinear(linear, routing, torch.zeros((), requires_grad=True))
    adapter = adapter_on({path: WholeLinear(D, O)}, AdapterSpec(method="ia3", init_ia3_weights=False))
    slotted.slots[-1] = adapter.modules[path]
    x_TD, dy_TO = torch.randn(10, D), torch.randn(10, O)
    x_TD[0], dy_TO[9] = torch.nan, torch.nan
    y_TO = slotted(x_TD)
    y_TO.backward(dy_TO)
    scale = adapter.tensors()[path][0].requires_grad_()
    own = slice(2, 8)
    scaled = path == DOWN
    expected = linear(x_TD[own] * scale.flatten()) if scaled else linear(x_TD[own]) * scale.flatten()
    expected.backward(dy_TO[own])
    torch.testing.assert_close(y_TO[own], expected)
    torch.testing.assert_close(adapter.groups["l"].grad, scale.grad.flatten(), rtol=1e-5, atol=1e-5)
    assert y_TO[8:].equal(linear(x_TD[8:]))


def test_forward_when_half_precision_then_a_small_change_of_a_scale_counts():
    """bfloat16 knows no 1.003; a scale is rounded after the product, not before."""
    linear, routing = nn.Linear(D, O, bias=False).bfloat16(), Routing(slots=(slot_rows(0, [Rows(0, 64)], None, 64),))
    slotted = SlotLinear(linear, routing, torch.zeros((), requires_grad=True))
    adapter = adapter_on({KEY: WholeLinear(D, O)}, AdapterSpec(method="ia3"))
    slotted.slots[0] = adapter.modules[KEY]
    x_TD = torch.randn(64, D).bfloat16()
    before = slotted(x_TD)
    adapter.groups["l"].params.fill_(1.003)
    assert (slotted(x_TD) != before).float().mean() > 0.2


def test_adapter_when_peft_wrote_it_then_training_goes_on_from_there(tmp_path):
    plain = random_model("llama_bias")
    config = peft.IA3Config(
        task_type="CAUSAL_LM", target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"],
        init_ia3_weights=False,
    )  # fmt: skip
    torch.manual_seed(1)
    peft.get_peft_model(plain, config).save_pretrained(tmp_path / "theirs")
    spec, tensors, _ = read_adapter(tmp_path / "theirs")
    assert (spec.method, spec.feedforward_modules) == ("ia3", ("down_proj",))
    job = job_spec("me", adapter={"method": "ia3"}, init_adapter=str(tmp_path / "theirs"), learning_rate=1e-30)
    outcome = train(random_backbone("llama_bias"), [(job, random_data(1))])["me"]
    for path, (scale,) in tensors.items():
        assert torch.equal(outcome.adapter[path][0], scale)


def test_files_when_a_name_means_inputs_and_outputs_then_whole_paths_distinguish_them():
    paths = [f"model.layers.{i}.mlp.down_proj" for i in range(2)]
    spec = AdapterSpec(method="ia3", feedforward_modules=r".*\.1\..*")
    tensors = {paths[0]: (torch.ones(4, 1),), paths[1]: (torch.ones(1, 6),)}
    config = adapter_files(spec, tensors, base_model="tiny", target_names=["down_proj"]).config
    assert (config["target_modules"], config["feedforward_modules"]) == (paths, paths[1:])
    assert config.keys() == peft.IA3Config().to_dict().keys() - {"peft_version"}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"feedforward_modules": None}, "feedforward_modules is missing"),
        ({"feedforward_modules": []}, r"has ia3_l \(1, 6\); expected \(out, 1\)"),
        ({"modules_to_save": ["lm_head"]}, "which only LoRA adapters can have here"),
        ({"r": 8}, "unknown setting r = 8"),
    ],
)
def test_read_when_the_config_means_something_else_then_refused_with_what_is_wrong(tmp_path, changes, sentence):
    spec, scale = AdapterSpec(method="ia3"), torch.ones(1, 6)
    write_adapter(tmp_path / "a", spec, {DOWN: (scale,)}, base_model="tiny", target_names=["down_proj"])
    path = tmp_path / "a" / CONFIG_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(AdapterFileError, match=sentence):
        read_adapter(tmp_path / "a")
