"""How the tokens of one sequence are chosen."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from weft.errors import ConfigError
from weft.settings import Rule, above, at_least, between

COLDEST = 0.001
"""Lowest temperature that is not 0; logits divided by a lower one leave the range of float32."""
MOST_LOGPROBS = 20
"""The most tokens whose log-probabilities are reported at one position."""
MOST_BIASES = 1024
LARGEST_BIAS = 100.0
MOST_ANSWERS = 128
"""The most answers to one prompt."""
MOST_STOPS = 16
MOST_NEW_TOKENS = 10**6
"""Beyond what any model has positions for; an answer ends at the last of the model's own."""

_RULES = {
    "temperature": Rule(f"0 or at least {COLDEST}", lambda v: v == 0 or COLDEST <= v < math.inf),
    "top_p": above(0, 1),
    "top_k": at_least(0, 2**31 - 1),
    "min_p": at_least(0, 1),
    "repetition_penalty": above(0, 100),
    "presence_penalty": at_least(-2, 2),
    "frequency_penalty": at_least(-2, 2),
    "seed": between(0, 2**32),
    "logprobs": at_least(0, MOST_LOGPROBS),
}


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Settings of one sequence. A wrong value is a ConfigError whose `where` is the name of the field.

    They apply in this order: bias, penalties, temperature, min_p, top_k, top_p. Equal tokens rank by their ids.
    """

    temperature: float = 0.0
    """Temperature; 0 takes the most likely token."""
    top_p: float = 1.0
    """Probability of the smallest set of likeliest tokens to draw from."""
    top_k: int = 0
    """Number of likeliest tokens to draw from; 0 is all."""
    min_p: float = 0.0
    """Least probability of a token to draw, as a share of the likeliest one's."""
    repetition_penalty: float = 1.0
    """Factor of positive logits' divisor and of negative logits, for tokens of the prompt and the answer."""
    presence_penalty: float = 0.0
    """Number taken from the logits of tokens that the answer has."""
    frequency_penalty: float = 0.0
    """Number taken from a token's logit for each time that the answer has it."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Number added to the logit of each of these tokens."""
    seed: int = 0
    logprobs: int | None = None
    """Number of likeliest tokens whose log-probabilities come with those of the answer; None is no log-probabilities at
    all."""

    def __post_init__(self) -> None:
        for name, rule in _RULES.items():
            value = getattr(self, name)
            if value is not None and (not rule.test(value) or rule.broken_by(value)):
                shown = f"{value:g}" if isinstance(value, float) else value
                raise ConfigError(f"must be {rule.text}, got {shown}.", where=name)
        if len(self.logit_bias) > MOST_BIASES:
            raise ConfigError(f"has {len(self.logit_bias):,} tokens; use at most {MOST_BIASES:,}.", where="logit_bias")
        for token, bias in self.logit_bias.items():
            if token < 0 or not -LARGEST_BIAS <= bias <= LARGEST_BIAS:
                raise ConfigError(
                    f"must be -{LARGEST_BIAS:g} to {LARGEST_BIAS:g} for token ids, got {bias:g} for {token}.",
                    where="logit_bias",
                )

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def is_ranked(self) -> bool:
        """True if it draws from a number of likeliest tokens."""
        return not self.is_greedy and (self.top_k > 0 or self.top_p < 1)

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


@dataclass(frozen=True)
class Decoding(Sampling):
    """How answers are written: how each token is chosen, and when an answer ends."""

    max_new_tokens: int = 256
    n: int = field(default=1, kw_only=True)
    """Number of answers to each prompt."""
    stop: tuple[str, ...] = field(default=(), kw_only=True)
    """Texts that end an answer, which ends before them."""
    stop_token_ids: tuple[int, ...] = field(default=(), kw_only=True)
    """Tokens that end an answer, besides the model's own."""
    prompt_logprobs: int | None = field(default=None, kw_only=True)
    """As `logprobs`, for the tokens of the prompt."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least, most in (
            ("max_new_tokens", 1, MOST_NEW_TOKENS),
            ("n", 1, MOST_ANSWERS),
            ("prompt_logprobs", 0, MOST_LOGPROBS),
        ):
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise ConfigError(f"must be at least {least} and at most {most:,}, got {value:,}.", where=name)
        for name in ("stop", "stop_token_ids"):
            if len(getattr(self, name)) > MOST_STOPS:
                raise ConfigError(f"has {len(getattr(self, name))} values; use at most {MOST_STOPS}.", where=name)
        if "" in self.stop:
            raise ConfigError("is empty; write the text that ends an answer.", where="stop")
