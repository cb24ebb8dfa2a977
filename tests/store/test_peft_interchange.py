"""Real PEFT reads what we write and we read what real PEFT writes."""

import copy
import json

import pytest
import torch

from weft.adapters.targets import leaf_names
from weft.methods.lora.method import DEFAULTS
from weft.spec import AdapterSpec
from weft.store.peft_files import CONFIG_FILE, read_adapter, write_adapter

LINEARS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
LINEARS += ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
PATHS = [f"model.layers.{layer}.{name}" for layer in range(2) for name in LINEARS]
TOKENS = torch.arange(12).reshape(2, 6)


@pytest.fixture(scope="module")
def peft():
    """Imported here, not above: it takes seconds, and makes every later fork slower."""
    import peft

    return peft


@pytest.fixture(scope="module")
def backbone():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
    )
    return LlamaForCausalLM(config).eval()


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


def random_pairs(backbone, spec, paths, seed=1):
    generator = torch.Generator().manual_seed(seed)
    pairs = {}
    for path in paths:
        out, width = backbone.get_submodule(path).weight.shape
        rank = spec.rank_for(path)
        pairs[path] = (
            torch.randn(rank, width, generator=generator) / 4,
            torch.randn(out, rank, generator=generator) / 4,
        )
    return pairs


def merged_logits(backbone, spec, pairs) -> torch.Tensor:
    model = copy.deepcopy(backbone)
    for path, (a, b) in pairs.items():
        model.get_submodule(path).weight.data += spec.scale_for(path) * (b @ a)
    return logits(model)


SPECS = {
    "all_linear": (AdapterSpec(r=4), PATHS),
    "patterns": (
        AdapterSpec(
            r=4,
            lora_alpha=6.5,
            rank_pattern={"layers.0.self_attn.q_proj": 2, "q_proj": 8, r"layers\.1\..*_proj": 3},
            alpha_pattern={r"layers\.1\..*(up|down)_proj": 5, "o_proj": 0.5},
        ),
        PATHS,
    ),
    "rslora": (AdapterSpec(r=9, lora_alpha=3, use_rslora=True, lora_dropout=0.25, rank_pattern={"v_proj": 4}), PATHS),
    "layers": (
        AdapterSpec(r=3, target_modules=("q_proj", "v_proj"), layers_to_transform=(1,)),
        [p for p in PATHS if ".1." in p and p.endswith(("q_proj", "v_proj"))],
    ),
    "excluded": (
        AdapterSpec(r=3, exclude_modules=("o_proj", "layers.0.mlp.up_proj")),
        [p for p in PATHS if not p.endswith(("o_proj", "layers.0.mlp.up_proj"))],
    ),
    "regex": (
        AdapterSpec(r=2, target_modules=r".*layers\.0\.self_attn\.[qv]_proj", init_lora_weights="gaussian"),
        ["model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.v_proj"],
    ),
    "head": (AdapterSpec(r=2, target_modules=("lm_head",), init_lora_weights=False), ["lm_head"]),
}


