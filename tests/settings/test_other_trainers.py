"""Settings of other trainers: harmless values are accepted, all others refused by name with what to write instead."""

from __future__ import annotations

import pytest

from weft.errors import ConfigError
from weft.settings.fields import field_names, read
from weft.settings.other_trainers import FOREIGN
from weft.spec import AdapterSpec, JobSpec
from weft.spec.load import run_from_mapping
from weft.spec.run import BackboneSpec


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"lora_bias": True}, "lora_bias: LoRA with a bias is not supported yet."),
        ({"bias": "all"}, "bias: `method: bitfit` trains biases"),
        ({"task_type": "SEQ_CLS"}, "task_type: only CAUSAL_LM is accepted."),
        ({"ensure_weight_tying": True}, "ensure_weight_tying: rows of trainable_token_indices are tied"),
        ({"load_in_4bit": True}, "load_in_4bit: write `quantize` of the run: fp8, int8 or nf4."),
        ({"neftune_noise_alpha": 5}, "neftune_noise_alpha: NEFTune's noise is not supported yet."),
    ],
)
def test_setting_when_it_is_another_trainers_then_refused_by_name(settings, says):
    with pytest.raises(ConfigError) as caught:
        read(AdapterSpec, settings, "adapter")
    assert str(caught.value).startswith(f"adapter.{says}")


def test_setting_when_its_value_changes_nothing_then_accepted():
    harmless = {"bias": "none", "task_type": "CAUSAL_LM", "lora_bias": False, "ensure_weight_tying": False}
    assert read(AdapterSpec, {"r": 4, **harmless}) == AdapterSpec(r=4)
    given = {"name": "a", "train_data": "x", "gradient_checkpointing": True, "packing": False, "load_in_4bit": False}
    assert read(JobSpec, given) == JobSpec("a", ("x",))


def test_jobs_file_when_it_has_settings_of_others_then_they_are_answered_as_such():
    def run(**adapter: object) -> object:
        job = {"name": "a", "train_data": "x", "adapter": {"r": 4, **adapter}}
        return run_from_mapping({"base_model": "tiny", "jobs": [job]})

    run(task_type="CAUSAL_LM", bias="none")
    with pytest.raises(ConfigError, match="lora_bias: LoRA with a bias is not supported yet"):
        run(lora_bias=True)


@pytest.mark.parametrize("spec", [AdapterSpec, JobSpec, BackboneSpec])
def test_settings_of_others_when_listed_then_none_is_our_own(spec):
    assert not FOREIGN.keys() & field_names(spec).keys()
