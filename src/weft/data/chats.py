"""The normal forms of a row: a conversation, a text, token ids, or something labelled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from weft.data.json_rows import expect_list, expect_object, expect_text, has, list_column, parse_json, text_column
from weft.data.row import Row
from weft.errors import DataError
from weft.settings import LARGEST, describe, is_usable_number


@dataclass(frozen=True)
class ChatTurn:
    role: str
    content: str
    trained: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Other fields that the chat template may read, such as tool_calls, tool_call_id or name."""
    weight: float = 1.0

    @property
    def message(self) -> dict[str, Any]:
        return {"role": self.role, "content": self.content, **self.extra}


@dataclass(frozen=True)
class Conversation:
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
    words: tuple[str, ...]
    labels: tuple[int | None, ...]


Form: TypeAlias = Conversation | Text | Tokens | Passage | Words


@dataclass(frozen=True)
class Rendered:
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


# Templates know no developer role; it is the newer name of the system prompt.
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
TRAIN_FLAGS = ("train", "training", "loss")
"""True/false fields of a turn that decide whether it is trained."""
MASK_FLAGS = {"mask": True, "masked": True, "loss_mask": False}
"""Further such fields, also written as 1 and 0, with the value of a turn that is not trained."""
DETAIL_FIELDS = ("train_detail", "training_detail")
SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "observation": "tool",
    "tool": "tool",
    "function_call": "assistant",
}


def read_chat(row: Row, need_answer: bool) -> Conversation:
    turns = message_turns(list_column(row, "messages"), "messages", row.where)
    return _conversation(turns, "messages", row, need_answer)


def read_sharegpt(row: Row, need_answer: bool) -> Conversation:
    """A row with `conversations` of `from` and `value`; `role` and `content` are accepted as well."""
    name = "conversations"
    items = list_column(row, name)
    if items and isinstance(items[0], Mapping) and "from" not in items[0] and "role" in items[0]:
        turns = message_turns(items, name, row.where)
    else:
        turns = tuple(_sharegpt_turn(item, f"{name}[{i}]", row.where, i == 0) for i, item in enumerate(items))
    system = text_column(row, "system", "")
    if system and turns and turns[0].role == "system":
        raise DataError(f"system and {name}[0] are both system prompts; keep one.", where=row.where)
    if system:
        turns = (ChatTurn("system", system), *turns)
    return _conversation(turns, name, row, need_answer)


def message_turns(items: list[Any], name: str, where: str, *, opening: bool = True) -> tuple[ChatTurn, ...]:
    """The turns of a list of OpenAI messages; `name` is the list's name in errors. `opening`: they open the
    conversation."""
    return tuple(_message_turn(item, f"{name}[{i}]", where, opening and i == 0) for i, item in enumerate(items))


def read_tools(row: Row) -> tuple[Mapping[str, Any], ...]:
    """The tools of a row: a list of objects, or the same as JSON text; without any, an empty tuple. `functions`, their
    former name, are tools of one kind."""
    for name in ("tools", "functions"):
        if has(row, name) and row.values[name] != "":
            result = [expect_object(item, f"{name}[{i}]", row.where) for i, item in enumerate(list_column(row, name))]
            return tuple(result if name == "tools" else ({"type": "function", "function": item} for item in result))
    return ()


def _conversation(turns: tuple[ChatTurn, ...], name: str, row: Row, need_answer: bool) -> Conversation:
    if not turns:
        raise DataError(f"{name} is empty.", where=row.where)
    if need_answer and not any(turn.role == "assistant" for turn in turns[1:]):
        problem = f"{name} has no assistant turn to learn from."
        if turns[0].role == "assistant":
            problem = f"{name}[0] is the only assistant turn and answers nothing; start with a user turn."
        raise DataError(problem, where=row.where)
    return Conversation(turns, read_tools(row))


def _message_turn(item: Any, path: str, where: str, first: bool) -> ChatTurn:
    message = dict(expect_object(item, path, where))
    role = message.pop("role", None)
    if role is None:
        raise DataError(f"{path}.role is missing.", where=where)
    role = "tool" if role == "function" else role
    if not isinstance(role, str) or role not in ROLES:
        raise DataError(f"{path}.role is {describe(role)}; use system, user, assistant or tool.", where=where)
    weight = _turn_weight(message, role, path, where)
    calls = _tool_calls(message.pop("tool_calls", None) or [], f"{path}.tool_calls", where)
    if "function_call" in message:
        called = expect_object(message.pop("function_call"), f"{path}.function_call", where)
        calls.append({"type": "function", "function": _function(called, f"{path}.function_call", where)})
    if calls:
        message["tool_calls"] = calls
    content = message.pop("content", "" if calls else None)
    if content is None:
        raise DataError(f"{path}.content is {'null' if 'content' in item else 'missing'}.", where=where)
    text = _content_text(content, f"{path}.content", where)
    trained = role == "assistant" and weight != 0 and not first
    if trained and not text.strip() and not calls:
        raise DataError(f"{path}.content is empty; an assistant turn needs text or tool_calls.", where=where)
    return ChatTurn(ROLES[role], text, trained, message, weight)


