"""The families that the fast path takes, and the description of any decoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import get_args

from weft.plan.families.description import Config, Decoder
from weft.plan.families.gemma3 import gemma3
from weft.plan.families.layer_form import JOINED, SEPARATE, Activation
from weft.plan.families.llama import llama
from weft.plan.families.mistral import mistral
from weft.plan.families.phi3 import phi3
from weft.plan.families.qwen import qwen2, qwen3

FAMILIES: Mapping[str, Callable[[Config, str], Decoder]] = {
    "llama": llama,
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "phi3": phi3,
    "gemma3_text": gemma3,
}
"""By transformers' model type."""
REFERENCE_FAMILIES = (
    "gemma2",
    "opt",
    "gpt_neox",
    "granite",
    "cohere",
    "cohere2",
    "gpt2",
    "gpt_neo",
    "gptj",
    "codegen",
    "falcon",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "olmoe",
    "granitemoe",
)
"""Model types that run on the reference path and are tested against PEFT as those of the fast path are; any other is
checked against its own attention when it is loaded. Experts stay frozen."""
ROTARY_SCALINGS = ("default", "linear", "llama3", "yarn", "longrope")
"""Rotary positions that do not depend on how long a sample is; longrope's do beyond what `Backbone.max_positions`
allows."""
LINEARS = tuple(dict.fromkeys(path.rpartition(".")[2] for site in (*SEPARATE, *JOINED) for path in site))
"""What the linears of a layer are called in any family."""


def describe(config: Config, name: str = "") -> Decoder:
    """The decoder in a transformers configuration; one of no family here is taken for Llama's like, for estimates."""
    # Models that also see or hear keep their decoder's settings one level down.
    config = config.get("text_config") or config
    return FAMILIES.get(str(config.get("model_type", "")), llama)(config, name)


def why_unfit(config: Config) -> str | None:
    """Why the fast path does not take the model of a transformers configuration; None if it does."""
    kind = str(config.get("model_type", ""))
    if kind not in FAMILIES:
        return f"{kind} is not among {', '.join(FAMILIES)}"
    decoder = describe(config)
    if decoder.sizes.form.activation is None:
        return f"its activation is not {' or '.join(get_args(Activation))}"
    for rotary in decoder.rotaries:
        if rotary.scaling not in ROTARY_SCALINGS:
            return f"its rotary positions are {rotary.scaling}"
    return None
