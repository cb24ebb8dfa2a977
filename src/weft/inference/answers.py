"""How well adapters answer: greedy answers compared with the data's, many adapters in one batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from weft.backbone.backbone import Backbone
from weft.data.prompts import Prompt
from weft.errors import DataError
from weft.inference.generate import Decoding, Request, generate


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
    flat = [(name, slot, i, prompt) for name, (slot, prompts) in asked.items() for i, prompt in enumerate(prompts)]
    for _, _, _, prompt in flat:
        if len(prompt.tokens) >= backbone.max_positions:
            raise DataError(
                f"the prompt has {len(prompt.tokens):,} tokens; the backbone has {backbone.max_positions:,} positions.",
                where=prompt.where,
            )
    written = generate(backbone, [Request(prompt.tokens.tolist(), slot, i) for _, slot, i, prompt in flat], decoding)
    results: dict[str, list[Answer]] = {name: [] for name in asked}
    for (name, slot, _, prompt), tokens in zip(flat, written, strict=True):
        text = backbone.tokenizer_of(slot).decode(tokens, skip_special_tokens=True)
        results[name].append(Answer(prompt, str(text)))
    return results


def exact_match(given: Sequence[Answer]) -> float:
    """Share of the answers that are exact."""
    return sum(answer.is_exact for answer in given) / len(given)
