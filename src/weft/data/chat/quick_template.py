"""Renders plain conversations by the compiled template itself: what transformers does around it takes as long again.

Only messages that are nothing but a role and a text go this way, for which transformers' own steps change nothing. The
first of them is rendered both ways; a template for which they differ is left to transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinja2.runtime import Context

Messages = list[dict[str, Any]]


class QuickTemplate:
    """One template, with the special tokens of its tokenizer."""

    def __init__(self, compiled: Any, special_tokens: Mapping[str, Any]) -> None:
        self._compiled = compiled
        self._names = {**compiled.globals, "tools": None, "documents": None, **special_tokens}
        """What the template can read besides; the library would copy it name by name for every conversation."""
        self.is_proven: bool | None = None
        """Whether it renders what transformers does; None: nobody has looked yet."""

    @classmethod
    def of(cls, tokenizer: Any, template: str) -> QuickTemplate | None:
        """The template of a tokenizer that leaves rendering to transformers; None for another one."""
        try:
            from transformers import PreTrainedTokenizerBase
            from transformers.utils.chat_template_utils import _compile_jinja_template
        except ImportError:
            return None
        is_usual = getattr(type(tokenizer), "apply_chat_template", None) is PreTrainedTokenizerBase.apply_chat_template
        return cls(_compile_jinja_template(template), tokenizer.special_tokens_map) if is_usual else None

    def render(self, messages: Messages, *, generation: bool) -> str:
        """The messages as text; raises what the template raises."""
        names = {**self._names, "messages": messages, "add_generation_prompt": generation}
        template = self._compiled
        context = Context(template.environment, names, template.name, template.blocks)
        return "".join(template.root_render_func(context))
