"""DoRA learns the lengths of the updated weight's rows, from PEFT's files and on any base that has lengths."""

from __future__ import annotations

import json

import peft
import pytest
import torch
from adapter_on import adapter_on
from tiny_models import random_backbone, random_data, random_model
from torch import nn

from weft.adapters.frozen import quantise
from weft.adapters.routing import Routing, Rows, slot_rows
from weft.adapters.sites import SlotLinear
from weft.engine.inference.attach import attach_adapter, read_named
from weft.errors import AdapterFileError, ConfigError
from weft.methods.dora.weights import squared_norms, updated_norms
from weft.model.packed import SlotSample, pack_samples
from weft.spec import AdapterSpec
from weft.store.peft_files import CONFIG_FILE, read_adapter, write_adapter

D, O, R = 12, 10, 3  # noqa: E741
PATH = "model.layers.0.self_attn.k_proj"
CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_row_norms_when_no_sum_is_built_then_are_those_of_the_sum(dtype):
    torch.manual_seed(0)
    weight_OD, a_RD, b_OR = torch.randn(5000, D).to(dtype), torch.randn(R, D), torch.randn(5000, R)
    found_O = updated_norms(weight_OD, squared_norms(weight_OD), a_RD, b_OR, 0.7)
    expected_O = (weight_OD.double() + 0.7 * b_OR.double() @ a_RD.double()).norm(dim=1)
    torch.testing.assert_close(found_O.double(), expected_O, rtol=2e-6, atol=0)


def test_row_norms_when_the_update_takes_a_row_away_then_nothing_is_left_and_no_nan():
    weight_OD = torch.randn(4, D)
    found_O = updated_norms(weight_OD, squared_norms(weight_OD), torch.eye(D), -weight_OD, 1.0)
    assert found_O.isfinite().all() and found_O.max() < 1e-2


@pytest.mark.parametrize("kind", ["none", "fp8", "int8", "nf4"])
def test_linear_when_the_base_is_quantised_then_its_dense_weight_has_the_lengths(kind):
    """A fresh DoRA does nothing on any base, and a longer m makes all but the bias longer."""
    torch.manual_seed(0)
    routing = Routing(slots=(slot_rows(0, [Rows(1, 4)], None, 6),))
    slotted = SlotLinear(nn.Linear(64, 32), routing, torch.zeros((), requires_grad=True))
    slotted.frozen = quantise(slotted.weight.detach(), kind)
    adapter = adapter_on({PATH: slotted}, AdapterSpec(method="dora", r=R, target_modules=("k_proj",)))
    x_TD = torch.randn(6, 64)
    before_TO = slotted(x_TD)
    slotted.put(0, adapter.modules[PATH])
    torch.testing.assert_close(slotted(x_TD), before_TO)
    torch.testing.assert_close(adapter.groups["m"].params, slotted.weight.norm(dim=1))
    adapter.groups["m"].params.mul_(1.5)
    expected_LO = (before_TO[1:4] - slotted.bias_O) * 1.5 + slotted.bias_O
    torch.testing.assert_close(slotted(x_TD)[1:4], expected_LO)
    assert slotted(x_TD)[4:].equal(before_TO[4:])


@pytest.mark.parametrize("row", [0.0, float("nan")])
def test_adapter_when_a_row_of_the_base_has_no_length_then_is_refused_in_a_sentence(row):
    linear = nn.Linear(D, O).requires_grad_(False)
    linear.weight[4] = row
    site = SlotLinear(linear, Routing(), torch.zeros(()))
    with pytest.raises(ConfigError, match=f"rows of {PATH}, and one of them is zero or not finite; leave"):
        adapter_on({PATH: site}, AdapterSpec(method="dora", r=R))


def test_files_when_peft_wrote_them_then_weft_computes_the_same(tmp_path):
    plain, backbone = random_model("llama_bias"), random_backbone("llama_bias")
    plain.set_attn_implementation("eager")
    config = peft.LoraConfig(
        r=4, use_dora=True, init_lora_weights=False, target_modules=["k_proj", "down_proj"], task_type="CAUSAL_LM"
    )
    theirs = peft.get_peft_model(plain, config).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    stored = read_named(str(tmp_path / "theirs"))
    assert (stored.spec.method, stored.spec.r) == ("dora", 4)
    sample = random_data(1, num_samples=1, lengths=(12, 13)).train.samples[0]
    mine = backbone.logits(pack_samples([SlotSample(sample, attach_adapter(backbone, stored))], None, CPU))
    with torch.no_grad():
        expected = theirs(torch.from_numpy(sample.tokens.astype("int64"))[None]).logits[0]
    torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "length", "sentence"),
    [
        ({}, O + 1, r"has lora_magnitude_vector \(11,\); expected \(10,\), one length for each output"),
        ({"use_dora": False}, O, "lora_magnitude_vector', which is DoRA's, but use_dora of its config is off"),
        ({"lora_bias": True}, O, "LoRA with a bias is not supported yet"),
    ],
)
def test_read_when_the_files_mean_something_else_then_refused_with_what_is_wrong(tmp_path, changes, length, sentence):
    tensors = {PATH: (torch.ones(R, D), torch.ones(O, R), torch.ones(length))}
    spec = AdapterSpec(method="dora", r=R)
    write_adapter(tmp_path / "a", spec, tensors, base_model="tiny", target_names=["k_proj"])
    path = tmp_path / "a" / CONFIG_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(AdapterFileError, match=sentence):
        read_adapter(tmp_path / "a")


def test_spec_when_written_as_peft_does_then_is_the_same_method():
    assert AdapterSpec(use_dora=True, r=4) == AdapterSpec(method="dora", r=4)
    with pytest.raises(ConfigError, match="is a setting of lora; the method is ia3"):
        AdapterSpec(method="ia3", use_dora=True)
