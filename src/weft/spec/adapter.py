"""What an adapter is: its method with its settings, and which modules of the backbone it sits on."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from weft.errors import ConfigError
from weft.spec.eva import EvaSpec
from weft.spec.fields import KnownKeywords, above, at_least, between, refuse_foreign, setting, validate
from weft.spec.own_rows import OwnRows, TokenIds

V = TypeVar("V", int, float)
_FEEDFORWARD = ("down_proj", "fc2", "dense_4h_to_h", "fc_out", "mlp.c_proj")
"""What families call the last linear of a feed-forward block."""
_KEYS_AND_VALUES = ("k_proj", "v_proj", "qkv_proj", "query_key_value", "c_attn")
_WEIGHT_STARTS = ("pissa", "pissa_niter_4", "pissa_niter_16", "olora")
"""Starts of LoRA that are a part of the frozen weight."""
WORKED_OUT_STARTS = (*_WEIGHT_STARTS, "eva", "loftq")
"""Starts of LoRA that follow from the backbone or the data; an adapter's files know nothing of them."""
LORA_KINDS = ("lora", "dora")
"""Methods with LoRA's two matrices, and its settings."""
RANKS = {**dict.fromkeys(LORA_KINDS, "r"), "vera": "vera_rank"}
"""The setting that says an adapter's rank, by method; all others have none."""
AUTO_TARGETS = {
    **dict.fromkeys((*LORA_KINDS, "vera"), "all-linear"),
    "ia3": rf".*\.({'|'.join((*_KEYS_AND_VALUES, *_FEEDFORWARD))})",
    "bottleneck": "all-blocks",
    "diff_pruning": "all-linear",
    "bitfit": "all-linear",
    "prompt_tuning": "all",
    "prefix_tuning": "all",
}
"""The PEFT methods, and what `target_modules: auto` means for each."""
LORA_RATE = 2e-4
LEARNING_RATES = {
    "vera": 5e-3,
    "ia3": 1e-2,
    "bottleneck": 5e-4,
    "diff_pruning": 5e-3,
    "bitfit": 3e-3,
    "prompt_tuning": 3e-2,
    "prefix_tuning": 3e-2,
}
"""Learning rates of jobs that state none, by method; all others have LoRA's. Each is about a tenth of the best one on
the tiny backbone (docs/methods.md), as LoRA's is of LoRA's."""
L0_WEIGHT = 1e-5
VIRTUAL_TOKENS = ("prompt_tuning", "prefix_tuning")
"""Methods that put rows in front of every sample."""


