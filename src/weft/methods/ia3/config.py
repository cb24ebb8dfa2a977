"""IA³'s settings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from weft.methods.config import MethodConfig
from weft.settings import setting

if TYPE_CHECKING:
    from weft.spec.adapter import AdapterSpec

_FEEDFORWARD = ("down_proj", "fc2", "dense_4h_to_h", "fc_out", "mlp.c_proj")
"""Names of the last linear of a feed-forward block in the families."""
_KEYS_AND_VALUES = ("k_proj", "v_proj", "qkv_proj", "query_key_value", "c_attn")


class Ia3Config(MethodConfig):
    name = "ia3"
    auto_targets = rf".*\.({'|'.join((*_KEYS_AND_VALUES, *_FEEDFORWARD))})"
    learning_rate = 1e-2
    undivided = None

    def patterns(self, spec: AdapterSpec) -> Mapping[str, str | tuple[str, ...] | None]:
        return {"feedforward_modules": spec.feedforward_modules}


@dataclass(frozen=True)
class Ia3Settings:
    configs: ClassVar[tuple[MethodConfig, ...]] = (Ia3Config(),)

    feedforward_modules: str | tuple[str, ...] | None = setting(None, methods=("ia3",))
    """Adapted modules whose inputs are scaled, as names or one regular expression; all others have their outputs
    scaled. Default: the last linear of every MLP."""
    init_ia3_weights: bool = setting(True, methods=("ia3",))
    """true: scales start at 1 and change nothing; false: normal random scales."""

    def is_feedforward(self, module: str) -> bool:
        """Whether IA³ scales the inputs of a module path, not its outputs."""
        named = _FEEDFORWARD if self.feedforward_modules is None else self.feedforward_modules
        if isinstance(named, str):
            return re.fullmatch(named, module) is not None
        return any(module == name or module.endswith(f".{name}") for name in named)
