"""Prompts to generate from: the same rows and rendering as training, up to where the model has to write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from weft.data.chat.chat_template import ChatTemplate, Tokenizer
from weft.data.chat.renderer import Renderer
from weft.data.chats import message_turns
from weft.data.conversation import ChatTurn, Conversation, Form, Text
from weft.data.formats import convert_rows
from weft.data.rows.find import read_rows
from weft.data.tokens.tokenise import tokenise_prompt
from weft.errors import DataError


@dataclass(frozen=True, eq=False)
class Prompt:
    """Token ids to continue, and the answer in the data."""

    tokens: npt.NDArray[np.int32]
    """Rendered prompt, generation prompt included."""
    text: str
    reference: str | None
    """Last assistant turn or completion; None if the row has none."""
    where: str
    """Origin, e.g. `test.jsonl line 3`."""


def load_prompts(
    source: str,
    tokenizer: Tokenizer,
    *,
    chat_template: str | None = None,
    base_dir: Path,
) -> list[Prompt]:
    """One prompt per row of a file or Hub data set; rows need no answer here."""
    renderer = Renderer(ChatTemplate(tokenizer, chat_template))
    rows = read_rows(source, base_dir)
    _, forms = convert_rows(rows, "auto", need_answer=False)
    return [_prompt(form, renderer, row.where) for row, form in zip(rows, forms, strict=True)]


def prompt_of(text: str, tokenizer: Tokenizer, *, chat_template: str | None = None) -> Prompt:
    """The prompt for one typed question: a user turn if there is a chat template, else the text as it is."""
    question = Conversation((ChatTurn("user", text),), is_chat=False)
    return _prompt(question, Renderer(ChatTemplate(tokenizer, chat_template)), "the prompt")


def prompt_of_chat(
    messages: Sequence[Mapping[str, Any]], tokenizer: Tokenizer, *, chat_template: str | None = None
) -> Prompt:
    """The prompt for the next turn of a chat of OpenAI messages; without a template, the turns joined.

    A tool's call and its result must appear in the prompt; a template that omits them is refused.
    """
    where = "the chat"
    # Nothing is trained here, so an assistant turn may also be empty.
    untrained = [{**message, "weight": 0} if message["role"] == "assistant" else message for message in messages]
    turns = message_turns(untrained, "messages", where)
    prompt = _prompt(Conversation(turns, is_chat=False), Renderer(ChatTemplate(tokenizer, chat_template)), where)
    for number, turn in enumerate(turns):
        names = [call["function"]["name"] for call in turn.extra.get("tool_calls", ())]
        texts = [turn.content.strip()] if turn.role == "tool" else names
        if not all(text in prompt.text for text in texts):
            raise DataError(f"messages[{number}] is about a tool; this model's chat template has no place for it.")
    return prompt


def _prompt(form: Form, renderer: Renderer, where: str) -> Prompt:
    if not isinstance(form, Conversation | Text):
        raise DataError("token ids cannot be split into a prompt and its answer.", where=where)
    rendered, reference = renderer.render_prompt(form, where)
    tokens = tokenise_prompt(rendered, renderer.tokenizer)
    if not len(tokens):
        raise DataError("the prompt is empty.", where=where)
    return Prompt(tokens, rendered.text, reference, where)
