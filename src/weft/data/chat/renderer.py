"""Renders a normal form as the text that the model reads, and marks the trained characters.

- A conversation is rendered with the job's chat template, else the tokenizer's. The assistant's answers are trained
  (`chat/answers.py`).
- A prompt and its completion become a user and an assistant turn when there is a chat template. Without one they are
  joined unchanged, `prompt + completion`, with the tokenizer's BOS in front (if it adds one itself) and EOS at the end;
  the completion and EOS are trained. Several turns of a prompt (system, history) are joined by blank lines.
- A text gets BOS and EOS the same way; all of it is trained.
- With `train_on_inputs` all characters are trained.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from weft.data.chat.answers import train_answers
from weft.data.chat.chat_template import ChatTemplate, Tokenizer
from weft.data.conversation import ChatTurn, Conversation, Rendered, Text
from weft.errors import DataError


def check_template(chat_template: str, tokenizer: Tokenizer) -> None:
    """Raises a ConfigError if the text is no chat template, whatever the conversation."""
    turn = ChatTurn("user", "?")
    # A template may refuse this one, so only what is wrong with the template itself counts.
    with contextlib.suppress(DataError):
        ChatTemplate(tokenizer, chat_template).apply((turn,), Conversation((turn,)), "chat_template", generation=True)


@dataclass(frozen=True)
class Renderer:
    """Renders rows for one tokenizer and one chat template."""

    template: ChatTemplate
    train_on_inputs: bool = False
    mask_history: bool = False
    """True to train only the last answer of a chat."""

    @property
    def tokenizer(self) -> Tokenizer:
        return self.template.tokenizer

    @property
    def has_template(self) -> bool:
        return bool(self.template.text)

    @property
    def ignores_tools(self) -> bool:
        """True if the template does not render a list of tools."""
        return "tools" not in self.template.text

    def render(self, form: Conversation | Text, where: str) -> tuple[Rendered, ...]:
        """The texts to train on: one, except for chats whose template changes earlier answers later on."""
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
        """The text of the prompt, and the answer in the row, if any."""
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
            problem = f"the row is a chat, but the tokenizer of {model} has no chat template"
            raise DataError(f"{problem}.", where=where, hint="Set chat_template to a Jinja template.")
        return "\n\n".join(turn.content for turn in turns)


def _last_answer(form: Conversation) -> Conversation:
    last = max((i for i, turn in enumerate(form.turns) if turn.trained), default=-1)
    turns = tuple(replace(turn, trained=turn.trained and i == last) for i, turn in enumerate(form.turns))
    return replace(form, turns=turns)
