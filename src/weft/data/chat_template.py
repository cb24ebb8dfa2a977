"""A chat template as a function from turns to text, its fixed clock, and the tokenizer interface that applies it.

Plain conversations are rendered by the compiled template itself, in half of transformers' time.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jinja2
from jinja2.runtime import Context

from weft.data.chats import ChatTurn, Conversation
from weft.errors import ConfigError, DataError

# What a template may raise besides Jinja's own errors: it is a program run on data it was not written for.
TEMPLATE_ERRORS = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError)
GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


@runtime_checkable
class Tokenizer(Protocol):
    @property
    def chat_template(self) -> Any: ...

    @property
    def bos_token_id(self) -> Any: ...

    @property
    def eos_token_id(self) -> Any: ...

    @property
    def special_tokens_map(self) -> Mapping[str, Any]: ...

    @property
    def name_or_path(self) -> str: ...

    @property
    def is_fast(self) -> bool:
        """True if a call can return the characters of each token."""
        ...

    def __len__(self) -> int: ...

    def __call__(self, text: list[str], **options: Any) -> Mapping[str, Any]: ...

    def encode(self, text: str, *, add_special_tokens: bool, **options: Any) -> list[int]: ...

    def get_chat_template(self, chat_template: str | None = None, tools: list[dict[str, Any]] | None = None) -> str:
        """The template for conversations with these tools: the given one, else the tokenizer's."""
        ...

    def apply_chat_template(self, conversation: list[dict[str, Any]], **options: Any) -> Any: ...


@dataclass(frozen=True)
class ChatTemplate:
    tokenizer: Tokenizer
    own: str | None = None
    clock: datetime.datetime | None = None
    """Time that the template reads; None for the current time."""

    def __post_init__(self) -> None:
        if self.own is not None and "{" not in self.own:
            problem = self.own if len(self.own) <= 40 else self.own[:37] + "..."
            raise ConfigError(f"{problem!r} is not a Jinja template: it has no {{{{ }}}} in it.", where="chat_template")

    @property
    def text(self) -> str:
        """The template, or all of them joined where the tokenizer has a separate one for tools."""
        template = self.own if self.own is not None else self.tokenizer.chat_template
        return "\n".join(template.values()) if isinstance(template, dict) else template or ""

    @functools.cached_property
    def ends_text(self) -> str:
        return str(self.tokenizer.special_tokens_map.get("eos_token") or "")

    def apply(self, turns: Sequence[ChatTurn], form: Conversation, where: str, *, generation: bool = False) -> str:
        """The turns as text, with the tools of their conversation; `generation` adds the prompt of the next answer. A
        conversation that the template refuses is a DataError at `where`."""
        with self._refusals(where):
            messages = [self._message(turn) for turn in turns]
            is_plain = bool(turns) and not form.tools and not any(turn.extra for turn in turns)
            quick = self._quick if is_plain else None
            if quick is not None and quick.is_proven:
                return quick.render(messages, generation=generation)
            text = self.tokenizer.apply_chat_template(
                messages,
                tools=_tools(form),
                chat_template=self._chosen(form),
                add_generation_prompt=generation,
                tokenize=False,
            )
            if quick is not None and quick.is_proven is None:
                quick.is_proven = quick.render(messages, generation=generation) == text
        assert isinstance(text, str), "a template renders one conversation as one text"
        return text

    @functools.cached_property
    def _quick(self) -> QuickTemplate | None:
        return QuickTemplate.of(self.tokenizer, self._chosen(Conversation(())))

    @functools.cached_property
    def _marks_answers(self) -> bool:
        return GENERATION_TAG.search(self.text) is not None

    @functools.cached_property
    def prompt_opening(self) -> str:
        """The end of the generation prompt that a finished turn lacks, such as `<think>`; mostly empty."""
        question, answer = ChatTurn("user", "Any question?"), ChatTurn("assistant", "An answer.")
        form = Conversation((question, answer))
        try:
            prompt = self.apply((question,), form, "", generation=True)
            text = self.apply((question, answer), form, "")
        except DataError:
            return ""
        opening = "" if text.startswith(prompt) else prompt[agreement(prompt, text) :]
        # A template that shows an answered question in another way has no such end.
        return "" if question.content in opening else opening

    def apply_marked(self, form: Conversation, where: str) -> tuple[str, list[tuple[int, int]]] | None:
        """The conversation as text, with the characters that the template's `{% generation %}` blocks wrote; None
        without such blocks."""
        if not self._marks_answers:
            return None
        from transformers.utils.chat_template_utils import render_jinja_template

        with self._refusals(where):
            # Annotated as a text, but it is the texts and their blocks.
            rendered: Any = render_jinja_template(
                conversations=[[self._message(turn) for turn in form.turns]],
                tools=[dict(tool) for tool in form.tools] or None,
                chat_template=self._chosen(form),
                return_assistant_tokens_mask=True,
                **self.tokenizer.special_tokens_map,
            )
        (text,), (blocks,) = rendered
        return text, blocks

    def _chosen(self, form: Conversation) -> str:
        template = self.tokenizer.get_chat_template(self.own, _tools(form))
        return template if self.clock is None else freeze_clock(template, self.clock)

    @contextlib.contextmanager
    def _refusals(self, where: str) -> Iterator[None]:
        try:
            yield
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                f"is not a valid Jinja template: {(error.message or '').rstrip('.')} (line {error.lineno}).",
                where="chat_template",
            ) from None
        except (jinja2.TemplateError, *TEMPLATE_ERRORS) as error:
            message = str(error).rstrip(".")
            raise DataError(f"the chat template refuses this conversation: {message}.", where=where) from None

    def _message(self, turn: ChatTurn) -> dict[str, Any]:
        """The turn for the template; calls go into the text if the template does not support tool_calls."""
        message = turn.message
        if "tool_calls" in message and "tool_calls" not in self.text:
            functions = [call["function"] for call in message.pop("tool_calls")]
            calls = json.dumps(functions if len(functions) > 1 else functions[0], ensure_ascii=False)
            message["content"] = "\n".join(part for part in (turn.content, calls) if part)
        return message


