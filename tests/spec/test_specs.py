"""What adapters, jobs and runs may be, beyond the limits of single settings."""

import dataclasses
import math
import re
import typing
from typing import Any

import pytest

from weft.errors import ConfigError
from weft.settings import read
from weft.spec import AdapterSpec, JobSpec, RunSpec
from weft.spec.cluster import ClusterJobSpec, LengthsSpec
from weft.spec.load import run_from_mapping
from weft.spec.run import memory_fraction
from weft.spec.sweep import EarlyStopSpec, ObjectiveSpec, SweepSpec


def job(**settings: Any) -> JobSpec:
    return JobSpec(**{"name": "a", "train_data": "a.jsonl", **settings})


def test_adapter_when_patterns_match_then_the_first_gives_rank_alpha_and_scale():
    spec = AdapterSpec(
        r=8, rank_pattern={"q_proj": 4, r"layers\.1\..*": 2}, alpha_pattern={"self_attn.q_proj": 3.0}, use_rslora=True
    )
    path = "model.layers.1.self_attn.q_proj"
    assert (spec.rank_for(path), spec.alpha_for(path)) == (4, 3.0)
    assert spec.scale_for(path) == 3.0 / math.sqrt(4)
    assert spec.rank_for("model.layers.1.mlp.up_proj") == 2
    # A key matches whole names only.
    assert spec.rank_for("model.layers.0.xq_proj") == 8
    assert spec.alpha_for("model.layers.0.mlp.up_proj") == 16.0


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"target_modules": []}, "target_modules: the list is empty; name modules or use all-linear."),
        ({"target_modules": "("}, "target_modules: '(' is not a regular expression"),
        ({"rank_pattern": {"[": 1}}, "rank_pattern: '[' is not a regular expression"),
        ({"rank_pattern": {"q_proj": 0}}, "rank_pattern.q_proj: must be at least 1, got 0."),
        ({"alpha_pattern": {"q_proj": "inf"}}, "alpha_pattern.q_proj: expected a finite number, got inf."),
        ({"r": 3, "init_lora_weights": "orthogonal"}, "init_lora_weights: orthogonal needs even ranks."),
        ({"method": "adalora"}, "method: got 'adalora'; accepted are lora, "),
    ],
)
def test_adapter_when_settings_do_not_go_together_then_refused_with_the_reason(settings: dict[str, Any], sentence: str):
    with pytest.raises(ConfigError) as caught:
        AdapterSpec(**settings)
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize(
    ("settings", "size"),
    [
        ({}, 8),
        ({"global_batch_size": 3}, 3),
        ({"per_device_train_batch_size": 4}, 4),
        ({"gradient_accumulation_steps": 5}, 5),
        ({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 5, "global_batch_size": 20}, 20),
    ],
)
def test_job_when_the_batch_is_stated_in_any_way_then_its_size_is_the_product(settings: dict[str, int], size: int):
    assert job(**settings).batch_size == size


@pytest.mark.parametrize(
    ("given", "kind"), [("adamw_torch_fused", "adamw"), ("lion_32bit", "lion"), ("adafactor", "adafactor")]
)
def test_job_when_its_optimizer_has_transformers_name_then_is_ours(given: str, kind: str):
    assert job(optim=given).optim == kind


