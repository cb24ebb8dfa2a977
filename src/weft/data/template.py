"""Renders a normal form as the text the model will read, and marks which characters are trained.

- A conversation is rendered with the job's chat template, else the tokenizer's. Trained is what the assistant would
  have had to write: everything from the generation prompt to the end of the turn, end-of-turn marker included. The
  borders are found by rendering prefixes of the conversation, because few templates mark them.
- A prompt and its completion become a user and an assistant turn when there is a chat template. Without one they are
  joined as they are, `prompt + completion`, with the tokenizer's BOS in front (if it puts one there by itself) and EOS
  at the end; trained is the completion and EOS. Several turns of a prompt (system, history) are joined by blank lines.
- A text gets BOS and EOS the same way; all of it is trained.
- With `train_on_inputs` all characters are trained.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jinja2

from weft.data.conversation import ChatTurn, Conversation, Text
from weft.errors import ConfigError, DataError

# What a template may raise besides Jinja's own errors: it is a program run on data it was not written for.
TEMPLATE_ERRORS = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError)


@runtime_checkable
class Tokenizer(Protocol):
    """What Weft needs of a tokenizer; every Hugging Face tokenizer has it."""

    @property
    def chat_template(self) -> Any:
        """A Jinja template, named templates, or None."""
        ...

    @property
    def bos_token_id(self) -> Any:
        """The id that starts a text, or None."""
        ...

    @property
    def eos_token_id(self) -> Any:
        """The id that ends a text, or None."""
        ...

    @property
    def name_or_path(self) -> str:
        """The model it belongs to."""
        ...

    @property
    def is_fast(self) -> bool:
        """Whether calling it can return the characters each token came from."""
        ...

    def __len__(self) -> int:
        """Number of tokens it knows."""
        ...

    def __call__(self, text: list[str], **options: Any) -> Mapping[str, Any]:
        """Token ids and offsets of many texts."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool, **options: Any) -> list[int]:
        """Token ids of one text."""
        ...

    def apply_chat_template(self, conversation: list[dict[str, Any]], **options: Any) -> Any:
        """The conversation as text."""
        ...


def check_template(chat_template: str, tokenizer: Tokenizer) -> None:
    """Raises a ConfigError if the text is no chat template, whatever the conversation."""
    # A template may refuse this one, so only what is wrong with the template itself counts.
    with contextlib.suppress(DataError):
        Renderer(tokenizer, chat_template).render_prompt(Conversation((ChatTurn("user", "?"),)), "chat_template")


@dataclass(frozen=True)
class Rendered:
    """The text of one sample and which of its characters are trained."""

    text: str
    spans: tuple[tuple[int, int], ...]
    """Trained characters, as [start, end)."""
    is_bare: bool
    """No template made it: BOS (if the tokenizer adds one) and EOS are still to be put around it."""
    where: str
    weights: tuple[float, ...] = ()
    """What the tokens of each span count in the loss; none: all the same."""

    @property
    def weighted_spans(self) -> list[tuple[tuple[int, int], float]]:
        """The spans, each with what its tokens count."""
        return list(zip(self.spans, self.weights or [1.0] * len(self.spans), strict=True))


