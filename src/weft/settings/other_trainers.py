"""Settings of PEFT, TRL, Adapters, Axolotl and LLaMA-Factory that Weft knows and does not have.

One with a value that changes nothing here is accepted; any other is refused by name, with what to write instead where
there is something.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_OFF = (None, False, 0, "", "none")


@dataclass(frozen=True)
class ForeignSetting:
    """A setting of another trainer."""

    reason: str
    """Why it is refused, and what to write instead."""
    harmless: tuple[Any, ...] = _OFF
    """Values that change nothing here."""


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
    "target_parameters": ForeignSetting("adapters on bare parameters, such as experts, are not supported yet."),
    "loftq_config": ForeignSetting("loftq makes up for `quantize` of the run; leave it out.", (*_OFF, {})),
    "rho": ForeignSetting("eva moves no ranks from module to module; r and rank_pattern say them.", (None, 1, 1.0)),
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
    "bf16": ForeignSetting("write `dtype: bfloat16` of the run."),
    "fp16": ForeignSetting("write `dtype: bfloat16` of the run; float16 is not supported."),
    "group_by_length": ForeignSetting("a job's order depends on its seed alone.", _OFF),
    "deepspeed": ForeignSetting("DeepSpeed is not used."),
    "fsdp": ForeignSetting("FSDP is not used.", (*_OFF, [])),
    "flash_attention": ForeignSetting("attention is chosen by `kernels` of the run.", (None, False, True)),
}
_ADAPTERS = {
    "reduction_factor": ForeignSetting("write `bottleneck_size`: the model's width divided by it."),
}
_QUANTISED = "write `quantize` of the run: fp8, int8 or nf4."
_OTHERS = {
    "load_in_4bit": ForeignSetting(_QUANTISED),
    "load_in_8bit": ForeignSetting(_QUANTISED),
    "quantization_config": ForeignSetting(_QUANTISED),
    "quantization_bit": ForeignSetting(_QUANTISED),
    "sample_packing": ForeignSetting("samples are always packed, and never see each other.", (None, True, False)),
    "finetuning_type": ForeignSetting("adapters are trained, never the backbone.", (None, "lora")),
}
FOREIGN: Mapping[str, ForeignSetting] = {**_PEFT, **_TRL, **_ADAPTERS, **_OTHERS}
"""By their names there."""


def is_harmless(name: str, value: Any) -> bool:
    """Whether a setting of another trainer has a value that changes nothing here."""
    known = FOREIGN.get(name)
    return known is not None and any(type(value) is type(off) and value == off for off in known.harmless)


def why_refused(name: str) -> str | None:
    """Why a setting of another trainer is not accepted; None if the name is nobody's."""
    known = FOREIGN.get(name)
    return None if known is None else known.reason
