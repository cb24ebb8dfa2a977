"""The settings of prompt tuning and prefix tuning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from weft.errors import ConfigError
from weft.methods.config import MethodConfig
from weft.settings import at_least, setting

if TYPE_CHECKING:
    from weft.spec.adapter import AdapterSpec


class VirtualTokenConfig(MethodConfig):
    """The common base of both methods."""

    auto_targets = "all"
    learning_rate = 3e-2
    undivided = None

    def check(self, spec: AdapterSpec) -> None:
        given = {"exclude_modules": spec.exclude_modules, "layers_to_transform": spec.layers_to_transform}
        if spec.target_modules != self.auto_targets:
            given["target_modules"] = spec.target_modules
        for where, value in given.items():
            if value is not None:
                raise ConfigError(f"is no setting of {self.name}, which sits on no modules.", where=where)

    def num_leading_rows(self, spec: AdapterSpec) -> int:
        return spec.num_virtual_tokens


class PromptConfig(VirtualTokenConfig):
    name = "prompt_tuning"

    def check(self, spec: AdapterSpec) -> None:
        super().check(spec)
        if (spec.prompt_tuning_init == "text") != bool(spec.prompt_tuning_init_text):
            is_text = spec.prompt_tuning_init == "text"
            problem = "text needs prompt_tuning_init_text" if is_text else "prompt_tuning_init_text is for text"
            raise ConfigError(f"got {spec.prompt_tuning_init}; {problem}.", where="prompt_tuning_init")


class PrefixConfig(VirtualTokenConfig):
    name = "prefix_tuning"


VIRTUAL_TOKENS = (PromptConfig.name, PrefixConfig.name)


@dataclass(frozen=True)
class VirtualTokenSettings:
    configs: ClassVar[tuple[MethodConfig, ...]] = (PromptConfig(), PrefixConfig())

    num_virtual_tokens: int = setting(20, rule=at_least(1), methods=VIRTUAL_TOKENS)
    """Trained rows in front of every sample; they count as tokens, also in max_length."""
    prompt_tuning_init: str = setting("random", choices=("random", "text", "sample_vocab"), methods=("prompt_tuning",))
    """random: normal numbers; text: the embeddings of prompt_tuning_init_text, cut or repeated; sample_vocab: those of
    random tokens."""
    prompt_tuning_init_text: str | None = setting(None, methods=("prompt_tuning",))
    """Text that a prompt starts as."""
    init_prefix_weights: str = setting("random", choices=("random", "zero"), methods=("prefix_tuning",))
    """random: normal numbers; zero: keys and values of zeros."""