@dataclass(frozen=True)
class Renderer:
    """Renders conversations, prompts and texts for one tokenizer and one chat template."""

    tokenizer: Tokenizer
    chat_template: str | None = None
    """Used instead of the tokenizer's."""
    train_on_inputs: bool = False

    def __post_init__(self) -> None:
        if self.chat_template is not None and "{" not in self.chat_template:
            found = self.chat_template if len(self.chat_template) <= 40 else self.chat_template[:37] + "..."
            raise ConfigError(f"{found!r} is not a Jinja template: it has no {{{{ }}}} in it.", where="chat_template")

    @property
    def has_template(self) -> bool:
        """Whether conversations can be rendered."""
        return bool(self._template_text)

    @property
    def ignores_tools(self) -> bool:
        """Whether the template has no place for a list of tools."""
        return "tools" not in self._template_text

    def render(self, form: Conversation | Text, where: str) -> Rendered:
        """The text to train on."""
        if isinstance(form, Text):
            # Blank text would train nothing but the end of a text; corpora use it as a separator.
            text = form.text if form.text.strip() else ""
            return Rendered(text, ((0, len(text)),), bool(text), where)
        if self.has_template:
            return self._render_chat(form, where)
        prompt = self._join(form.turns[:-1], where, form)
        text = prompt + form.turns[-1].content
        start = 0 if self.train_on_inputs else len(prompt)
        return Rendered(text, ((start, len(text)),), True, where)

    def render_prompt(self, form: Conversation | Text, where: str) -> tuple[Rendered, str | None]:
        """The text up to where the model has to go on, and the answer the row has for it, if any."""
        if isinstance(form, Text):
            return Rendered(form.text, (), True, where), None
        turns, reference = form.turns, None
        if len(turns) > 1 and turns[-1].role == "assistant":
            turns, reference = turns[:-1], turns[-1].content or None
        if self.has_template:
            text = self._apply(turns, form, where, generation=True)
            return Rendered(text, (), False, where), reference
        return Rendered(self._join(turns, where, form), (), True, where), reference

    def _render_chat(self, form: Conversation, where: str) -> Rendered:
        turns = form.turns
        full = self._apply(turns, form, where)
        if self.train_on_inputs:
            if any(turn.trained and turn.weight != 1 for turn in turns):
                raise DataError("messages have weights, but train_on_inputs counts all tokens the same.", where=where)
            return Rendered(full, ((0, len(full)),), False, where)
        spans = []
        for i, turn in enumerate(turns):
            if not turn.trained:
                continue
            before = self._apply(turns[:i], form, where, generation=True)
            through = full if i + 1 == len(turns) else self._apply(turns[: i + 1], form, where)
            if not full.startswith(through):
                raise self._borderless("rewrites earlier turns when later ones follow", where)
            if not through.startswith(before):
                raise self._borderless("starts an assistant turn otherwise than its generation prompt does", where)
            spans.append((len(before), len(through)))
        return Rendered(full, tuple(spans), False, where, tuple(turn.weight for turn in turns if turn.trained))

    def _borderless(self, what: str, where: str) -> DataError:
        return DataError(
            f"the chat template {what}, so it does not show which tokens the assistant wrote.",
            where=where,
            hint="Set another chat_template, or train_on_inputs to train on all tokens.",
        )

    def _apply(self, turns: Sequence[ChatTurn], form: Conversation, where: str, generation: bool = False) -> str:
        try:
            text = self.tokenizer.apply_chat_template(
                [self._message(turn) for turn in turns],
                tools=[dict(tool) for tool in form.tools] or None,
                chat_template=self.chat_template,
                add_generation_prompt=generation,
                tokenize=False,
            )
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                f"is not a valid Jinja template: {(error.message or '').rstrip('.')} (line {error.lineno}).",
                where="chat_template",
            ) from None
        except (jinja2.TemplateError, *TEMPLATE_ERRORS) as error:
            said = str(error).rstrip(".")
            raise DataError(f"the chat template refuses this conversation: {said}.", where=where) from None
        assert isinstance(text, str), "a template renders one conversation as one text"
        return text

    def _message(self, turn: ChatTurn) -> dict[str, Any]:
        """The turn for the template; calls go into the text of templates that know no tool_calls."""
        message = turn.message
        if "tool_calls" in message and "tool_calls" not in self._template_text:
            functions = [call["function"] for call in message.pop("tool_calls")]
            calls = json.dumps(functions if len(functions) > 1 else functions[0], ensure_ascii=False)
            message["content"] = "\n".join(part for part in (turn.content, calls) if part)
        return message

    def _join(self, turns: Sequence[ChatTurn], where: str, form: Conversation) -> str:
        """The prompt as plain text, for base models."""
        if form.is_chat:
            model = self.tokenizer.name_or_path or "this model"
            found = f"the row is a chat, but the tokenizer of {model} has no chat template"
            raise DataError(f"{found}.", where=where, hint="Set chat_template to a Jinja template.")
        return "\n\n".join(turn.content for turn in turns)

    @property
    def _template_text(self) -> str:
        template = self.chat_template if self.chat_template is not None else self.tokenizer.chat_template
        # Some tokenizers name several templates and pick one by whether there are tools.
        return "\n".join(template.values()) if isinstance(template, dict) else template or ""