def test_job_when_its_optimizer_is_misspelt_then_the_error_suggests_the_right_name():
    with pytest.raises(ConfigError) as caught:
        job(optim="adamw_torch_fuse")
    assert caught.value.hint == "Did you mean adamw_torch_fused?"


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "../up", "a b", "x" * 65, "é"])
def test_job_when_its_name_is_no_directory_name_then_refuses(name: str):
    with pytest.raises(ConfigError, match="is not a job name"):
        job(name=name)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"train_data": []}, "train_data: no files; name at least one."),
        ({"eval_data": 0}, "eval_data: got 0; accepted are a fraction"),
        ({"eval_data": 1.0}, "eval_data: got 1.0, which could be all samples or one; write 1 for one sample"),
        ({"eval_data": 1.5}, "eval_data: got 1.5; accepted are a fraction"),
        ({"early_stopping_patience": 3}, "early_stopping_patience: needs eval_data."),
        ({"global_batch_size": 8, "per_device_train_batch_size": 3}, "global_batch_size: global_batch_size is 8, but"),
        ({"max_grad_norm": -1}, "max_grad_norm: must be at least 0, got -1.0."),
        ({"momentum": 0.9}, "momentum: is a setting of sgd and muon; optim is adamw."),
        (
            {"optim": "adafactor", "adam_beta1": 0.5},
            "adam_beta1: is a setting of adamw, adamw_8bit, lion and muon; optim",
        ),
        ({"optim": "sgd", "adam_beta2": 0.5}, "adam_beta2: is a setting of adamw, adamw_8bit, lion and muon; optim is"),
        ({"optim": "lion", "adam_epsilon": 1e-5}, "adam_epsilon: is a setting of adamw, adamw_8bit and muon; optim is"),
        (
            {"objective": "dpo", "train_on_inputs": True},
            "train_on_inputs: is a setting of supervised, weighted and",
        ),
        ({"objective": "simpo", "reference": "x"}, "reference: is a setting of dpo and kto; the objective is simpo."),
        ({"objective": "reward", "mask_history": True}, "mask_history: is a setting of supervised, weighted, distill"),
        ({"optim": "muon", "nesterov": True}, "nesterov: is a setting of sgd; optim is muon."),
        ({"optim": "sgd", "nesterov": True}, "nesterov: needs a momentum above 0."),
        (
            {"lr_scheduler_kwargs": {"num_cycles": 2}},
            "lr_scheduler_kwargs.num_cycles: is no setting of lr_scheduler_type",
        ),
        (
            {"lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 0.5}},
            "lr_scheduler_kwargs.num_cycles: must be a whole number of at least 1, got 0.5.",
        ),
        ({"lr_scheduler_type": "cosine_with_min_lr"}, "lr_scheduler_kwargs: cosine_with_min_lr needs either min_lr or"),
        (
            {"lr_scheduler_type": "warmup_stable_decay"},
            "lr_scheduler_kwargs: warmup_stable_decay needs num_decay_steps.",
        ),
        (
            {
                "lr_scheduler_type": "warmup_stable_decay",
                "lr_scheduler_kwargs": {"num_decay_steps": 2, "decay_type": "x"},
            },
            "lr_scheduler_kwargs.decay_type: must be one of cosine, linear, 1-sqrt, got 'x'.",
        ),
        ({"learning_rate_pattern": {"q_proj": -1}}, "learning_rate_pattern.q_proj: must be at least 0, got -1."),
        ({"learning_rate_pattern": {"q_(": 1}}, "learning_rate_pattern: 'q_(' is not a regular expression"),
        ({"ema_decay": 1}, "ema_decay: must be at least 0 and below 1, got 1.0."),
        ({"optim": "loin"}, "optim: got 'loin'; accepted are adamw, "),
    ],
)
def test_job_when_settings_do_not_go_together_then_refused_with_the_reason(settings: dict[str, Any], sentence: str):
    with pytest.raises(ConfigError) as caught:
        job(**settings)
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"jobs": ()}, "jobs: there are no jobs; write at least one."),
        ({"capacity": 512}, "jobs.0.max_length: max_length 1024 is above the run's capacity of 512 tokens"),
        ({"report_to": ["excel"]}, "report_to: got excel; accepted are tensorboard, wandb, mlflow."),
        ({"report_to": ["wandb", "wandb"]}, "report_to: got wandb, wandb;"),
        ({"device": "tpu"}, "device: got 'tpu'; accepted are auto, cpu, cuda."),
        ({"memory_limit": "40XB"}, "memory_limit: got 40XB; write a size such as 40GB or 512MiB, or a share such as"),
        ({"memory_limit": "much"}, "memory_limit: got much; write a size"),
        ({"memory_limit": 40}, "memory_limit: got 40.0; write a size"),
        ({"memory_limit": 0}, "memory_limit: got 0.0; write a size"),
        ({"memory_limit": "-1GB"}, "memory_limit: got -1GB; write a size"),
        ({"memory_limit": "0GB"}, "memory_limit: got 0GB; write a size"),
    ],
)
def test_run_when_settings_do_not_go_together_then_refused_with_the_reason(settings: dict[str, Any], sentence: str):
    with pytest.raises(ConfigError) as caught:
        RunSpec(**{"base_model": "tiny", "jobs": (job(),), **settings})
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize(
    ("limit", "share"),
    [("40GB", 0.5), ("10 gb", 0.125), ("20000MB", 0.25), ("8GiB", 0.1073741824), (0.3, 0.3), ("1", 1), ("90GB", 1)],
)
def test_memory_limit_when_written_in_any_way_then_is_a_share_of_the_gpu(limit: Any, share: float):
    spec = RunSpec("tiny", (job(),), memory_limit=limit)
    assert spec.memory_limit is not None
    assert memory_fraction(spec.memory_limit, 80 * 10**9) == pytest.approx(share)


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        ({"method": "ia3", "r": 8}, "r"),
        ({"method": "ia3", "freeze_a": True}, "freeze_a"),
        ({"method": "ia3", "rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"feedforward_modules": ["down_proj"]}, "feedforward_modules"),
        ({"init_ia3_weights": False}, "init_ia3_weights"),
    ],
)
def test_adapter_when_a_setting_is_another_methods_then_it_is_refused(settings, where):
    owner, method = ("lora and dora", "ia3") if "method" in settings else ("ia3", "lora")
    with pytest.raises(ConfigError) as caught:
        AdapterSpec(**settings)
    assert (caught.value.where, caught.value.message) == (where, f"is a setting of {owner}; the method is {method}.")


