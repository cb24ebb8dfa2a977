"""The normal forms of a row: a conversation, a text, token ids, or something labelled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias


@dataclass(frozen=True)
class ChatTurn:
    """One message of a conversation."""

    role: str
    """system, user, assistant or tool."""
    content: str
    trained: bool = False
    """True if the turn counts in the loss."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Other fields that the chat template may read, such as tool_calls, tool_call_id or name."""
    weight: float = 1.0
    """Weight of its tokens in the loss, if it is trained."""

    @property
    def message(self) -> dict[str, Any]:
        """The turn as chat templates read it."""
        return {"role": self.role, "content": self.content, **self.extra}


@dataclass(frozen=True)
class Conversation:
    """Turns in order, and the tools the assistant may call."""

    turns: tuple[ChatTurn, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    is_chat: bool = True
    """False for a prompt and its completion, which need no chat template."""


@dataclass(frozen=True)
class Text:
    """Plain text; all of it is trained."""

    text: str


@dataclass(frozen=True)
class Tokens:
    """Token ids made elsewhere."""

    ids: tuple[int, ...]
    supervised: tuple[bool, ...]


@dataclass(frozen=True)
class Passage:
    """A text with a class; nothing is added to it."""

    text: str
    label: int


@dataclass(frozen=True)
class Words:
    """Words with a class each."""

    words: tuple[str, ...]
    labels: tuple[int | None, ...]
    """Class of each word; None for a word that is not trained."""


Form: TypeAlias = Conversation | Text | Tokens | Passage | Words


@dataclass(frozen=True)
class Rendered:
    """The text of one sample and its trained characters."""

    text: str
    spans: tuple[tuple[int, int], ...]
    """Trained characters, as [start, end)."""
    is_bare: bool
    """True if no template made it: BOS (if the tokenizer adds one) and EOS are still to be added."""
    where: str
    weights: tuple[float, ...] = ()
    """Weight of the tokens of each span in the loss; empty if all are 1."""

    @property
    def weighted_spans(self) -> list[tuple[tuple[int, int], float]]:
        return list(zip(self.spans, self.weights or [1.0] * len(self.spans), strict=True))
