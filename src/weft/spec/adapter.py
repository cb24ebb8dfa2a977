"""What an adapter is: its method with its settings, and which modules of the backbone it sits on."""

from __future__ import annotations

from dataclasses import dataclass

from weft.errors import ConfigError
from weft.methods.config import MethodConfig
from weft.methods.configs import CONFIGS, MethodSettings
from weft.methods.lora.config import LoraStrength
from weft.other_trainers import METHODS_ELSEWHERE
from weft.settings import KnownKeywords, check_pattern, refuse_foreign, setting, validate


@dataclass(frozen=True)
class MethodChoice:
    method: str = setting("lora", choices=tuple(CONFIGS), elsewhere=METHODS_ELSEWHERE)
    """The PEFT method: docs/methods.md."""


@dataclass(frozen=True)
class Targets:
    target_modules: str | tuple[str, ...] = setting("auto", aliases=("lora_target", "lora_target_modules"))
    """`all-linear`, a list of module names such as [q_proj, v_proj], or one regular expression over module paths;
    blocks as [self_attn, mlp] or `all-blocks`. `auto`: all-linear; for ia3 keys, values and the last linear of every
    MLP; for bottleneck by bottleneck_variant."""
    exclude_modules: str | tuple[str, ...] | None = setting(None)
    """Module names, or one regular expression, to leave out."""
    layers_to_transform: tuple[int, ...] | None = setting(None, aliases=("layers",))
    """Indices of the layers to adapt. Default: all."""


@dataclass(frozen=True)
class AdapterSpec(MethodSettings, Targets, LoraStrength, MethodChoice, KnownKeywords):
    """One adapter; the names are PEFT's. The order of the bases, from the last to the first, is that of the settings. A
    method's own settings are in its folder: `methods/<name>/config.py`."""

    def __post_init__(self) -> None:
        validate(self)
        if self.use_dora and self.method == "lora":
            object.__setattr__(self, "method", "dora")
        if self.method == "dora":
            object.__setattr__(self, "use_dora", False)
        if self.target_modules == "auto":
            object.__setattr__(self, "target_modules", self.config.targets(self))
        refuse_foreign(self, "methods", self.method, "the method")
        patterns = {"target_modules": self.target_modules, "exclude_modules": self.exclude_modules}
        for where, pattern in {**patterns, **self.config.patterns(self)}.items():
            if isinstance(pattern, str):
                check_pattern(pattern, where)
        self.config.check(self)
        if not self.target_modules and self.experts == "none":
            raise ConfigError("the list is empty; name modules or use all-linear.", where="target_modules")

    @property
    def config(self) -> MethodConfig:
        return CONFIGS[self.method]

    @property
    def num_leading_rows(self) -> int:
        return self.config.num_leading_rows(self)

    @property
    def rank(self) -> int | None:
        name = self.config.rank_setting
        found: int | None = None if name is None else getattr(self, name)
        return found
