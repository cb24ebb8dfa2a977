"""Renders a normal form as the text the model will read, and marks which characters are trained.

- A conversation is rendered with the job's chat template, else the tokenizer's. Trained is what the assistant would
  have had to write (`chat/answers.py`).
- A prompt and its completion become a user and an assistant turn when there is a chat template. Without one they are
  joined as they are, `prompt + completion`, with the tokenizer's BOS in front (if it puts one there by itself) and EOS
  at the end; trained is the completion and EOS. Several turns of a prompt (system, history) are joined by blank lines.
- A text gets BOS and EOS the same way; all of it is trained.
- With `train_on_inputs` all characters are trained.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from weft.data.chat.answers import train_answers
from weft.data.chat.chat_template import ChatTemplate, Tokenizer
from weft.data.chat.rendered import Rendered
from weft.data.conversation import ChatTurn, Conversation, Text
from weft.errors import DataError


def check_template(chat_template: str, tokenizer: Tokenizer) -> None:
    """Raises a ConfigError if the text is no chat template, whatever the conversation."""
    turn = ChatTurn("user", "?")
    # A template may refuse this one, so only what is wrong with the template itself counts.
    with contextlib.suppress(DataError):
        ChatTemplate(tokenizer, chat_template).apply((turn,), Conversation((turn,)), "chat_template", generation=True)


@dataclass(frozen=True)
class Renderer:
    """Renders conversations, prompts and texts for one tokenizer and one chat template."""

    template: ChatTemplate
    train_on_inputs: bool = False
    mask_history: bool = False
    """Train only the last of a chat's answers."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the template belongs to."""
        return self.template.tokenizer

    @property
    def has_template(self) -> bool:
        """Whether conversations can be rendered."""
        return bool(self.template.text)

    @property
    def ignores_tools(self) -> bool:
        """Whether the template has no place for a list of tools."""
        return "tools" not in self.template.text

    def render(self, form: Conversation | Text, where: str) -> tuple[Rendered, ...]:
        """The texts to train on: one, but for chats whose template shows earlier answers otherwise later on."""
        if isinstance(form, Text):
            # Blank text would train nothing but the end of a text; corpora use it as a separator.
            text = form.text if form.text.strip() else ""
            return (Rendered(text, ((0, len(text)),), bool(text), where),)
        if self.has_template:
            return self._render_chat(form, where)
        prompt = self._join(form.turns[:-1], where, form)
        text = prompt + form.turns[-1].content
        start = 0 if self.train_on_inputs else len(prompt)
        return (Rendered(text, ((start, len(text)),), True, where),)

    def render_prompt(self, form: Conversation | Text, where: str) -> tuple[Rendered, str | None]:
        """The text up to where the model has to go on, and the answer the row has for it, if any."""
        if isinstance(form, Text):
            return Rendered(form.text, (), True, where), None
        turns, reference = form.turns, None
        if len(turns) > 1 and turns[-1].role == "assistant":
            turns, reference = turns[:-1], turns[-1].content or None
        if self.has_template:
            text = self.template.apply(turns, form, where, generation=True)
            return Rendered(text, (), False, where), reference
        return Rendered(self._join(turns, where, form), (), True, where), reference

    def _render_chat(self, form: Conversation, where: str) -> tuple[Rendered, ...]:
        if not self.train_on_inputs:
            return train_answers(_last_answer(form) if self.mask_history else form, self.template, where)
        if any(turn.trained and turn.weight != 1 for turn in form.turns):
            raise DataError("messages have weights, but train_on_inputs counts all tokens the same.", where=where)
        full = self.template.apply(form.turns, form, where)
        return (Rendered(full, ((0, len(full)),), False, where),)

    def _join(self, turns: Sequence[ChatTurn], where: str, form: Conversation) -> str:
        """The prompt as plain text, for base models."""
        if form.is_chat:
            model = self.tokenizer.name_or_path or "this model"
            found = f"the row is a chat, but the tokenizer of {model} has no chat template"
            raise DataError(f"{found}.", where=where, hint="Set chat_template to a Jinja template.")
        return "\n\n".join(turn.content for turn in turns)


def _last_answer(form: Conversation) -> Conversation:
    """The conversation with all but its last trained turn as context."""
    last = max((i for i, turn in enumerate(form.turns) if turn.trained), default=-1)
    turns = tuple(replace(turn, trained=turn.trained and i == last) for i, turn in enumerate(form.turns))
    return replace(form, turns=turns)
