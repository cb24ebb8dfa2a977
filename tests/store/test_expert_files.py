"""Files of adapters on routed experts: PEFT computes with what Weft writes, and Weft reads every layout there is."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from covering import slow
from safetensors.torch import load_file, save_file
from tiny_models import VOCABULARY, random_backbone, random_model

from weft.adapters.sites import linear_modules
from weft.data.samples import Sample
from weft.engine.inference.attach import attach_adapter, read_stored
from weft.errors import AdapterFileError
from weft.methods.lora.expert_weights import merge_factors
from weft.methods.registry import method_of
from weft.model.packed import SlotSample, pack_samples
from weft.model.packing.experts import expert_products_of
from weft.spec import AdapterSpec
from weft.store.expert_files import layout_for
from weft.store.peft_files import (
    CONFIG_FILE,
    TENSORS_FILE,
    ServedForm,
    read_adapter,
    write_adapter,
    write_served,
)

TOKENS = torch.arange(3, 40) % VOCABULARY
PREFIX = "base_model.model.model.layers.{layer}.mlp.experts"
pytestmark = [
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Found missing adapter keys:UserWarning"),
]


def write(folder: Path, name: str, **settings: Any) -> AdapterSpec:
    """A random adapter on experts and on some linears, as training leaves it."""
    spec = AdapterSpec(**{"r": 4, "target_modules": ["q_proj"], "init_lora_weights": False, **settings})
    adapter = random_backbone(name).new_adapter(spec, 3)
    names = [] if not spec.target_modules else ["q_proj"]
    options = {"in_turns": adapter.has_gates_in_turns}
    write_adapter(folder, spec, adapter.tensors(), base_model=name, target_names=names, **options)
    return spec


def logits_of_weft(folder: Path, name: str) -> torch.Tensor:
    backbone = random_backbone(name)
    backbone.tokenizer.chat_template = None
    slot = attach_adapter(backbone, read_stored(folder))
    sample = Sample(TOKENS.numpy().astype("int32"), (TOKENS > 0).numpy())
    return backbone.logits(pack_samples([SlotSample(sample, slot)], None, backbone.device))


def logits_of_peft(folder: Path, name: str) -> torch.Tensor:
    plain = random_model(name)
    plain.set_attn_implementation("eager")
    with torch.no_grad():
        return peft.PeftModel.from_pretrained(plain, str(folder))(input_ids=TOKENS[None]).logits[0]


def assert_same_logits(folder: Path, name: str) -> None:
    mine, theirs = logits_of_weft(folder, name), logits_of_peft(folder, name)
    plain = random_model(name)
    plain.set_attn_implementation("eager")
    bare = plain(input_ids=TOKENS[None]).logits[0]
    assert (theirs - bare).abs().max() > 0.1, "the adapter changes nothing to speak of"
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5 * float(theirs.abs().max()))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("qwen3_moe", {"experts": "full", "expert_r": 2}),
        ("qwen3_moe", {"experts": "separate", "use_rslora": True}),
        ("mixtral", {"experts": "shared", "expert_r": 3, "expert_alpha": 5.0}),
        ("olmoe", {"experts": "full", "target_modules": [], "layers_to_transform": [1]}),
        slow("granitemoe", {"experts": "full", "rank_pattern": {r".*experts\.down_proj": 5}}),
        slow("qwen2_moe", {"experts": "shared"}),
    ],
)
def test_adapter_when_written_then_peft_has_its_logits_and_weft_reads_the_same_bits(tmp_path, name, settings):
    spec = write(tmp_path / "a", name, **settings)
    assert_same_logits(tmp_path / "a", name)
    again, tensors, _ = read_adapter(tmp_path / "a")
    assert again.experts == spec.experts
    expected = random_backbone(name).new_adapter(spec, 3).tensors()
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(x, y) for path in tensors for x, y in zip(tensors[path], expected[path], strict=True))
    assert all(spec.scale_for(path) == pytest.approx(again.scale_for(path), rel=1e-6) for path in tensors)


@pytest.mark.parametrize("parameters", [["gate_up_proj", "down_proj"], ["gate_up_proj"], ["down_proj"]])
def test_adapter_when_peft_wrote_it_then_weft_has_its_logits(tmp_path, parameters):
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=4,
        lora_alpha=6,
        target_modules=["q_proj"],
        target_parameters=[f"mlp.experts.{name}" for name in parameters],
    )
    model = peft.get_peft_model(copy.deepcopy(random_model("qwen3_moe")), config)
    for parameter_name, parameter in model.named_parameters():
        if "lora_B" in parameter_name:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(str(tmp_path / "a"))
    assert_same_logits(tmp_path / "a", "qwen3_moe")


def change(folder: Path, changes: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    config = json.loads((folder / CONFIG_FILE).read_text())
    (folder / CONFIG_FILE).write_text(json.dumps({**config, **changes}))
    save_file(tensors, folder / TENSORS_FILE, {"format": "pt"})


def apart(names: dict[str, str], transform: Any = None) -> dict[str, torch.Tensor]:
    """An adapter with tensors of its own for every expert."""
    generator = torch.Generator().manual_seed(5)
    sizes = {"gate": (32, 24), "up": (32, 24), "down": (24, 32)}
    found = {}
    for layer in range(2):
        for expert in range(4):
            for kind, (num_in, num_out) in sizes.items():
                path = f"{PREFIX.format(layer=layer)}.{expert}.{names[kind]}"
                found[f"{path}.lora_A.weight"] = torch.randn(4, num_in, generator=generator) * 0.3
                found[f"{path}.lora_B.weight"] = torch.randn(num_out, 4, generator=generator) * 0.3
    return found


def test_adapter_when_every_expert_has_its_own_names_then_weft_has_the_logits_of_peft(tmp_path):
    write(tmp_path / "a", "qwen3_moe", experts="full", lora_alpha=6)
    names = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
    config = {"target_modules": [*names.values()], "target_parameters": None, "rank_pattern": {}, "alpha_pattern": {}}
    change(tmp_path / "a", config, apart(names))
    spec, _, _ = read_adapter(tmp_path / "a")
    assert (spec.experts, spec.expert_r, spec.target_modules) == ("separate", 4, ())
    assert_same_logits(tmp_path / "a", "qwen3_moe")


def test_adapter_when_peft_has_converted_it_then_weft_has_its_logits(tmp_path):
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=4, lora_alpha=6, target_modules=["q_proj", "gate_proj", "up_proj", "down_proj"]
    )
    model = peft.get_peft_model(copy.deepcopy(random_model("qwen3_moe")), config)
    for parameter_name, parameter in model.named_parameters():
        if "lora_B" in parameter_name:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(str(tmp_path / "a"))
    assert read_adapter(tmp_path / "a")[0].expert_r in (4, 8)
    assert_same_logits(tmp_path / "a", "qwen3_moe")


def test_adapter_when_its_factors_are_shared_in_the_file_then_read_as_shared(tmp_path):
    spec = write(tmp_path / "a", "mixtral", experts="shared")
    expected = random_backbone("mixtral").new_adapter(spec, 3).tensors()
    named = {}
    for path, (a, b) in expected.items():
        module, _, name = path.rpartition(".")
        outer = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}.get(name, name)
        named[f"base_model.model.{module}.{outer}.lora_A.weight"] = a
        named[f"base_model.model.{module}.{outer}.lora_B.weight"] = b
    before = logits_of_weft(tmp_path / "a", "mixtral")
    change(tmp_path / "a", {"target_parameters": None, "rank_pattern": {}, "alpha_pattern": {}}, named)
    again, tensors, _ = read_adapter(tmp_path / "a")
    assert again.experts == "shared" and tensors.keys() == expected.keys()
    assert torch.equal(logits_of_weft(tmp_path / "a", "mixtral"), before)


def test_adapter_when_an_older_peft_wrote_it_then_factors_change_sides(tmp_path):
    write(tmp_path / "a", "qwen3_moe", experts="full")
    before, named = logits_of_weft(tmp_path / "a", "qwen3_moe"), load_file(tmp_path / "a" / TENSORS_FILE)
    swapped = {}
    for name, tensor in named.items():
        if "experts" not in name:
            swapped[name] = tensor
        elif "lora_A" in name:
            # (E · r, in) to the other side's (in, r · E)
            swapped[name.replace("lora_A", "lora_B")] = tensor.view(4, 4, -1).permute(2, 1, 0).reshape(-1, 16)
        else:
            swapped[name.replace("lora_B", "lora_A")] = tensor.view(-1, 4, 4).permute(2, 1, 0).reshape(16, -1)
    change(tmp_path / "a", {}, {name: tensor.contiguous() for name, tensor in swapped.items()})
    assert torch.equal(logits_of_weft(tmp_path / "a", "qwen3_moe"), before)


def test_adapter_when_its_config_states_that_b_is_by_expert_then_read_so(tmp_path):
    write(tmp_path / "a", "qwen3_moe", experts="full")
    before, named = logits_of_weft(tmp_path / "a", "qwen3_moe"), load_file(tmp_path / "a" / TENSORS_FILE)
    for name in list(named):
        if "experts" in name and "lora_B" in name:
            named[name] = named[name].view(-1, 4, 4).transpose(1, 2).reshape(len(named[name]), -1).contiguous()
    change(tmp_path / "a", {}, named)
    assert not torch.allclose(logits_of_weft(tmp_path / "a", "qwen3_moe"), before, atol=0.1)
    change(tmp_path / "a", {"lora_B_layout": "expert_major"}, named)
    assert torch.equal(logits_of_weft(tmp_path / "a", "qwen3_moe"), before)


@pytest.mark.parametrize(
    ("drop", "sentence"),
    [
        ("0.mlp.experts.3.up_proj", "has no up_proj of some experts"),
        ("0.mlp.experts.2", "has adapters on experts 0 to 3, but not on all"),
        ("1.mlp.experts.0.down_proj.lora_B", "lora_B of model.layers.1.mlp.experts.0 is missing"),
    ],
)
def test_adapter_when_tensors_of_experts_are_missing_then_refused_by_name(tmp_path, drop, sentence):
    write(tmp_path / "a", "qwen3_moe", experts="full")
    names = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
    kept = {name: tensor for name, tensor in apart(names).items() if drop not in name}
    change(tmp_path / "a", {"target_parameters": None, "rank_pattern": {}, "alpha_pattern": {}}, kept)
    with pytest.raises(AdapterFileError) as caught:
        read_adapter(tmp_path / "a")
    assert sentence in str(caught.value)


@pytest.mark.parametrize("settings", [{"experts": "full"}, {"experts": "shared", "expert_r": 2}])
def test_adapter_when_merged_into_experts_then_the_model_has_its_logits(tmp_path, settings):
    write(tmp_path / "a", "qwen3_moe", **settings)
    spec, tensors, _ = read_adapter(tmp_path / "a")
    merged = random_model("qwen3_moe")
    merged.set_attn_implementation("eager")
    products, linears = expert_products_of(merged), linear_modules(merged)
    with torch.no_grad():
        for path, factors in tensors.items():
            if path in products:
                site, weight_EOD = products[path]
                merge_factors(weight_EOD[:, site.columns], factors, spec.scale_for(path))
            else:
                method_of(spec).merge(spec, path, factors, linears[path])
        logits = merged(input_ids=TOKENS[None]).logits[0]
    torch.testing.assert_close(logits, logits_of_weft(tmp_path / "a", "qwen3_moe"), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "kind"), [("qwen3_moe", "full"), ("mixtral", "shared"), ("qwen3_moe", "separate"), ("gpt_oss", "full")]
)
def test_adapter_when_written_expert_by_expert_then_computes_the_same(tmp_path, name, kind):
    """As vLLM and SGLang read it; PEFT converts it where it knows the family."""
    write(tmp_path / "a", name, experts=kind)
    spec, tensors, _ = read_adapter(tmp_path / "a")
    (tmp_path / "b").mkdir()
    write_served(tmp_path / "a", tmp_path / "b", spec, tensors, ServedForm(False, "apart", name))
    names = load_file(tmp_path / "b" / TENSORS_FILE)
    last = {"mixtral": "block_sparse_moe.experts.3.w2", "gpt_oss": "mlp.experts.3.down_proj"}
    assert f"base_model.model.model.layers.1.{last.get(name, 'mlp.experts.3.down_proj')}.lora_B.weight" in names
    before, after = logits_of_weft(tmp_path / "a", name), logits_of_weft(tmp_path / "b", name)
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)
    if name == "qwen3_moe":
        torch.testing.assert_close(logits_of_peft(tmp_path / "b", name), before, rtol=1e-4, atol=1e-4)


def test_adapter_when_written_with_shared_factors_then_they_are_there_once(tmp_path):
    write(tmp_path / "a", "qwen3_moe", experts="shared")
    spec, tensors, _ = read_adapter(tmp_path / "a")
    (tmp_path / "b").mkdir()
    write_served(tmp_path / "a", tmp_path / "b", spec, tensors, ServedForm(False, "outer", "qwen3_moe"))
    again, same, _ = read_adapter(tmp_path / "b")
    assert again.experts == "shared" and same.keys() == tensors.keys()
    assert all(torch.equal(x, y) for path in same for x, y in zip(same[path], tensors[path], strict=True))
    sizes = [sum(x.numel() for x in load_file(tmp_path / d / TENSORS_FILE).values()) for d in "ab"]
    assert sizes[1] < sizes[0] / 2


@pytest.mark.parametrize(
    ("server", "kind", "family", "layout"),
    [
        ("vllm", "full", "qwen3_moe", "apart"),
        ("vllm", "full", "gpt_oss", "fused"),
        ("sglang", "shared", "qwen3_moe", "outer"),
        ("sglang", "full", "gpt_oss", "apart"),
        ("peft", "shared", "qwen3_moe", "fused"),
        ("vllm", "none", "qwen3_moe", "fused"),
    ],
)
def test_layout_when_a_server_reads_experts_then_is_the_one_it_reads(server, kind, family, layout):
    assert layout_for(AdapterSpec(experts=kind), server, family) == layout


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({}, "trains k_proj, o_proj, q_proj and v_proj; frozen: routed experts (experts: shared, separate or full"),
        ({"experts": "full", "expert_r": 2}, "trains k_proj, o_proj, q_proj, v_proj and routed experts (full, rank 2)"),
    ],
)
def test_targets_when_the_backbone_is_a_mixture_then_describe_what_is_trained(settings, sentence):
    description = random_backbone("qwen3_moe").sites.describe_targets(AdapterSpec(r=4, **settings))
    assert description is not None and description.startswith(sentence)
    assert random_backbone("llama").sites.describe_targets(AdapterSpec(r=4)) is None
