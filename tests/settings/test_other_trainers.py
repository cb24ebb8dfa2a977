"""Settings of other trainers: harmless values are accepted, all others refused by name with what to write instead."""

from __future__ import annotations

import dataclasses

import pytest

from weft.errors import ConfigError
from weft.other_trainers import FOREIGN
from weft.settings import field_names, read
from weft.spec import AdapterSpec, JobSpec, RunSpec
from weft.spec.load import run_from_mapping
from weft.spec.run import BackboneSpec


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lora_bias": True}, "lora_bias: LoRA with a bias is not supported yet."),
        ({"bias": "all"}, "bias: `method: bitfit` trains biases"),
        ({"task_type": "SEQ_CLS"}, "task_type: only CAUSAL_LM is accepted."),
        ({"ensure_weight_tying": True}, "ensure_weight_tying: rows of trainable_token_indices are tied"),
        ({"load_in_4bit": True}, "load_in_4bit: write `quantize` of the run: fp8, int8 or nf4."),
        ({"neftune_noise_alpha": 5}, "neftune_noise_alpha: NEFTune's noise is not supported yet."),
        ({"tokenizer_name_or_path": "x"}, "tokenizer_name_or_path: the tokenizer is that of base_model."),
        ({"reward_model": "x"}, "reward_model: answers are not generated during training"),
    ],
)
def test_setting_when_it_is_another_trainers_then_refused_by_name(settings, message):
    with pytest.raises(ConfigError) as caught:
        read(AdapterSpec, settings, "adapter")
    assert str(caught.value).startswith(f"adapter.{message}")


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


def refusal(**settings: object) -> str:
    with pytest.raises(ConfigError) as caught:
        run_from_mapping({"base_model": "tiny", "jobs": [{"name": "a", "train_data": "x", **settings}]})
    return str(caught.value)


@pytest.mark.parametrize(
    ("settings", "ends"),
    [
        ({"objective": "grpo"}, "GRPO learns from answers that are generated and scored during training, which is not"),
        ({"objective": "ppo"}, "PPO learns from answers that are generated"),
        ({"objective": "Sft"}, "Did you mean supervised?"),
        ({"adapter": {"method": "adalora"}}, "AdaLoRA is not supported; the nearest is lora with rank_pattern,"),
        ({"adapter": {"method": "loha"}}, "LoHa is not supported; the nearest is lora."),
        ({"adapter": {"method": "P-Tuning"}}, "P-tuning is not supported; the nearest is prompt_tuning."),
        ({"adapter": {"method": "qlora"}}, "Write lora, and `quantize: nf4` of the run."),
        ({"adapter": {"method": "DORA"}}, "Did you mean dora?"),
        ({"adapter": {"init_lora_weights": "corda"}}, "CorDA is not supported; the nearest is eva."),
        ({"optim": "prodigy"}, "prodigy is not supported; the nearest is adamw."),
        ({"optim": "ADAMW"}, "Did you mean adamw?"),
        ({"lr_scheduler_type": "wsd"}, "Did you mean warmup_stable_decay?"),
        ({"objective": "dpo", "loss_type": "aot"}, "aot is not supported; the nearest is sigmoid."),
    ],
)
def test_value_when_it_is_another_trainers_then_the_sentence_names_the_nearest(settings, ends):
    assert f". {ends}" in refusal(**settings)


@pytest.mark.parametrize(
    ("settings", "ends"),
    [
        ({"device": "gpu"}, "Did you mean cuda?"),
        ({"device": "cuda:1"}, "Write cuda, and choose GPUs by --devices."),
        ({"dtype": "float16"}, "float16 is not supported; the nearest is bfloat16."),
        ({"quantize": "4bit"}, "Did you mean nf4?"),
    ],
)
def test_value_of_the_run_when_it_is_another_trainers_then_the_sentence_names_the_nearest(settings, ends):
    with pytest.raises(ConfigError) as caught:
        run_from_mapping({"base_model": "tiny", "jobs": [{"name": "a", "train_data": "x"}], **settings})
    assert str(caught.value).endswith(f". {ends}")
    spec = run_from_mapping({"base_model": "tiny", "jobs": [{"name": "a", "train_data": "x"}], "dtype": "bf16"})
    assert spec.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("spec", "setting"),
    [
        *((AdapterSpec, name) for name in ("method", "init_lora_weights")),
        *((JobSpec, name) for name in ("objective", "loss_type", "optim", "lr_scheduler_type")),
        *((RunSpec, name) for name in ("device", "dtype", "quantize")),
    ],
)
def test_values_of_others_when_listed_then_none_is_our_own_and_the_nearest_is(spec, setting):
    (field,) = (field for field in dataclasses.fields(spec) if field.name == setting)
    known, others = set(field.metadata["choices"]), field.metadata["elsewhere"]
    assert others and not known & others.keys() and not others.keys() & field.metadata["synonyms"].keys()
    nearest = {words.split()[0].rstrip(".") for text in others.values() for words in text.split("the nearest is ")[1:]}
    meant = {words.rstrip("?") for text in others.values() for words in text.split("Did you mean ")[1:]}
    assert nearest | {words.partition("?")[0] for words in meant} <= known
