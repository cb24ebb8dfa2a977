"""The settings of LoRA, and those of trained rows of the input embedding and the output head beside it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from weft.errors import ConfigError
from weft.methods.config import MethodConfig
from weft.other_trainers import STARTS_ELSEWHERE
from weft.settings import (
    KnownKeywords,
    above,
    at_least,
    between,
    check_pattern,
    first_match,
    is_expert_path,
    setting,
)

if TYPE_CHECKING:
    from weft.spec.adapter import AdapterSpec

_WEIGHT_STARTS = ("pissa", "pissa_niter_4", "pissa_niter_16", "olora")
"""Starts of LoRA that are a part of the frozen weight."""
WORKED_OUT_STARTS = (*_WEIGHT_STARTS, "eva", "loftq")
"""Starts of LoRA that are computed from the backbone or the data; an adapter's files do not record them."""
LORA_KINDS = ("lora", "dora")
"""Methods that have LoRA's two matrices and settings."""


class LoraConfig(MethodConfig):
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
        _check_experts(spec)
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
    """Cosine similarity to the pass before at which a direction is final; a module is done when all its directions
    are."""
    use_label_mask: bool = setting(True)
    """Read only tokens that count in the loss; false: all."""


@dataclass(frozen=True)
class LoraStrength:
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
        True,
        aliases=("init",),
        choices=(True, False, "gaussian", "orthogonal", *WORKED_OUT_STARTS),
        elsewhere=STARTS_ELSEWHERE,
        methods=LORA_KINDS,
    )
    """true: Kaiming-uniform A, zero B; gaussian: normal A, zero B; orthogonal: random A and B with a zero product (even
    ranks); false: random A and B; the others (docs/methods.md): from the weight, the job's data (eva) or the error of
    the quantised weights (loftq)."""
    eva_config: EvaSpec | None = setting(None, methods=LORA_KINDS)
    """How `eva` reads the data."""
    experts: str = setting("none", choices=("none", "full", "separate", "shared"), methods=("lora",))
    """Routed experts of a mixture (docs/methods.md). none: frozen; full: A and B of each expert, one for gate and up
    together; separate: gate and up apart; shared: one A of gate, one of up and one B of down for all experts."""
    expert_r: int | None = setting(None, rule=at_least(1), methods=("lora",))
    """Rank on experts; r divided by the experts of a token is usual. Default: r."""
    expert_alpha: float | None = setting(None, rule=at_least(0), methods=("lora",))
    """Alpha on experts. Default: lora_alpha times expert_r / r, which keeps the scale."""
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
    def experts_in_words(self) -> str:
        """How it trains routed experts; empty if they are frozen."""
        return "" if self.experts == "none" else f"{self.experts}, rank {self.rank_of_experts}"

    @property
    def trains_rows(self) -> bool:
        return bool(self.own_rows or self.new_tokens)

    @property
    def own_rows(self) -> OwnRows:
        """Trained rows of the embedding and of the output head, except those of new tokens."""
        return OwnRows.of(self.trainable_token_indices, self.modules_to_save)

    @property
    def starts_as_weight(self) -> bool:
        return self.init_lora_weights in _WEIGHT_STARTS

    @property
    def eva(self) -> EvaSpec | None:
        """Settings of the pass over the job's data before the first step; None if there is none."""
        return (self.eva_config or EvaSpec()) if self.init_lora_weights == "eva" else None

    @property
    def default_alpha(self) -> float:
        """The alpha of modules that match no pattern."""
        return 2.0 * self.r if self.lora_alpha is None else self.lora_alpha

    @property
    def rank_of_experts(self) -> int:
        """The rank of experts that match no pattern."""
        return self.r if self.expert_r is None else self.expert_r

    @property
    def alpha_of_experts(self) -> float:
        """The alpha of experts that match no pattern."""
        kept = self.default_alpha * self.rank_of_experts / self.r
        return kept if self.expert_alpha is None else self.expert_alpha

    def rank_for(self, module: str) -> int:
        default = self.rank_of_experts if is_expert_path(module) else self.r
        return first_match(self.rank_pattern, module, default)

    def alpha_for(self, module: str) -> float:
        default = self.alpha_of_experts if is_expert_path(module) else self.default_alpha
        return first_match(self.alpha_pattern, module, default)

    def scale_for(self, module: str) -> float:
        """Factor on the update of one module."""
        rank = self.rank_for(module)
        return self.alpha_for(module) / (math.sqrt(rank) if self.use_rslora else rank)