@pytest.mark.parametrize(("method", "rate"), [("lora", 2e-4), ("dora", 2e-4), ("ia3", 1e-2), ("bitfit", 3e-3)])
def test_job_when_it_states_no_learning_rate_then_has_that_of_its_method(method: str, rate: float):
    adapter = AdapterSpec(method=method)
    assert JobSpec("a", ("rows",), adapter=adapter).learning_rate == rate
    assert JobSpec("a", ("rows",), adapter=adapter, learning_rate=1e-3).learning_rate == 1e-3


def test_job_when_loraplus_is_set_for_ia3_then_it_is_refused():
    with pytest.raises(ConfigError, match="is a setting of lora and dora; the method is ia3"):
        JobSpec("a", ("rows",), adapter=AdapterSpec(method="ia3"), loraplus_lr_ratio=4.0)


def test_adapter_when_targets_are_auto_then_each_method_has_its_own():
    """IA³ sits on keys, values and the feed-forward's last linear, whose inputs it scales."""
    assert AdapterSpec().target_modules == "all-linear"
    pattern = AdapterSpec(method="ia3").target_modules
    assert isinstance(pattern, str)
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj", "query_key_value", "dense_4h_to_h", "fc2"]
    found = [name for name in names if re.fullmatch(pattern, f"model.layers.0.x.{name}")]
    assert found == ["k_proj", "v_proj", "down_proj", "query_key_value", "dense_4h_to_h", "fc2"]
    assert [n for n in found if AdapterSpec(method="ia3").is_feedforward(n)] == ["down_proj", "dense_4h_to_h", "fc2"]


def wild_value(hint: Any) -> Any:
    """A value with a wild number wherever a setting of this type takes one; None if it takes none."""
    if hint in (int, float):
        return 1e300
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is dict:
        inner = wild_value(args[1])
        return None if inner is None else {"q_proj": inner}
    found = [wild_value(arg) for arg in args]
    inner = next((value for value in found if value is not None), None)
    return [inner] if origin is tuple and inner is not None else inner


NUMBERS = [
    (cls, name, wild_value(hint))
    for cls in (AdapterSpec, JobSpec, RunSpec, SweepSpec, ObjectiveSpec, EarlyStopSpec)
    for name, hint in typing.get_type_hints(cls).items()
    if wild_value(hint) is not None
]


@pytest.mark.parametrize(("cls", "name", "wild"), NUMBERS)
def test_setting_when_its_number_is_beyond_what_can_be_computed_with_then_it_is_refused_by_name(cls, name, wild):
    """A number that float32 has no room for would raise in the middle of a step, beside other jobs."""
    needed = {"name": "a", "train_data": "x", "base_model": "tiny", "jobs": [{"name": "a", "train_data": "x"}]}
    given = {field.name: needed[field.name] for field in dataclasses.fields(cls) if field.name in needed}
    with pytest.raises(ConfigError) as caught:
        read(cls, {**given, name: wild})
    assert (caught.value.where or "").startswith(name)
    assert "1e+300" in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({}, "train_data.0.streaming: needs max_steps, which limits the rows that are read; or set rows."),
        (
            {"max_steps": 2, "eval_data": [{"path": "b.jsonl", "streaming": True}]},
            "eval_data.0.streaming: is not for eval_data; limit it with rows.",
        ),
    ],
)
def test_streamed_source_when_nothing_limits_its_rows_then_is_refused(settings: dict[str, Any], found: str):
    with pytest.raises(ConfigError) as error:
        JobSpec("a", [{"path": "a.jsonl", "streaming": True}], **settings)  # type: ignore[arg-type]
    assert str(error.value) == found


def test_streamed_source_when_rows_are_given_too_then_is_refused():
    with pytest.raises(ConfigError, match="rows already limits how many are read"):
        JobSpec("a", [{"path": "a.jsonl", "streaming": True, "rows": 3}], max_steps=2)  # type: ignore[arg-type]


@pytest.mark.parametrize(("before", "now"), [("free", "any_order"), ("ordered", "in_order"), ("any_order",) * 2])
def test_gradient_sum_when_it_has_its_former_name_or_value_then_means_the_same(before, now):
    rows = ("rows.jsonl",)
    read_back = run_from_mapping({"base_model": "tiny", "jobs": [{"name": "a", "train_data": "x", "sums": before}]})
    assert JobSpec("a", rows, sums=before).gradient_sum == now == read_back.jobs[0].gradient_sum  # type: ignore[call-arg]
    lengths = LengthsSpec(mean=100, longest=200)
    assert ClusterJobSpec("a", lengths, sums=before).gradient_sum == now  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="gradient_sum and sums are two names of one setting"):
        JobSpec("a", rows, sums=before, gradient_sum=now)  # type: ignore[call-arg]