@dataclass(frozen=True)
class AdapterSpec(KnownKeywords):
    """One adapter; the names are PEFT's."""

    method: str = setting("lora", choices=tuple(AUTO_TARGETS))
    """The PEFT method: docs/methods.md."""
    r: int = setting(16, aliases=("lora_r", "lora_rank", "rank"), rule=at_least(1), methods=LORA_KINDS)
    """Rank of the update: each adapted weight gets B·A with A (r, in) and B (out, r)."""
    lora_alpha: float | None = setting(None, aliases=("alpha",), rule=at_least(0), methods=LORA_KINDS)
    """Strength of the update: it is scaled by lora_alpha / r. Default: twice r."""
    lora_dropout: float = setting(
        0.0, aliases=("dropout", "vera_dropout"), rule=between(0, 1), methods=(*LORA_KINDS, "vera")
    )
    """Dropout on the input of the adapter (never on the frozen branch)."""
    target_modules: str | tuple[str, ...] = setting("auto", aliases=("lora_target", "lora_target_modules"))
    """`all-linear`, a list of module names such as [q_proj, v_proj], or one regular expression over module paths;
    blocks as [self_attn, mlp] or `all-blocks`. `auto`: all-linear; for ia3 keys, values and the last linear of every
    MLP; for bottleneck by bottleneck_variant."""
    exclude_modules: str | tuple[str, ...] | None = setting(None)
    """Module names, or one regular expression, to leave out."""
    layers_to_transform: tuple[int, ...] | None = setting(None, aliases=("layers",))
    """Indices of the layers to adapt. Default: all."""
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
    ranks); false: random A and B. pissa, olora: from a decomposition of the weight; costs and is written as twice the
    rank. pissa_niter_N: pissa by N quick iterations. eva: A from the directions in which the job's inputs vary most,
    zero B. loftq: from the error of the quantised weights."""
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

    vera_rank: int = setting(256, rule=at_least(1), methods=("vera",))
    """Rank of VeRA's shared matrices (PEFT's `r`): each module trains this many numbers and one per output."""
    projection_prng_key: int = setting(0, rule=at_least(0), methods=("vera",))
    """Seed of VeRA's shared matrices; the same key gives the same matrices as in PEFT."""
    save_projection: bool = setting(True, methods=("vera",))
    """Write the shared matrices into the adapter's file as well."""
    d_initial: float = setting(0.1, methods=("vera",))
    """Initial value of VeRA's scales of the rank; those of the outputs start at zero."""

    feedforward_modules: str | tuple[str, ...] | None = setting(None, methods=("ia3",))
    """Adapted modules whose inputs are scaled, as names or one regular expression; all others have their outputs
    scaled. Default: the last linear of every MLP."""
    init_ia3_weights: bool = setting(True, methods=("ia3",))
    """true: scales start at 1 and change nothing; false: normal random scales."""

    bottleneck_size: int = setting(
        64, aliases=("adapter_size", "bottleneck_dim"), rule=at_least(1), methods=("bottleneck",)
    )
    """Width of the inner layer, at most the model's."""
    bottleneck_variant: str = setting("houlsby", choices=("houlsby", "pfeiffer"), methods=("bottleneck",))
    """Where `target_modules: auto` puts it: houlsby after every attention and MLP block, pfeiffer after the MLPs."""
    bottleneck_activation: str = setting(
        "silu", aliases=("non_linearity",), choices=("silu", "relu", "gelu", "tanh"), methods=("bottleneck",)
    )
    """Non-linearity of the inner layer."""
    bottleneck_scale: float = setting(1.0, aliases=("scaling",), rule=above(0), methods=("bottleneck",))
    """Factor on the adapter's output before it is added to the block's."""

    density: float = setting(0.005, rule=above(0, 1), methods=("diff_pruning",))
    """Share of every adapted weight that may change: the numbers smallest in size."""
    mask: str = setting("magnitude", choices=("magnitude", "l0"), methods=("diff_pruning",))
    """magnitude: all of that share change; l0: a gate on each opens or closes during training, and only open ones are
    written."""
    l0_weight: float = setting(L0_WEIGHT, aliases=("sparsity_pen",), rule=at_least(0), methods=("diff_pruning",))
    """What an open gate adds to the loss: it stays open where it lowers the loss by more. For `mask: l0`."""
    num_virtual_tokens: int = setting(20, rule=at_least(1), methods=VIRTUAL_TOKENS)
    """Trained rows in front of every sample; they count as tokens, also in max_length."""
    prompt_tuning_init: str = setting("random", choices=("random", "text", "sample_vocab"), methods=("prompt_tuning",))
    """random: normal numbers; text: the embeddings of prompt_tuning_init_text, cut or repeated; sample_vocab: those of
    random tokens."""
    prompt_tuning_init_text: str | None = setting(None, methods=("prompt_tuning",))
    """Text that a prompt starts as."""
    init_prefix_weights: str = setting("random", choices=("random", "zero"), methods=("prefix_tuning",))
    """random: normal numbers; zero: keys and values of zeros."""

    def __post_init__(self) -> None:
        validate(self)
        if self.use_dora and self.method == "lora":
            object.__setattr__(self, "method", "dora")
        if self.method == "dora":
            object.__setattr__(self, "use_dora", False)
        self._check_virtual_tokens()
        if self.method == "diff_pruning" and self.mask != "l0" and self.l0_weight != L0_WEIGHT:
            raise ConfigError(f"is for mask l0; mask is {self.mask}.", where="l0_weight")
        if self.target_modules == "auto":
            object.__setattr__(self, "target_modules", self._auto_targets())
        refuse_foreign(self, self.method)
        for where, pattern in self._patterns():
            check_pattern(pattern, where)
        for name, rank in self.rank_pattern.items():
            if rank < 1:
                raise ConfigError(f"must be at least 1, got {rank}.", where=f"rank_pattern.{name}")
        for name, alpha in self.alpha_pattern.items():
            if alpha < 0:
                raise ConfigError(f"must be at least 0, got {alpha}.", where=f"alpha_pattern.{name}")
        ranks = [self.r, *self.rank_pattern.values()]
        if self.init_lora_weights == "orthogonal" and any(rank % 2 for rank in ranks):
            raise ConfigError("orthogonal needs even ranks.", where="init_lora_weights")
        self._check_worked_out_start()
        if not self.target_modules:
            raise ConfigError("the list is empty; name modules or use all-linear.", where="target_modules")
        OwnRows.of(self.trainable_token_indices, self.modules_to_save)
        self._check_new_tokens()

    def _check_virtual_tokens(self) -> None:
        """ConfigError for what virtual tokens cannot have."""
        if self.method in VIRTUAL_TOKENS:
            given = {"exclude_modules": self.exclude_modules, "layers_to_transform": self.layers_to_transform}
            if self.target_modules not in ("auto", AUTO_TARGETS[self.method]):
                given["target_modules"] = self.target_modules
            for where, value in given.items():
                if value is not None:
                    raise ConfigError(f"is no setting of {self.method}, which sits on no modules.", where=where)
        if (self.prompt_tuning_init == "text") != bool(self.prompt_tuning_init_text):
            found = "needs prompt_tuning_init_text" if self.prompt_tuning_init == "text" else "is not text"
            raise ConfigError(f"{self.prompt_tuning_init} {found}.", where="prompt_tuning_init")

    def _check_new_tokens(self) -> None:
        """ConfigError for what new tokens cannot be."""
        for place, token in enumerate(self.new_tokens):
            if not token.strip():
                raise ConfigError("a token of nothing but white space is none.", where="new_tokens")
            if token in self.new_tokens[:place]:
                raise ConfigError(f"{token!r} is there twice.", where="new_tokens")
        if self.new_tokens and self.modules_to_save:
            raise ConfigError(
                "modules_to_save copies the backbone's rows, among which new tokens have none; keep one of the two.",
                where="new_tokens",
            )

    @property
    def trains_rows(self) -> bool:
        """Whether rows of the embedding or of the output head are its own."""
        return bool(self.own_rows or self.new_tokens)

    @property
    def own_rows(self) -> OwnRows:
        """Rows of the embedding and of the output head that are its own, new tokens' apart."""
        return OwnRows.of(self.trainable_token_indices, self.modules_to_save)

    @property
    def num_leading_rows(self) -> int:
        """Rows in front of every sample."""
        return self.num_virtual_tokens if self.method in VIRTUAL_TOKENS else 0

    def _check_worked_out_start(self) -> None:
        """ConfigError for what a start that follows from the backbone or the data does not go with."""
        start = self.init_lora_weights
        if self.eva_config is not None and start != "eva":
            raise ConfigError("is for init_lora_weights eva.", where="eva_config")
        if start == "eva" and self.new_tokens:
            raise ConfigError(
                "eva looks at the data by the bare backbone, which has no rows for new tokens; keep one of the two.",
                where="init_lora_weights",
            )
        if not self.starts_as_weight and start != "loftq":
            return
        if self.method != "lora":
            raise ConfigError(f"{start} is a start of lora, not of dora.", where="init_lora_weights")
        if self.starts_as_weight and self.lora_dropout:
            raise ConfigError(
                f"{start} starts as a part of the weight, which is never dropped; use 0.", where="lora_dropout"
            )
        if not all([self.default_alpha, *self.alpha_pattern.values()]):
            raise ConfigError(f"{start} needs an alpha above 0.", where="lora_alpha")

    @property
    def starts_as_weight(self) -> bool:
        """Whether it starts as a part of the frozen weight."""
        return self.init_lora_weights in _WEIGHT_STARTS

    @property
    def eva(self) -> EvaSpec | None:
        """How it looks at its job's data before the first step; None if it does not."""
        return (self.eva_config or EvaSpec()) if self.init_lora_weights == "eva" else None

    @property
    def default_learning_rate(self) -> float:
        """The peak learning rate of a job that states none."""
        return LEARNING_RATES.get(self.method, LORA_RATE)

    @property
    def default_alpha(self) -> float:
        """The alpha of modules that no pattern names."""
        return 2.0 * self.r if self.lora_alpha is None else self.lora_alpha

    @property
    def rank(self) -> int | None:
        """The rank of modules that no pattern names, if its method has ranks."""
        found: int | None = getattr(self, RANKS[self.method]) if self.method in RANKS else None
        return found

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

    def is_feedforward(self, module: str) -> bool:
        """Whether IA³ scales the inputs of a module path, not its outputs."""
        named = _FEEDFORWARD if self.feedforward_modules is None else self.feedforward_modules
        if isinstance(named, str):
            return re.fullmatch(named, module) is not None
        return any(module == name or module.endswith(f".{name}") for name in named)

    def _auto_targets(self) -> str:
        """What `target_modules: auto` means here."""
        is_pfeiffer = self.method == "bottleneck" and self.bottleneck_variant == "pfeiffer"
        return r".*\.mlp" if is_pfeiffer else AUTO_TARGETS[self.method]

    def _patterns(self) -> list[tuple[str, str]]:
        patterns = [("rank_pattern", p) for p in self.rank_pattern] + [("alpha_pattern", p) for p in self.alpha_pattern]
        if isinstance(self.target_modules, str):
            patterns.append(("target_modules", self.target_modules))
        if isinstance(self.exclude_modules, str):
            patterns.append(("exclude_modules", self.exclude_modules))
        if isinstance(self.feedforward_modules, str):
            patterns.append(("feedforward_modules", self.feedforward_modules))
        return patterns


def first_match(patterns: Mapping[str, V], module: str, default: V) -> V:
    """PEFT's rule: of the keys that match a module path, the first wins."""
    return next((value for pattern, value in patterns.items() if answers_pattern(module, pattern)), default)


def check_pattern(pattern: str, where: str) -> None:
    """ConfigError if a text is no regular expression."""
    try:
        re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"{pattern!r} is not a regular expression ({error}).", where=where) from None


def answers_pattern(module: str, pattern: str) -> bool:
    """Whether a module path ends, at a dot, with what a key of rank_pattern or its like describes."""
    return re.match(rf"(.*\.)?({pattern})$", module) is not None