def _check_new_tokens(spec: AdapterSpec) -> None:
    for index, token in enumerate(spec.new_tokens):
        if not token.strip():
            raise ConfigError(f"got {token!r}; a token needs characters other than white space.", where="new_tokens")
        if token in spec.new_tokens[:index]:
            raise ConfigError(f"{token!r} is there twice.", where="new_tokens")
    if spec.new_tokens and spec.modules_to_save:
        raise ConfigError(
            "modules_to_save copies the backbone's rows, among which new tokens have none; keep one of the two.",
            where="new_tokens",
        )


def _check_experts(spec: AdapterSpec) -> None:
    if spec.experts == "none":
        for name in ("expert_r", "expert_alpha"):
            if getattr(spec, name) is not None:
                raise ConfigError(
                    "is for routed experts, which stay frozen; set experts to full, separate or shared.", where=name
                )
        return
    if spec.lora_dropout:
        raise ConfigError(
            "experts have no dropout, neither here nor in PEFT; use 0, or experts: none.",
            where="lora_dropout",
        )
    if spec.init_lora_weights not in (True, False, "gaussian"):
        raise ConfigError(
            f"{spec.init_lora_weights} is not possible on experts; use true or gaussian.", where="init_lora_weights"
        )


def _check_worked_out_start(spec: AdapterSpec) -> None:
    """ConfigError for settings that exclude a start from the backbone or the data."""
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


EMBEDDINGS = ("embed_tokens", "embed_in", "wte", "word_embeddings")
"""Names of the input embedding in the families."""
OUTPUT_HEADS = ("lm_head", "embed_out")
"""Names of the output head in the families."""
TokenIds = tuple[int, ...]


@dataclass(frozen=True)
class OwnRows:
    """Rows of the embedding and the output head that an adapter trains."""

    inputs: TokenIds | None = None
    """Tokens whose rows of the input embedding are trained; rows of a tied head are the same rows."""
    outputs: TokenIds | None = None
    """Tokens whose rows of an untied output head are trained."""
    all_inputs: bool = False
    """Whether the whole input embedding is trained."""
    all_outputs: bool = False
    """Whether the whole output head is trained."""

    def __bool__(self) -> bool:
        return self != OwnRows()

    @classmethod
    def of(cls, indices: TokenIds | Mapping[str, TokenIds] | None, modules_to_save: tuple[str, ...] | None) -> OwnRows:
        """The rows of two settings; ConfigError if no adapter can have them."""
        if isinstance(indices, tuple):
            by_module: Mapping[str, TokenIds] = {EMBEDDINGS[0]: indices}
        else:
            by_module = indices or {}
        found = cls()
        for name, ids in by_module.items():
            where = "trainable_token_indices" + ("" if isinstance(indices, tuple) else f".{name}")
            _check_ids(ids, where)
            found = found._with(name, where, ids)
        for name in modules_to_save or ():
            found = found._with(name, "modules_to_save", None)
        return found

    def count(self, vocabulary: int) -> int:
        """Number of rows on a backbone with this vocabulary."""
        some = sum(len(ids) for ids in (self.inputs, self.outputs) if ids is not None)
        return some + vocabulary * (self.all_inputs + self.all_outputs)

    def _with(self, name: str, where: str, ids: TokenIds | None) -> OwnRows:
        """Adds rows of a module; without ids all of them."""
        is_output = is_output_head(name)
        if not is_output and name.rpartition(".")[2] not in EMBEDDINGS:
            raise ConfigError(
                f"got {name!r}; accepted are embed_tokens, the input embedding, and lm_head, the output head.",
                where=where,
            )
        named, is_whole = (self.outputs, self.all_outputs) if is_output else (self.inputs, self.all_inputs)
        if named is not None or is_whole:
            part = "output head" if is_output else "input embedding"
            raise ConfigError(f"{name} is the {part}, whose rows are named already; keep one.", where=where)
        if is_output:
            return OwnRows(self.inputs, ids, self.all_inputs, ids is None)
        return OwnRows(ids, self.outputs, ids is None, self.all_outputs)


def is_output_head(name: str) -> bool:
    return name.rpartition(".")[2] in OUTPUT_HEADS


def _check_ids(ids: TokenIds, where: str) -> None:
    if not ids or min(ids) < 0:
        found = "the list is empty" if not ids else f"got {min(ids)}"
        raise ConfigError(f"{found}; expected ids of tokens, from 0 up.", where=where)
    if len(set(ids)) < len(ids):
        twice = next(id for index, id in enumerate(ids) if id in ids[:index])
        raise ConfigError(f"token {twice} is there twice.", where=where)
