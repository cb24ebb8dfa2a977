"""The settings of LoRA and DoRA."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from weft.errors import ConfigError
from weft.methods.config import MethodConfig
from weft.methods.lora.own_rows import OwnRows, TokenIds
from weft.settings.fields import (
    KnownKeywords,
    above,
    at_least,
    between,
    check_pattern,
    first_match,
    setting,
    validate,
)

if TYPE_CHECKING:
    from weft.spec.adapter import AdapterSpec

_WEIGHT_STARTS = ("pissa", "pissa_niter_4", "pissa_niter_16", "olora")
"""Starts of LoRA that are a part of the frozen weight."""
WORKED_OUT_STARTS = (*_WEIGHT_STARTS, "eva", "loftq")
"""Starts of LoRA that follow from the backbone or the data; an adapter's files know nothing of them."""
LORA_KINDS = ("lora", "dora")
"""Methods with LoRA's two matrices, and its settings."""


class LoraConfig(MethodConfig):
    """The method `lora`."""

    name = "lora"
    auto_targets = "all-linear"
    rank_setting = "r"
    undivided = None
    is_served = True

    def check(self, spec: AdapterSpec) -> None:
        for name, rank in spec.rank_pattern.items():
            check_pattern(name, "rank_pattern")
            if rank < 1:
                raise ConfigError(f"must be at least 1, got {rank}.", where=f"rank_pattern.{name}")
        for name, alpha in spec.alpha_pattern.items():
            check_pattern(name, "alpha_pattern")
            if alpha < 0:
                raise ConfigError(f"must be at least 0, got {alpha}.", where=f"alpha_pattern.{name}")
        ranks = [spec.r, *spec.rank_pattern.values()]
        if spec.init_lora_weights == "orthogonal" and any(rank % 2 for rank in ranks):
            raise ConfigError("orthogonal needs even ranks.", where="init_lora_weights")
        _check_worked_out_start(spec)
        OwnRows.of(spec.trainable_token_indices, spec.modules_to_save)
        _check_new_tokens(spec)

    def followed(self, spec: AdapterSpec) -> Mapping[str, Any]:
        return {"lora_alpha": spec.default_alpha}

    def smallest_side(self, spec: AdapterSpec) -> int:
        return min(spec.r, *spec.rank_pattern.values()) if spec.rank_pattern else spec.r


@dataclass(frozen=True)
class EvaSpec(KnownKeywords):
    """The settings of `eva_config`; the names are PEFT's."""

    tau: float = setting(0.99, rule=above(0, 1))
    """Cosine to the pass before that every direction of a module must reach; then the module has seen enough."""
    use_label_mask: bool = setting(True)
    """Read only tokens that count in the loss; false: all."""

    def __post_init__(self) -> None:
        validate(self)


@dataclass(frozen=True)
class LoraStrength:
    """Those of its settings that come first."""

    r: int = setting(16, aliases=("lora_r", "lora_rank", "rank"), rule=at_least(1), methods=LORA_KINDS)
    """Rank of the update: each adapted weight gets B·A with A (r, in) and B (out, r)."""
    lora_alpha: float | None = setting(None, aliases=("alpha",), rule=at_least(0), methods=LORA_KINDS)
    """Strength of the update: it is scaled by lora_alpha / r. Default: twice r."""
    lora_dropout: float = setting(
        0.0, aliases=("dropout", "vera_dropout"), rule=between(0, 1), methods=(*LORA_KINDS, "vera")
    )
    """Dropout on the input of the adapter (never on the frozen branch)."""


