"""Virtual tokens answer and are stored as PEFT's prompt and prefix tuning do."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import peft
import pytest
import torch
from adapter_on import adapter_on
from tiny_models import job_spec, random_backbone, random_data, random_model, train

from weft.adapters.routing import Routing
from weft.adapters.sites import InputRows
from weft.data.samples import Sample
from weft.engine.inference.attach import attach_adapter, read_named
from weft.engine.inference.generate import Request, generate
from weft.errors import AdapterFileError, ConfigError
from weft.spec import AdapterSpec, JobSpec
from weft.spec.sampling import Decoding
from weft.store.peft_files import CONFIG_FILE, read_adapter, write_adapter

COUNT = 3
KINDS = ("prompt_tuning", "prefix_tuning")
CONFIGS: dict[str, Any] = {"prompt_tuning": peft.PromptTuningConfig, "prefix_tuning": peft.PrefixTuningConfig}


def peft_model(kind: str) -> Any:
    plain = random_model("llama_odd")
    plain.set_attn_implementation("eager")
    return peft.get_peft_model(plain, CONFIGS[kind](task_type="CAUSAL_LM", num_virtual_tokens=COUNT))


def joined(adapter: dict[str, Any]) -> torch.Tensor:
    """All rows as PEFT has them, layer after layer."""
    return torch.cat([rows for (rows,) in adapter.values()], dim=1)


@pytest.mark.parametrize("kind", KINDS)
def test_answers_when_tokens_are_cached_then_are_those_of_peft(kind, tmp_path):
    torch.manual_seed(2)
    model = peft_model(kind)
    model.save_pretrained(tmp_path / "theirs")
    backbone = random_backbone("llama_odd")
    slot = attach_adapter(backbone, read_named(str(tmp_path / "theirs")))
    prompts = [[5, 9, 14], [7, 3, 20, 31, 8]]
    written = generate(backbone, [Request(tokens, slot) for tokens in prompts], Decoding(max_new_tokens=6))
    for prompt, given in zip(prompts, written, strict=True):
        tokens = list(prompt)
        for token in given:
            with torch.no_grad():
                assert int(model(torch.tensor([tokens])).logits[0, -1].argmax()) == token
            tokens.append(token)
        assert given
    bare = generate(backbone, [Request(tokens) for tokens in prompts], Decoding(max_new_tokens=6))
    assert bare != written, "the virtual tokens do nothing"


@pytest.mark.parametrize("kind", KINDS)
def test_files_when_peft_wrote_them_then_training_goes_on_from_there_and_its_keys_are_ours(kind, tmp_path):
    model = peft_model(kind)
    model.save_pretrained(tmp_path / "theirs")
    spec, tensors, config = read_adapter(tmp_path / "theirs")
    assert (spec.method, spec.num_virtual_tokens) == (kind, COUNT)
    job = job_spec("me", adapter={}, init_adapter=str(tmp_path / "theirs"), learning_rate=1e-30)
    outcome = train(
        random_backbone("llama_odd"), [(JobSpec(**{**vars(job), "adapter": AdapterSpec()}), random_data(1))]
    )
    assert torch.equal(joined(outcome["me"].adapter), model.prompt_encoder["default"].embedding.weight)
    write_adapter(tmp_path / "ours", spec, tensors, base_model="tiny", target_names=[])
    assert json.loads((tmp_path / "ours" / CONFIG_FILE).read_text()).keys() == config.keys() - {"peft_version"}


def test_prompt_when_it_begins_as_tokens_then_holds_their_embeddings():
    table = torch.randn(40, 6)
    site = InputRows(6, Routing(), lambda ids: table[ids], lambda text: [ord(letter) - ord("a") for letter in text])
    site.weight = table

    def begun(**settings: Any) -> torch.Tensor:
        spec = AdapterSpec(method="prompt_tuning", num_virtual_tokens=5, **settings)
        return adapter_on({"inputs": site}, spec, 1).tensors()["inputs"][0]

    text = begun(prompt_tuning_init="text", prompt_tuning_init_text="cad")
    assert torch.equal(text, table[[2, 0, 3, 2, 0]])
    sampled = begun(prompt_tuning_init="sample_vocab")
    assert all(any(torch.equal(row, known) for known in table) for row in sampled) and not torch.equal(text, sampled)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"method": "prompt_tuning", "target_modules": ["q_proj"]}, "target_modules: is no setting of prompt_tuning"),
        (
            {"method": "prefix_tuning", "layers_to_transform": [0]},
            "layers_to_transform: is no setting of prefix_tuning",
        ),
        ({"method": "prompt_tuning", "prompt_tuning_init": "text"}, "text needs prompt_tuning_init_text"),
        (
            {"method": "prompt_tuning", "prompt_tuning_init_text": "ab"},
            "prompt_tuning_init: got random;",
        ),
        ({"num_virtual_tokens": 4}, "is a setting of prompt_tuning and prefix_tuning; the method is lora"),
        ({"method": "prefix_tuning", "num_virtual_tokens": 0}, "num_virtual_tokens"),
    ],
)
def test_settings_when_they_mean_nothing_then_refused_in_one_sentence(settings, sentence):
    with pytest.raises(ConfigError) as caught:
        AdapterSpec(**settings)
    assert sentence in str(caught.value)


def test_job_when_no_room_is_left_for_tokens_then_is_refused():
    with pytest.raises(ConfigError, match="max_length: 20 virtual tokens leave room for 1 of the sample's own"):
        JobSpec("a", ("rows",), adapter=AdapterSpec(method="prompt_tuning"), max_length=21)


@pytest.mark.parametrize(
    ("changes", "tensor", "sentence"),
    [
        ({"num_virtual_tokens": None}, torch.ones(COUNT, 8), "num_virtual_tokens is nothing; at least 1"),
        ({}, torch.ones(COUNT + 1, 8), "has 4 rows; its config has 3"),
        ({}, torch.ones(COUNT, 7), "rows of 7, which are not keys and values of 2 layers"),
        ({"prefix_projection": True}, torch.ones(COUNT, 8), "encoder cannot be restored"),
    ],
)
def test_read_when_a_prefix_is_not_whole_then_refused_with_what_is_wrong(tmp_path, changes, tensor, sentence):
    from safetensors.torch import save_file

    peft_model("prefix_tuning").save_pretrained(tmp_path)
    path = tmp_path / CONFIG_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    save_file({"prompt_embeddings": tensor}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(AdapterFileError, match=sentence):
        read_adapter(tmp_path)


def test_sample_when_rows_come_before_it_then_masks_and_weights_move_along():
    sample = Sample([5, 6, 7], [False, True, True], [1.0, 2.0, 0.5], [np.nan, 1.0, np.nan])
    led = sample.led_by(2)
    assert led.length == 5 and led.supervised.tolist() == [False, False, False, True, True]
    assert led.tokens[2:].tolist() == [5, 6, 7] and led.weights[2:].tolist() == [1.0, 2.0, 0.5]
    assert led.label == sample.label == 1.0 and led.first_supervised == 3
    assert sample.led_by(0) is sample