def agreement(one: str, other: str) -> int:
    """Number of first characters that two texts share, without the beginning of a tag that they do not share whole."""
    alike = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    opened = one.rfind("<", 0, alike)
    return opened if opened > one.rfind(">", 0, alike) else alike


def template_digest(tokenizer: Tokenizer) -> str:
    """SHA-256 of a tokenizer's chat template, to detect changes."""
    return hashlib.sha256(ChatTemplate(tokenizer).text.encode()).hexdigest()


def _tools(form: Conversation) -> list[dict[str, Any]] | None:
    return [dict(tool) for tool in form.tools] or None


FUNCTION = "strftime_now"
DIRECTIVES = "aAbBcCdDeFgGhHIjmMnpRStTuUVwWxXyYzZ"
_PERCENT = "\ue0b2"
"""Replaces a literal per cent sign while directives are replaced."""


def freeze_clock(template: str, at: datetime.datetime) -> str:
    """The template with the fixed time `at`; a template that does not read the time is returned unchanged."""
    if FUNCTION not in template:
        return template
    replaced = [("%%", _PERCENT)]
    replaced += [(f"%{flag}{letter}", at.strftime(f"%{flag}{letter}")) for letter in DIRECTIVES for flag in ("", "-")]
    replaced += [(_PERCENT, "%")]
    filters = "".join(f" | replace({json.dumps(result)}, {json.dumps(text)})" for result, text in replaced)
    # A macro of the function's name goes before the function. The newline, which Jinja leaves out after a block, keeps
    # the template at the start of a line.
    return f"{{% macro {FUNCTION}(format) %}}{{{{ format{filters} }}}}{{% endmacro %}}\n{template}"


Messages = list[dict[str, Any]]


class QuickTemplate:
    def __init__(self, compiled: Any, special_tokens: Mapping[str, Any]) -> None:
        self._compiled = compiled
        self._names = {**compiled.globals, "tools": None, "documents": None, **special_tokens}
        """Variables of the template; the library would copy them name by name for every conversation."""
        self.is_proven: bool | None = None
        """True if it renders the same as transformers; None before the first comparison."""

    @classmethod
    def of(cls, tokenizer: Any, template: str) -> QuickTemplate | None:
        """The template of a tokenizer that leaves rendering to transformers; None for another tokenizer."""
        try:
            from transformers import PreTrainedTokenizerBase
            from transformers.utils.chat_template_utils import _compile_jinja_template
        except ImportError:
            return None
        is_usual = getattr(type(tokenizer), "apply_chat_template", None) is PreTrainedTokenizerBase.apply_chat_template
        return cls(_compile_jinja_template(template), tokenizer.special_tokens_map) if is_usual else None

    def render(self, messages: Messages, *, generation: bool) -> str:
        names = {**self._names, "messages": messages, "add_generation_prompt": generation}
        template = self._compiled
        context = Context(template.environment, names, template.name, template.blocks)
        return "".join(template.root_render_func(context))
