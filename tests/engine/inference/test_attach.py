"""Adapters from directories: found, named, and attached only where they fit."""

from pathlib import Path

import pytest
import torch
from tiny_models import random_backbone

from weft.engine.inference import attach
from weft.engine.inference.attach import attach_adapter, common_base, load_with_adapters, read_named
from weft.errors import AdapterFileError, ConfigError, ModelError
from weft.model.backbone import Backbone
from weft.model.fused.path import FusedPath
from weft.spec import AdapterSpec
from weft.store.peft_files import write_adapter


@pytest.fixture
def backbone() -> Backbone:
    made = random_backbone()
    made.tokenizer.chat_template = None
    return made


def written(backbone: Backbone, path: Path, *, base_model: str = "llama", **settings: object) -> Path:
    """An adapter for a backbone, as training leaves it."""
    spec = AdapterSpec(**{"r": 4, "target_modules": ("q_proj",), "init_lora_weights": False, **settings})
    adapter = backbone.new_adapter(spec, 0)
    names = sorted({module.rsplit(".", 1)[-1] for module in adapter.modules})
    path.parent.mkdir(parents=True, exist_ok=True)
    write_adapter(path, spec, adapter.tensors(), base_model=base_model, target_names=names)
    return path


def test_attach_when_the_adapter_fits_then_its_weights_are_on_the_slot(backbone: Backbone, tmp_path: Path):
    stored = read_named(str(written(backbone, tmp_path / "mine", lora_alpha=6)))
    first, second = attach_adapter(backbone, stored), attach_adapter(backbone, stored)
    assert first != second
    for path, (a, b) in stored.tensors.items():
        weights = backbone.linears[path].slots[second]
        assert torch.equal(weights.a_RD, a)
        assert torch.equal(weights.b_OR, b)
        assert weights.scale == 1.5
    assert len(stored.tensors) == 2


def test_attach_when_the_adapter_was_trained_with_dropout_then_jobs_beside_it_do_not_pay_for_it(tmp_path: Path):
    backbone = random_backbone(kernels="fused")
    assert isinstance(backbone.path, FusedPath)
    attach_adapter(backbone, read_named(str(written(backbone, tmp_path / "mine", lora_dropout=0.1))))
    assert not backbone.path.table.needs.drops


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"num_hidden_layers": 1}, "model.layers.1.self_attn.q_proj is not a linear module of base_model llama."),
        (
            {"hidden_size": 40},
            "model.layers.0.self_attn.q_proj is for a module of 32 x 32; in base_model llama it is 40 x 40.",
        ),
        (
            {"num_hidden_layers": 3},
            "has no weights for model.layers.2.self_attn.q_proj of base_model llama, which its config targets.",
        ),
    ],
)
def test_attach_when_the_backbone_is_another_then_reports_what_does_not_fit(
    backbone: Backbone, tmp_path: Path, changes: dict[str, int], sentence: str
):
    stored = read_named(str(written(backbone, tmp_path / "mine")))
    other = random_backbone(**changes)
    with pytest.raises(AdapterFileError) as caught:
        attach_adapter(other, stored)
    assert str(caught.value) == f"{tmp_path / 'mine'}: {sentence}"
    assert not any(linear.slots for linear in other.linears.values())


def test_read_named_when_names_are_given_or_not_then_finds_the_shortest_that_is_informative(
    backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    written(backbone, tmp_path / "run" / "support" / "adapter")
    written(backbone, tmp_path / "odd=name")
    monkeypatch.chdir(tmp_path / "run" / "support")
    assert read_named(str(tmp_path / "run" / "support")).name == "support"
    assert read_named(str(tmp_path / "run" / "support" / "adapter")).name == "support"
    assert read_named(".").name == "support"
    assert read_named(f"mine={tmp_path / 'run' / 'support'}").name == "mine"
    assert read_named(str(tmp_path / "odd=name")).name == "odd=name"
    assert read_named(f"mine={tmp_path / 'odd=name'}").path == tmp_path / "odd=name"


def test_common_base_when_adapters_agree_or_not_then_names_it_or_gives_the_reason(backbone: Backbone, tmp_path: Path):
    one = read_named(str(written(backbone, tmp_path / "one")))
    two = read_named(str(written(backbone, tmp_path / "two")))
    three = read_named(str(written(backbone, tmp_path / "three", base_model="other")))
    assert common_base([one, two]) == "llama"
    with pytest.raises(ConfigError, match=r"different base models \(two on llama and three on other\)"):
        common_base([one, two, three])
    with pytest.raises(ConfigError, match="there is neither an adapter nor a model; give --base-model"):
        common_base([])


def test_load_with_adapters_when_the_base_has_moved_then_explains_how_to_name_it(backbone: Backbone, tmp_path: Path):
    path = written(backbone, tmp_path / "mine", base_model="./old/place")
    with pytest.raises(ModelError) as caught:
        load_with_adapters([str(path)], base_model=None)
    assert str(caught.value).startswith("base_model ./old/place: there is no such model directory")
    assert str(caught.value).endswith("It is the base the adapter names; if it is elsewhere now, give --base-model.")
    with pytest.raises(ModelError) as caught:
        load_with_adapters([str(path)], base_model="./new/place")
    assert caught.value.hint is None


def test_load_with_adapters_when_some_bring_chat_templates_then_each_keeps_its_own(
    backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(attach, "load_backbone", lambda spec: backbone)
    monkeypatch.setattr(attach, "check_template", lambda template, tokenizer: None)
    plain, own = written(backbone, tmp_path / "plain"), written(backbone, tmp_path / "own")
    (own / "chat_template.jinja").write_text("{{ 1 }}")
    requested = [str(plain), str(own), "base"]
    # The backbone has no template of its own, so it reads chats as the adapter does.
    assert load_with_adapters(requested, base_model=None).chat_templates == {
        "plain": None, "own": "{{ 1 }}", "base": "{{ 1 }}"
    }  # fmt: skip
    backbone.tokenizer.chat_template = "{{ 2 }}"
    assert load_with_adapters(requested, base_model=None).chat_templates["base"] is None


def test_load_with_adapters_when_the_base_is_among_them_then_keeps_the_order(
    backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(attach, "load_backbone", lambda spec: backbone)
    mine = str(written(backbone, tmp_path / "mine"))
    slots = load_with_adapters([mine, "base"], base_model=None).slots
    assert list(slots) == ["mine", "base"] and slots["mine"] is not None and slots["base"] is None
    assert list(load_with_adapters([mine], base_model=None, with_base=True).slots) == ["base", "mine"]
    assert list(load_with_adapters([], base_model="llama").slots) == ["base"]