@pytest.mark.parametrize("name", SPECS)
def test_peft_when_it_loads_what_we_wrote_then_logits_are_those_of_the_merged_weights(tmp_path, peft, backbone, name):
    spec, paths = SPECS[name]
    pairs = random_pairs(backbone, spec, paths)
    named = isinstance(spec.target_modules, tuple)
    names = list(spec.target_modules) if named else leaf_names(paths, [*PATHS, "lm_head"]) or paths
    write_adapter(tmp_path / "adapter", spec, pairs, base_model="tiny", target_names=names)
    model = peft.PeftModel.from_pretrained(copy.deepcopy(backbone), str(tmp_path / "adapter"))
    torch.testing.assert_close(logits(model), merged_logits(backbone, spec, pairs), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(logits(model), logits(backbone), atol=1e-3)
    adapted = [n.removeprefix("base_model.model.") for n, m in model.named_modules() if hasattr(m, "lora_A")]
    assert sorted(adapted) == sorted(paths), "PEFT adapts what we adapted and nothing else"

    back, back_pairs, _config = read_adapter(tmp_path / "adapter")
    assert (back.layers_to_transform, back.exclude_modules) == (spec.layers_to_transform, spec.exclude_modules)
    assert {p: back.scale_for(p) for p in paths} == {p: spec.scale_for(p) for p in paths}
    assert all(torch.equal(x, y) for p in paths for x, y in zip(pairs[p], back_pairs[p], strict=True))


CONFIGS = {
    "all_linear": {"r": 4, "target_modules": "all-linear"},
    "defaults": {"target_modules": ["q_proj", "v_proj"], "lora_alpha": 32, "lora_dropout": 0.1},
    "patterns": {
        "r": 4,
        "target_modules": ["q_proj", "up_proj", "o_proj"],
        "rank_pattern": {"layers.0.self_attn.q_proj": 2, "q_proj": 6},
        "alpha_pattern": {"up_proj": 3.5},
    },
    "rslora": {"r": 9, "target_modules": ["k_proj"], "use_rslora": True, "alpha_pattern": {"layers.0.*k_proj": 2}},
    "layers": {"r": 2, "target_modules": ["q_proj", "down_proj"], "layers_to_transform": [1]},
    "one_layer": {"r": 2, "target_modules": ["q_proj"], "layers_to_transform": 0},
    "layers_pattern": {"r": 2, "target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": "layers"},
    "regex": {"r": 2, "target_modules": r".*\.(q|k)_proj", "exclude_modules": r".*\.0\..*k_proj"},
    "excluded": {"r": 2, "target_modules": ["q_proj", "k_proj"], "exclude_modules": ["k_proj"]},
    "gaussian": {"r": 2, "target_modules": ["q_proj"], "init_lora_weights": "gaussian"},
    "orthogonal": {"r": 2, "target_modules": ["q_proj"], "init_lora_weights": "orthogonal"},
    "no_task": {"r": 2, "target_modules": ["q_proj"], "task_type": None},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_read_adapter_when_peft_saved_it_then_weights_and_scales_are_peft_s(tmp_path, peft, backbone, name):
    torch.manual_seed(3)
    settings = {"task_type": "CAUSAL_LM", "init_lora_weights": False, **CONFIGS[name]}
    model = peft.get_peft_model(copy.deepcopy(backbone), peft.LoraConfig(**settings)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) / 8)
    model.save_pretrained(str(tmp_path / "theirs"))
    spec, pairs, _config = read_adapter(tmp_path / "theirs")
    layers = {n: m for n, m in model.base_model.model.named_modules() if hasattr(m, "lora_A") and len(m.lora_A)}
    assert set(pairs) == set(layers)
    for path, layer in layers.items():
        assert torch.equal(pairs[path][0], layer.lora_A["default"].weight)
        assert torch.equal(pairs[path][1], layer.lora_B["default"].weight)
        assert spec.scale_for(path) == pytest.approx(layer.scaling["default"], rel=1e-12)
    assert spec.lora_dropout == settings.get("lora_dropout", 0.0)
    assert spec.init_lora_weights == settings["init_lora_weights"]
    torch.testing.assert_close(logits(model), merged_logits(backbone, spec, pairs), atol=1e-5, rtol=1e-5)

    names = leaf_names(pairs, [n for n, _ in backbone.named_modules()]) or list(pairs)
    write_adapter(tmp_path / "ours", spec, pairs, base_model="tiny", target_names=names)
    again = peft.PeftModel.from_pretrained(copy.deepcopy(backbone), str(tmp_path / "ours"))
    assert torch.equal(logits(again), logits(model)), "our copy of PEFT's adapter is the same adapter"


def test_config_when_written_then_it_has_every_key_peft_writes_with_its_default(tmp_path, peft, backbone):
    model = peft.get_peft_model(
        copy.deepcopy(backbone), peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    )
    model.save_pretrained(str(tmp_path))
    theirs = json.loads((tmp_path / CONFIG_FILE).read_text())
    del theirs["peft_version"]
    assert theirs | {"target_modules": None} == DEFAULTS