def _turn_weight(turn: dict[str, Any], role: str, path: str, where: str) -> float:
    """Removes a turn's weight in the loss from it and returns it: 0 or 1 in OpenAI's files, here any from 0 up."""
    for name in DETAIL_FIELDS:
        if turn.get(name):
            raise DataError(f"{path}.{name} masks parts of a turn; only whole turns can be left out.", where=where)
    flags = {name: turn.pop(name) for name in TRAIN_FLAGS if name in turn}
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise DataError(f"{path}.{name} is {describe(flag)}; use true or false.", where=where)
        if flag and role != "assistant":
            raise DataError(f"{path}.{name} is true, but only assistant turns are trained.", where=where)
    for name in (name for name in MASK_FLAGS if name in turn):
        flag = turn.pop(name)
        if flag not in (0, 1) or not isinstance(flag, int):
            raise DataError(f"{path}.{name} is {describe(flag)}; use true or false, for a whole turn.", where=where)
        flags[name] = bool(flag) != MASK_FLAGS[name]
        if flags[name] and role != "assistant":
            raise DataError(f"{path}.{name} is {describe(flag)}, but only assistant turns are trained.", where=where)
    weight = turn.pop("weight", None)
    weight = int(weight) if isinstance(weight, bool) else weight
    if weight is not None and (role != "assistant" or not is_usable_number(weight) or weight < 0):
        problem = f"{path}.weight is {describe(weight)}"
        raise DataError(f"{problem}; use a number from 0 to {LARGEST:.0e}, on assistant turns only.", where=where)
    return 0.0 if False in flags.values() else 1.0 if weight is None else float(weight)


def _content_text(content: Any, path: str, where: str) -> str:
    if not isinstance(content, list):
        return expect_text(content, path, where)
    texts = []
    for i, item in enumerate(content):
        part = expect_object(item, f"{path}[{i}]", where)
        if part.get("type") != "text":
            problem = f"{path}[{i}].type is {describe(part.get('type'))}"
            raise DataError(f"{problem}; only text parts can be trained on.", where=where)
        texts.append(expect_text(part.get("text"), f"{path}[{i}].text", where))
    return "".join(texts)


def _tool_calls(value: Any, path: str, where: str) -> list[dict[str, Any]]:
    calls = []
    for i, item in enumerate(expect_list(value, path, where)):
        call = dict(expect_object(item, f"{path}[{i}]", where))
        function = expect_object(call.get("function"), f"{path}[{i}].function", where)
        call["function"] = _function(function, f"{path}[{i}].function", where)
        calls.append(call)
    return calls


def _function(value: Mapping[str, Any], path: str, where: str) -> dict[str, Any]:
    """Name and arguments. OpenAI writes the arguments as JSON text; templates would quote that a second time."""
    function = dict(value)
    expect_text(function.get("name"), f"{path}.name", where)
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        arguments = parse_json(arguments, f"{where}: {path}.arguments")
    function["arguments"] = expect_object(arguments, f"{path}.arguments", where)
    return function


def _sharegpt_turn(item: Any, path: str, where: str, first: bool) -> ChatTurn:
    entry = dict(expect_object(item, path, where))
    speaker = entry.get("from")
    if speaker is None:
        raise DataError(f"{path}.from is missing.", where=where)
    if not isinstance(speaker, str) or speaker not in SHAREGPT_ROLES:
        accepted = "human, gpt, system, observation or function_call"
        raise DataError(f"{path}.from is {describe(speaker)}; use {accepted}.", where=where)
    if "value" not in entry:
        raise DataError(f"{path}.value is missing.", where=where)
    text = expect_text(entry["value"], f"{path}.value", where)
    role = SHAREGPT_ROLES[speaker]
    weight = _turn_weight(entry, role, path, where)
    trained = role == "assistant" and weight != 0 and not first
    if trained and not text.strip():
        raise DataError(f"{path}.value is empty; an assistant turn needs text.", where=where)
    if speaker != "function_call":
        thoughts = {name: entry[name] for name in THOUGHTS if name in entry}
        return ChatTurn(role, text, trained, thoughts, weight)
    value = parse_json(text, f"{where}: {path}.value")
    functions = value if isinstance(value, list) else [value]
    calls = [
        {"type": "function", "function": _function(expect_object(f, f"{path}.value", where), f"{path}.value", where)}
        for f in functions
    ]
    return ChatTurn(role, "", trained, {"tool_calls": calls}, weight)
