"""The text model in the files of a model that also takes images or sound.

Such a model keeps its decoder's settings in `text_config` and its weights under `language_model.`. Here only the
decoder is loaded, as the class that transformers has for it alone, so its paths are those of a text model. Servers load
the whole model, so adapters for them carry the longer names (`store/served_names.py`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

KEY_MAPPING = {
    r"^(?:model\.)?language_model\.(?:model\.)?(?!lm_head)": "model.",
    r"^language_model\.lm_head": "lm_head",
}
"""Names of weights in such files to names in the text model."""


def text_config_of(config: Any) -> Any | None:
    """The configuration of the text model; None if the model is one already, or transformers has no class for it."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    text = getattr(config, "text_config", None)
    if text is None or type(text) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return None
    text = copy.deepcopy(text)
    # The whole model decides whether its head is its embedding.
    text.tie_word_embeddings = bool(getattr(config, "tie_word_embeddings", text.tie_word_embeddings))
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if getattr(text, name, None) is None:
            setattr(text, name, getattr(config, name, None))
    return text


def is_auto_class(config: Any) -> bool:
    """True if transformers' AutoModelForCausalLM makes the text model of such a configuration, not the whole one."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    made = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return made is not None and made is MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config.text_config), None)


def names_in_files(path: str, prefix: str) -> Iterator[str]:
    """Names that the weight of a module may have in files; `prefix` is that of the decoder's paths."""
    rest = path.removeprefix(prefix)
    yield f"{path}.weight"
    yield f"{rest}.weight"
    if rest == path:
        yield f"language_model.{rest}.weight"
    else:
        yield f"model.language_model.{rest}.weight"
        yield f"language_model.model.{rest}.weight"
