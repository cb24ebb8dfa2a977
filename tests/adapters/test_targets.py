import peft
import pytest
from peft.tuners.tuners_utils import check_target_module_exists

from weft.adapters.method import Attachment
from weft.adapters.targets import choose_modules, is_target, leaf_names
from weft.errors import ConfigError
from weft.plan.families import spared
from weft.spec import AdapterSpec

LEAVES = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)
PATHS = [f"model.layers.{layer}.{leaf}" for layer in range(12) for leaf in LEAVES]


def chosen(**settings) -> list[str]:
    return choose_modules(AdapterSpec(**settings), Attachment.LINEAR, PATHS)


def ending(*names: str) -> list[str]:
    return [p for p in PATHS if p.endswith(names)]


@pytest.mark.parametrize("name", ["all-linear", "all"])
def test_choose_when_all_linear_then_everything_in_order(name):
    assert chosen(target_modules=name) == PATHS


TARGETS = [
    ["q_proj"],
    ["v_proj", "q_proj"],
    ["mlp.up_proj"],
    ["layers.1.mlp.down_proj", "o_proj"],
    ["model.layers.3.self_attn.q_proj"],
    r".*\.(q|k)_proj",
    r"model\.layers\.1.\.mlp\..*",
    r".*self_attn.*",
]
EXCLUDED = [None, ["k_proj", "v_proj"], r".*\.0\..*|.*layers\.1\.self_attn\.v_proj"]
LAYERS = [None, [1], [0, 11]]
# PEFT does not look at layers_to_transform for a regular expression or a whole path.
CHOICES = [(t, e, layers) for t in TARGETS for e in EXCLUDED for layers in (LAYERS if t in TARGETS[:4] else LAYERS[:1])]


@pytest.mark.parametrize(("targets", "exclude", "layers"), CHOICES, ids=str)
def test_choose_when_names_or_expressions_then_the_modules_peft_chooses(targets, exclude, layers):
    settings = {"target_modules": targets, "exclude_modules": exclude, "layers_to_transform": layers}
    config = peft.LoraConfig(**settings)
    expected = [p for p in PATHS if check_target_module_exists(config, p)]
    assert expected
    assert chosen(**settings) == expected


@pytest.mark.parametrize(
    ("name", "guess"), [("q_porj", "q_proj"), ("down_projj", "down_proj"), ("qproj", "q_proj"), ("zzz", None)]
)
def test_choose_when_a_name_is_wrong_then_names_it_and_what_was_meant(name, guess):
    with pytest.raises(ConfigError, match=f"no linear module '{name}'") as caught:
        chosen(target_modules=["v_proj", name])
    assert caught.value.where == "adapter.target_modules"
    assert caught.value.hint == (f"Did you mean {guess}?" if guess else None)
    assert "down_proj, k_proj, o_proj, q_proj, up_proj, v_proj" in caught.value.message


def test_choose_when_a_name_is_only_the_end_of_a_word_then_it_is_wrong():
    with pytest.raises(ConfigError, match="no linear module 'proj'"):
        chosen(target_modules=["proj"])


@pytest.mark.parametrize("layers", [[12], [0, 99]])
def test_choose_when_a_layer_does_not_exist_then_names_those_that_do(layers):
    with pytest.raises(ConfigError, match=rf"layer {layers[-1]} does not exist; the backbone has layers 0 to 11"):
        chosen(layers_to_transform=layers)


def test_choose_when_everything_is_excluded_then_reports_it():
    with pytest.raises(ConfigError, match="no linear module of the backbone matches"):
        chosen(target_modules=["q_proj"], exclude_modules=["q_proj"])


def test_choose_when_an_expression_matches_nothing_then_reports_it():
    with pytest.raises(ConfigError, match="no linear module of the backbone matches"):
        chosen(target_modules="q_proj")


@pytest.mark.parametrize("pattern", ["h", "layers", "blocks", "layer", "block"])
def test_choose_when_layers_are_called_otherwise_then_they_are_found(pattern):
    paths = [f"transformer.{pattern}.{i}.attn.qkv" for i in range(3)]
    assert choose_modules(AdapterSpec(layers_to_transform=[1]), Attachment.LINEAR, paths) == [paths[1]]


def test_leaf_names_when_they_are_unambiguous_then_given():
    assert leaf_names(ending("q_proj", "up_proj"), PATHS) == ["q_proj", "up_proj"]
    assert leaf_names(ending("q_proj")[1:], PATHS) is None


@pytest.mark.parametrize(
    ("target", "path", "expected"),
    [
        (("q_proj",), "model.layers.0.self_attn.q_proj", True),
        (("q_proj",), "model.layers.0.self_attn.xq_proj", False),
        (("self_attn.q_proj",), "model.layers.0.self_attn.q_proj", True),
        (("q_proj",), "q_proj", True),
        (r".*\.1\..*", "model.layers.1.mlp.up_proj", True),
        (r"layers", "model.layers.1.mlp.up_proj", False),
        ("all-linear", "anything", True),
    ],
)
def test_is_target_when_names_end_a_path_at_a_dot_then_they_match(target, path, expected):
    assert is_target(AdapterSpec(target_modules=target), Attachment.LINEAR, path) is expected


MIXER = ("out_proj", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
HYBRID = [
    *(f"model.layers.0.linear_attn.{name}" for name in MIXER),
    *(f"model.layers.1.{name}" for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.shared_expert_gate")),
]


def test_all_linear_when_a_hybrid_has_gates_and_decays_then_leaves_them_out():
    found = choose_modules(AdapterSpec(), Attachment.LINEAR, HYBRID, spared("qwen3_5_moe_text"))
    assert [path.rpartition(".")[2] for path in found] == ["out_proj", "in_proj_qkv", "in_proj_z", "q_proj", "o_proj"]
    named = AdapterSpec(target_modules=["in_proj_a"])
    assert choose_modules(named, Attachment.LINEAR, HYBRID, spared("qwen3_5_moe_text")) == [HYBRID[4]]
