"""Names of other trainers (PEFT, TRL, transformers, LLaMA-Factory, Axolotl), with what to write instead.

Settings that change nothing here are accepted with some values. Values of `method`, `objective`, `loss_type`, `optim`,
`lr_scheduler_type` and `init_lora_weights` that Weft lacks have a sentence with the nearest one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_OFF = (None, False, 0, "", "none")


@dataclass(frozen=True)
class ForeignSetting:
    reason: str
    harmless: tuple[Any, ...] = _OFF


_PEFT = {
    "lora_bias": ForeignSetting("LoRA with a bias is not supported yet."),
    "bias": ForeignSetting("`method: bitfit` trains biases; beside another method only none is accepted."),
    "task_type": ForeignSetting("only CAUSAL_LM is accepted.", (None, "CAUSAL_LM")),
    "peft_type": ForeignSetting("name the method by `method`, in lower case.", (None,)),
    "inference_mode": ForeignSetting("an adapter that is trained is not in inference mode."),
    "fan_in_fan_out": ForeignSetting("how a weight is stored is found out from the model.", (None, False, True)),
    "ensure_weight_tying": ForeignSetting("rows of trainable_token_indices are tied where the backbone's are."),
    "layer_replication": ForeignSetting("layers belong to the shared backbone and are not repeated."),
    "layers_pattern": ForeignSetting("layers are found by their number; use layers_to_transform alone."),
    "target_parameters": ForeignSetting("bare parameters are not named; for routed experts set `experts: full`."),
    "loftq_config": ForeignSetting("loftq makes up for `quantize` of the run; leave it out.", (*_OFF, {})),
    "rho": ForeignSetting("eva moves no ranks from module to module; r and rank_pattern set them.", (None, 1, 1.0)),
    "whiten": ForeignSetting("eva's directions are not whitened here."),
    "adjust_scaling_factors": ForeignSetting("eva moves no ranks, so there is nothing to adjust.", (None, True, False)),
    "label_mask_value": ForeignSetting("which tokens count is known from the data.", (None, -100)),
}
_TRL = {
    "gradient_checkpointing": ForeignSetting("write `recompute` of the run.", (None, False, True)),
    "gradient_checkpointing_kwargs": ForeignSetting("write `recompute` of the run.", (*_OFF, {})),
    "packing": ForeignSetting(
        "samples are always packed, and never see each other; group_texts joins plain texts.", (None, True, False)
    ),
    "neftune_noise_alpha": ForeignSetting("NEFTune's noise is not supported yet."),
    **dict.fromkeys(
        ("output_router_logits", "router_aux_loss_coef"),
        ForeignSetting("routers are frozen, and a loss over all rows of a microbatch would couple jobs."),
    ),
    "bf16": ForeignSetting("write `dtype: bfloat16` of the run."),
    "fp16": ForeignSetting("write `dtype: bfloat16` of the run; float16 is not supported."),
    "group_by_length": ForeignSetting("a job's order depends on its seed alone.", _OFF),
    "deepspeed": ForeignSetting("DeepSpeed is not used."),
    "fsdp": ForeignSetting("FSDP is not used.", (*_OFF, [])),
    "ref_model": ForeignSetting("write `reference`: base, or a PEFT adapter directory.", (None,)),
    "dataset_text_field": ForeignSetting("write `data_columns: {text: NAME}`.", (None, "text")),
    **dict.fromkeys(
        ("assistant_only_loss", "completion_only_loss"),
        ForeignSetting("only answers are trained; train_on_inputs adds the rest.", (None, True)),
    ),
    "use_liger_kernel": ForeignSetting("write `kernels` of the run.", (None, False, True)),
    "precompute_ref_log_probs": ForeignSetting("each sample meets the reference once.", (None, False, True)),
    **dict.fromkeys(
        ("eval_strategy", "evaluation_strategy"),
        ForeignSetting("write eval_steps; the default is the end of each epoch.", (None, "epoch")),
    ),
    "save_strategy": ForeignSetting("write save_steps or save_minutes.", (None, "steps")),
    "load_best_model_at_end": ForeignSetting("write early_stopping_patience, which keeps the best adapter."),
    "resume_from_checkpoint": ForeignSetting("give --resume to weft train."),
    "logging_dir": ForeignSetting("metrics are in output_dir.", (None,)),
    "do_train": ForeignSetting("weft train trains.", (None, True)),
    "do_eval": ForeignSetting("write eval_data.", (None, True)),
    "flash_attention": ForeignSetting("attention is chosen by `kernels` of the run.", (None, False, True)),
}
_ADAPTERS = {
    "reduction_factor": ForeignSetting("write `bottleneck_size`: the model's width divided by it."),
}
_TOKENIZERS = ("tokenizer_name_or_path", "tokenizer_name", "tokenizer", "processing_class")
_NO_ANSWERS = "answers are not generated during training; the nearest objective is dpo."
_QUANTISED = "write `quantize` of the run: fp8, int8 or nf4."
_OTHERS = {
    "load_in_4bit": ForeignSetting(_QUANTISED),
    "load_in_8bit": ForeignSetting(_QUANTISED),
    "quantization_config": ForeignSetting(_QUANTISED),
    "quantization_bit": ForeignSetting(_QUANTISED),
    "sample_packing": ForeignSetting("samples are always packed, and never see each other.", (None, True, False)),
    "finetuning_type": ForeignSetting("adapters are trained, never the backbone.", (None, "lora")),
    **dict.fromkeys(_TOKENIZERS, ForeignSetting("the tokenizer is that of base_model.", (None,))),
    "template": ForeignSetting(
        "chats are written by the model's own template; write chat_template for another.", (None,)
    ),
    "stage": ForeignSetting("write `objective`.", (None, "sft")),
    "reward_model": ForeignSetting(_NO_ANSWERS, (None,)),
    "reward_funcs": ForeignSetting(_NO_ANSWERS, (None,)),
    "num_generations": ForeignSetting(_NO_ANSWERS, (None,)),
    "use_vllm": ForeignSetting(_NO_ANSWERS),
    "max_prompt_length": ForeignSetting("max_length is the limit of prompt and answer together.", (None,)),
    "max_completion_length": ForeignSetting("max_length is the limit of prompt and answer together.", (None,)),
}
FOREIGN: Mapping[str, ForeignSetting] = {**_PEFT, **_TRL, **_ADAPTERS, **_OTHERS}


def is_harmless(name: str, value: Any) -> bool:
    """Whether a setting of another trainer has a value that changes nothing here."""
    known = FOREIGN.get(name)
    return known is not None and any(type(value) is type(off) and value == off for off in known.harmless)


def why_refused(name: str) -> str | None:
    """Why a setting of another trainer is refused; None for unknown names."""
    known = FOREIGN.get(name)
    return None if known is None else known.reason


def _lacking(nearest: str, *names: str, **titles: str) -> dict[str, str]:
    """A sentence for each of some names that Weft has nothing for; `titles`: names that are written otherwise."""
    written = {name: name for name in names} | titles
    return {name: f"{title} is not supported; the nearest is {nearest}." for name, title in written.items()}


_GENERATED = "learns from answers that are generated and scored during training, which is not supported; the nearest is"
_WHOLE = "Only adapters are trained, never the backbone; the nearest is lora with a high r."
METHODS_ELSEWHERE: Mapping[str, str] = {
    **_lacking(
        "lora", loha="LoHa", lokr="LoKr", hra="HRA", xlora="X-LoRA", poly="Polytropon", bone="Bone", miss="MiSS"
    ),
    **_lacking("lora", gralora="GraLoRA", road="RoAd", c3a="C3A", oft="OFT", boft="BOFT", mora="MoRA"),
    **_lacking("lora with rank_pattern, or with init_lora_weights eva", adalora="AdaLoRA"),
    **_lacking("vera", vblora="VB-LoRA", randlora="RandLoRA", fourierft="FourierFT", waveft="WaveFT"),
    **_lacking("diff_pruning", shira="SHiRA"),
    **_lacking("bitfit", ln_tuning="LN tuning"),
    **_lacking("prompt_tuning", p_tuning="P-tuning", multitask_prompt_tuning="multitask prompt tuning", cpt="CPT"),
    **_lacking("prefix_tuning", adaption_prompt="LLaMA-Adapter"),
    **dict.fromkeys(("full", "fft", "freeze", "galore", "apollo", "badam", "lisa", "llama_pro"), _WHOLE),
    "qlora": "Write lora, and `quantize: nf4` of the run.",
    "rslora": "Write lora, and use_rslora: true.",
    **dict.fromkeys(("loraplus", "lora_plus", "lora+"), "Write lora, and loraplus_lr_ratio of the job."),
    **dict.fromkeys(("lora_fa", "lorafa"), "Write lora, and freeze_a: true."),
    **{start: f"Write lora, and init_lora_weights: {start}." for start in ("pissa", "olora", "eva", "loftq")},
    **{kind: f"Write bottleneck, and bottleneck_variant: {kind}." for kind in ("houlsby", "pfeiffer")},
    "trainable_tokens": "Write lora, and trainable_token_indices.",
    **dict.fromkeys(("adapter", "adapters"), "Did you mean bottleneck?"),
    "prompt": "Did you mean prompt_tuning?",
}
OBJECTIVES_ELSEWHERE: Mapping[str, str] = {
    **{name: f"{name.upper()} {_GENERATED} dpo." for name in ("ppo", "grpo", "rloo", "dapo", "gspo", "xpo")},
    **{name: f"{name} {_GENERATED} dpo." for name in ("reinforce", "online_dpo", "nash_md", "reinforce_plus_plus")},
    **dict.fromkeys(("gkd", "minillm"), f"It {_GENERATED} distillation."),
    **_lacking("kto", bco="BCO"),
    **_lacking("reward", prm="A process reward model"),
    **dict.fromkeys(("ipo", "hinge"), "Write dpo, with loss_type ipo or hinge."),
    "sft": "Did you mean supervised?",
    **dict.fromkeys(("rm", "reward_modeling"), "Did you mean reward?"),
    **dict.fromkeys(("pt", "pretrain", "pretraining", "clm"), "Write supervised; plain texts are trained whole."),
}
LOSS_TYPES_ELSEWHERE: Mapping[str, str] = {
    **_lacking("sigmoid with label_smoothing", "robust", cdpo="cDPO"),
    **_lacking("sigmoid", "exo_pair", "nca_pair", "aot", "aot_pair", "sppo_hard", "discopop", "apo_zero", "apo_down"),
    **{name: f"Write `objective: {name}`." for name in ("kto", "simpo", "orpo")},
    "kto_pair": "Write `objective: kto`.",
}
OPTIMS_ELSEWHERE: Mapping[str, str] = {
    "adam": "Did you mean adamw? Its weight_decay is 0 by default.",
    **_lacking("adamw", "adagrad", "adamax", "rmsprop", "lamb", "lars", "prodigy", "sophia", "came", "ademamix"),
    **_lacking("adamw", "schedule_free_adamw", "stable_adamw", "optimi_adamw", "adopt_adamw", "shampoo", "soap"),
    **_lacking("muon", "galore_adamw", "galore_adamw_8bit", "apollo_adamw", "dion"),
}
SCHEDULES_ELSEWHERE: Mapping[str, str] = {
    **_lacking("cosine", "rex", "one_cycle"),
    **_lacking("constant with early_stopping_patience", "reduce_lr_on_plateau"),
    "wsd": "Did you mean warmup_stable_decay?",
    **dict.fromkeys(("cosine_annealing", "cosineannealing"), "Did you mean cosine?"),
}
STARTS_ELSEWHERE: Mapping[str, str] = _lacking("eva", corda="CorDA", lora_ga="LoRA-GA")
DEVICES_ELSEWHERE: Mapping[str, str] = {
    "gpu": "Did you mean cuda?",
    **dict.fromkeys((f"cuda:{index}" for index in range(16)), "Write cuda, and choose GPUs by --devices."),
    **_lacking("cpu", "mps", "xpu", "npu", "tpu"),
}
DTYPES_ELSEWHERE: Mapping[str, str] = {
    **dict.fromkeys(("fp16", "float16", "half"), "float16 is not supported; the nearest is bfloat16."),
    **dict.fromkeys(("fp8", "int8", "nf4"), "Write `quantize`."),
}
DTYPE_SYNONYMS: Mapping[str, str] = {"bf16": "bfloat16", "fp32": "float32", "float": "float32"}
STORAGE_ELSEWHERE: Mapping[str, str] = {
    **dict.fromkeys(("4bit", "int4", "fp4", "q4", "4"), "Did you mean nf4?"),
    **dict.fromkeys(("8bit", "q8", "8"), "Did you mean int8?"),
    **_lacking("nf4", gptq="GPTQ", awq="AWQ", hqq="HQQ", aqlm="AQLM", int3="int3", mxfp4="MXFP4"),
}
