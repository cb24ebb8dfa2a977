"""Renders plain conversations by the compiled template itself, in half of transformers' time.

Only messages with nothing but a role and a text are rendered here, for which transformers' other steps change nothing.
The first of them is rendered both ways; a template for which the results differ is left to transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinja2.runtime import Context

Messages = list[dict[str, Any]]


class QuickTemplate:
    """A compiled template with the special tokens of its tokenizer."""

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
