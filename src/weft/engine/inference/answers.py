"""How well adapters answer: greedy answers compared with the data's, many adapters in one batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.data.prompts import Prompt
from weft.engine.inference.generate import Decoding, Request, generate
from weft.errors import DataError
from weft.model.backbone import Backbone


@dataclass(frozen=True)
class Answer:
    """What a model wrote for one prompt."""

    prompt: Prompt
    text: str

    @property
    def is_exact(self) -> bool:
        """Equal to the data's answer, but for white space around it."""
        return self.prompt.reference is not None and self.text.strip() == self.prompt.reference.strip()


def answers(
    backbone: Backbone, asked: Mapping[str, tuple[int | None, Sequence[Prompt]]], decoding: Decoding
) -> dict[str, list[Answer]]:
    """Per name: the answers of a slot's adapter (None: the bare backbone) to its prompts, all decoded together.

    A prompt's place among its own name's prompts is its seed, so nobody's draws depend on who else is asked.
    """
    refuse_long([prompt for _, prompts in asked.values() for prompt in prompts], backbone.max_positions)
    requests = [request for slot, prompts in asked.values() for request in requests_of(prompts, slot)]
    written = iter(generate(backbone, requests, decoding))
    return {
        name: [worded(prompt, next(written), backbone.tokenizer_of(slot)) for prompt in prompts]
        for name, (slot, prompts) in asked.items()
    }


def refuse_long(prompts: Sequence[Prompt], longest: int) -> None:
    """DataError for a prompt that leaves no position for an answer."""
    for prompt in prompts:
        if len(prompt.tokens) >= longest:
            raise DataError(
                f"the prompt has {len(prompt.tokens):,} tokens; the backbone has {longest:,} positions.",
                where=prompt.where,
            )


def requests_of(prompts: Sequence[Prompt], slot: int | None) -> list[Request]:
    """What a slot's adapter is asked."""
    return [Request(prompt.tokens.tolist(), slot, place) for place, prompt in enumerate(prompts)]


def worded(prompt: Prompt, tokens: Sequence[int], tokenizer: Any) -> Answer:
    """The answer that was written in tokens."""
    return Answer(prompt, str(tokenizer.decode(tokens, skip_special_tokens=True)))


def exact_match(given: Sequence[Answer]) -> float:
    """Share of the answers that are exact."""
    return sum(answer.is_exact for answer in given) / len(given)
