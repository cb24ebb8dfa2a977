"""The position of every turn's content in the rendered text of a chat.

A chat is rendered once with a mark at both ends of each content. The marks are trusted only if the text without them
equals the text rendered without them.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from dataclasses import dataclass, replace

from weft.data.conversation import ChatTurn, Conversation

# Private-use characters: no template looks for them, and data that has them is rendered turn by turn.
OPEN, CLOSE = "\ue0b0", "\ue0b1"
MARK = re.compile(f"{OPEN}([0-9]+)([+-]){CLOSE}")


@dataclass(frozen=True)
class Landmarks:
    """The positions of contents in a chat's text."""

    text: str
    contents: tuple[tuple[int, int] | None, ...]
    """Span [start, end) of every turn; None for content that is blank, missing or repeated."""
    roles: tuple[str, ...]

    @staticmethod
    def marked(form: Conversation) -> tuple[ChatTurn, ...]:
        """The turns with marks in their contents, inside of blanks at their ends, which templates strip."""
        return tuple(_marked(turn, i) for i, turn in enumerate(form.turns))

    @classmethod
    def of(cls, form: Conversation, marked_text: str, text: str) -> Landmarks | None:
        """The landmarks of a chat; None where the marks changed the rest of the text."""
        pieces = MARK.split(marked_text)
        if OPEN in text or "".join(pieces[::3]) != text:
            return None
        positions: dict[tuple[int, str], list[int]] = {}
        at = 0
        for piece, turn, side in zip(pieces[0::3], pieces[1::3], pieces[2::3], strict=False):
            at += len(piece)
            positions.setdefault((int(turn), side), []).append(at)
        contents = []
        for i in range(len(form.turns)):
            starts, ends = positions.get((i, "+"), []), positions.get((i, "-"), [])
            contents.append((starts[0], ends[0]) if len(starts) == len(ends) == 1 else None)
        return cls(text, tuple(contents), tuple(turn.role for turn in form.turns))

    def surroundings(self, turn: int) -> Hashable:
        """The text before and after a turn's content, up to the contents of its neighbours.

        A turn with unknown surroundings equals no other turn.
        """
        own, before = self.contents[turn], self.contents[turn - 1]
        is_last = turn + 1 == len(self.contents)
        after = None if is_last else self.contents[turn + 1]
        if own is None or before is None or (after is None and not is_last):
            return turn
        behind = self.text[own[1] : after[0]] if after is not None else self.text[own[1] :]
        return self.roles[turn - 1], self.text[before[1] : own[0]], behind, "" if is_last else self.roles[turn + 1]

    def offsets(self, turn: int, start: int, end: int) -> tuple[int, int]:
        """A span as distances from the ends of a turn's content."""
        first, last = self.contents[turn] or (0, 0)
        return start - first, end - last

    def span(self, turn: int, from_start: int, from_end: int) -> tuple[int, int]:
        """The span at these distances."""
        first, last = self.contents[turn] or (0, 0)
        return first + from_start, last + from_end


def _marked(turn: ChatTurn, i: int) -> ChatTurn:
    inner = turn.content.strip()
    if not inner:
        return turn
    lead, _, tail = turn.content.partition(inner)
    return replace(turn, content=f"{lead}{OPEN}{i}+{CLOSE}{inner}{OPEN}{i}-{CLOSE}{tail}")