@dataclass(frozen=True)
class LoraSettings(LoraStrength):
    """The settings of LoRA and DoRA."""

    configs: ClassVar[tuple[MethodConfig, ...]] = (LoraConfig(),)

    rank_pattern: dict[str, int] = setting(factory=dict, methods=LORA_KINDS)
    """Ranks of some modules: a regular expression that ends a module path, mapped to its rank."""
    alpha_pattern: dict[str, float] = setting(factory=dict, methods=LORA_KINDS)
    """Alphas of some modules, as rank_pattern."""
    use_rslora: bool = setting(False, aliases=("rslora",), methods=LORA_KINDS)
    """Scale by lora_alpha / sqrt(r) instead of lora_alpha / r."""
    use_dora: bool = setting(False, methods=("lora",))
    """PEFT's spelling of `method: dora`."""
    init_lora_weights: bool | str = setting(
        True, aliases=("init",), choices=(True, False, "gaussian", "orthogonal", *WORKED_OUT_STARTS), methods=LORA_KINDS
    )
    """true: Kaiming-uniform A, zero B; gaussian: normal A, zero B; orthogonal: random A and B with a zero product (even
    ranks); false: random A and B; the others (docs/methods.md): from the weight, the job's data (eva) or the error of
    the quantised weights (loftq)."""
    eva_config: EvaSpec | None = setting(None, methods=LORA_KINDS)
    """How `eva` reads the data."""
    freeze_a: bool = setting(False, aliases=("lora_fa",), methods=LORA_KINDS)
    """LoRA-FA: train B alone, which saves A's gradients and moments."""
    trainable_token_indices: TokenIds | dict[str, TokenIds] | None = setting(None, methods=LORA_KINDS)
    """Ids of tokens whose rows of the input embedding the job trains as its own copy; with a tied output head, its rows
    too. {embed_tokens: [ids], lm_head: [ids]} names rows of an untied head."""
    new_tokens: tuple[str, ...] = setting((), methods=LORA_KINDS)
    """Texts that become one token each for this job, which trains their rows of embedding and output head; rows that
    the tokenizer lacks start as the mean of all. The tokenizer is written beside the adapter."""
    modules_to_save: tuple[str, ...] | None = setting(None, methods=LORA_KINDS)
    """Those of [embed_tokens, lm_head] that the job trains as a whole copy: vocabulary times width numbers each, with
    gradients and moments. For a few tokens use trainable_token_indices."""

    @property
    def trains_rows(self) -> bool:
        """Whether rows of the embedding or of the output head are its own."""
        return bool(self.own_rows or self.new_tokens)

    @property
    def own_rows(self) -> OwnRows:
        """Rows of the embedding and of the output head that are its own, new tokens' apart."""
        return OwnRows.of(self.trainable_token_indices, self.modules_to_save)

    @property
    def starts_as_weight(self) -> bool:
        """Whether it starts as a part of the frozen weight."""
        return self.init_lora_weights in _WEIGHT_STARTS

    @property
    def eva(self) -> EvaSpec | None:
        """How it looks at its job's data before the first step; None if it does not."""
        return (self.eva_config or EvaSpec()) if self.init_lora_weights == "eva" else None

    @property
    def default_alpha(self) -> float:
        """The alpha of modules that no pattern names."""
        return 2.0 * self.r if self.lora_alpha is None else self.lora_alpha

    def rank_for(self, module: str) -> int:
        """The rank on one module path."""
        return first_match(self.rank_pattern, module, self.r)

    def alpha_for(self, module: str) -> float:
        """The alpha on one module path."""
        return first_match(self.alpha_pattern, module, self.default_alpha)

    def scale_for(self, module: str) -> float:
        """What the update on one module path is multiplied with."""
        rank = self.rank_for(module)
        return self.alpha_for(module) / (math.sqrt(rank) if self.use_rslora else rank)


def _check_new_tokens(spec: AdapterSpec) -> None:
    """ConfigError for what new tokens cannot be."""
    for index, token in enumerate(spec.new_tokens):
        if not token.strip():
            raise ConfigError("a token of nothing but white space is none.", where="new_tokens")
        if token in spec.new_tokens[:index]:
            raise ConfigError(f"{token!r} is there twice.", where="new_tokens")
    if spec.new_tokens and spec.modules_to_save:
        raise ConfigError(
            "modules_to_save copies the backbone's rows, among which new tokens have none; keep one of the two.",
            where="new_tokens",
        )


def _check_worked_out_start(spec: AdapterSpec) -> None:
    """ConfigError for what a start that follows from the backbone or the data does not go with."""
    start = spec.init_lora_weights
    if spec.eva_config is not None and start != "eva":
        raise ConfigError("is for init_lora_weights eva.", where="eva_config")
    if start == "eva" and spec.new_tokens:
        raise ConfigError(
            "eva looks at the data by the bare backbone, which has no rows for new tokens; keep one of the two.",
            where="init_lora_weights",
        )
    if not spec.starts_as_weight and start != "loftq":
        return
    if spec.method != "lora":
        raise ConfigError(f"{start} is a start of lora, not of dora.", where="init_lora_weights")
    if spec.starts_as_weight and spec.lora_dropout:
        raise ConfigError(
            f"{start} starts as a part of the weight, which is never dropped; use 0.", where="lora_dropout"
        )
    if not all([spec.default_alpha, *spec.alpha_pattern.values()]):
        raise ConfigError(f"{start} needs an alpha above 0.", where="lora_alpha")
