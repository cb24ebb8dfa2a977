"""Detects a row's format from its columns and converts the row into a normal form.

| format | columns |
|---|---|
| chat | messages, each with role and content; optional tools |
| sharegpt | conversations, each with from and value; optional tools, system |
| alpaca | instruction, output (or response); optional input (or context), system, history |
| completion | prompt and completion (or response), question and answer, input and output, sentence or text and label |
| text | text |
| tokens | input_ids; optional labels (-100 is not trained), attention_mask, loss_mask, … |

Further columns are ignored, except those that the job's objective reads. Rows with chosen and rejected answers are for
objective dpo, rows with a true/false label for objective kto; other objectives refuse them, unless the job sets a
format: then the other columns are read in that format. Rows with images, audios or videos are refused likewise; always,
if the text refers to one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from weft.data.chats import (
    ChatTurn,
    Conversation,
    Form,
    Passage,
    Text,
    Tokens,
    Words,
    message_turns,
    read_chat,
    read_sharegpt,
    read_tools,
)
from weft.data.json_rows import absence, expect_text, has, list_column, text_column
from weft.data.row import Row
from weft.errors import ConfigError, DataError, counted
from weft.objectives.pairs import PAIRS as PREFERENCES
from weft.settings import describe
from weft.spec.job import FORMATS

IGNORED_LABEL = -100
PAIRS = (("prompt", "completion"), ("prompt", "response"), ("question", "answer"), ("input", "output"))
LABELLED = (("sentence", "label"), ("text", "label"))
"""Texts and their classes; a true/false label rates an answer instead."""
MEDIA_COLUMNS = ("image", "images", "audio", "audios", "video", "videos")
MEDIA_ARRAYS = (
    *("pixel_values", "pixel_values_videos", "image_grid_thw", "video_grid_thw", "image_embeds", "inputs_embeds"),
    *("input_features", "input_values", "audio_values"),
)
"""Columns with images, videos and audios as processors write them beside token ids."""
TOKEN_MASKS = ("attention_mask", "loss_mask", "completion_mask", "assistant_masks")
"""Columns of 0 and 1 beside token ids: padding, and tokens that are not trained."""
MEDIA_MARK = re.compile(r"<\|?(image|audio|video)(_?pad|_?[0-9]+|_url)?\|?>")


def convert_rows(
    rows: Sequence[Row], data_format: str, *, need_answer: bool = True, first_format: str | None = None
) -> tuple[str, list[Form]]:
    """The format of the rows of one source, and each row in its normal form. With `auto` the first row decides, or
    `first_format` if rows came before these, and a later row in another format is a DataError. Without `need_answer` a
    row may be only a prompt: no completion, or no assistant turn."""
    if data_format in LABELLED_READERS:
        return data_format, [LABELLED_READERS[data_format](row) for row in rows]
    if data_format not in FORMATS:
        raise ConfigError(f"got {data_format!r}; accepted are {', '.join(FORMATS)}.", where="data_format")
    if data_format != "auto":
        for row in rows:
            refuse_media(row, is_stated=True)
        return data_format, [READERS[data_format](row, need_answer) for row in rows]
    chosen = first_format or _detect_first(rows[0], need_answer)
    forms: list[Form] = []
    for row in rows:
        _refuse_preferences(row)
        refuse_media(row, is_stated=False)
        detected = detect(row, need_answer)
        if detected not in (chosen, None):
            raise DataError(f"is in the {detected} format, but the rows before it are {chosen}.", where=row.where)
        forms.append(READERS[chosen](row, need_answer))
    return chosen, forms


def detect(row: Row, need_answer: bool = True) -> str | None:
    """The format that a row's columns suggest, or None."""
    if has(row, "input_ids"):
        return "tokens"
    if has(row, "messages"):
        return "chat"
    if has(row, "conversations"):
        return "sharegpt"
    if has(row, "instruction") and (has(row, "output") or not need_answer):
        return "alpaca"
    if any(has(row, *pair) for pair in PAIRS):
        return "completion"
    if has(row, "instruction", "response"):
        return "alpaca"
    if any(has(row, *pair) for pair in LABELLED) and not isinstance(row.values["label"], bool):
        return "completion"
    if not need_answer and any(has(row, prompt) for prompt, _ in PAIRS):
        return "completion"
    return "text" if has(row, "text") else None


def _detect_first(row: Row, need_answer: bool) -> str:
    _refuse_preferences(row)
    refuse_media(row, is_stated=False)
    detected = detect(row, need_answer)
    if detected is not None:
        return detected
    columns = [name for name in row.values if has(row, name)]
    pair = next((pair for pair in PAIRS if set(pair) <= row.values.keys()), None)
    if pair is not None:
        empty = next(name for name in pair if not has(row, name))
        raise DataError(f"{empty} is null; a row needs {pair[0]} and {pair[1]}.", where=row.where)
    raise DataError(
        f"has the columns {', '.join(columns) or '(none)'}; expected messages (chat), conversations (sharegpt), "
        "instruction and output (alpaca), prompt and completion or question and answer (completion), text, "
        "or input_ids (tokens).",
        where=row.where,
        hint=_other_columns(row, columns, need_answer),
    )


def _other_columns(row: Row, columns: list[str], need_answer: bool) -> str | None:
    if len(columns) == 1 and any(mark in columns[0] for mark in ";|\t,"):
        return "The cells of a .csv file are separated by commas, semicolons or tabs, those of a .tsv file by tabs."
    lower = {name.strip().lower(): value for name, value in row.values.items()}
    if detect(Row(lower, row.where), need_answer) is not None:
        return f"Names are written in lower case: {', '.join(name.strip().lower() for name in columns)}."
    if len(columns) < 2:
        return None
    numbers = "; in a table without a line of names, {prompt: 1, completion: 2}" if " line " in row.where else ""
    return f"State which is which, such as data_columns: {{prompt: {columns[0]}, completion: {columns[1]}}}{numbers}."


def _refuse_preferences(row: Row) -> None:
    for pair in PREFERENCES:
        if has(row, *pair):
            raise DataError(
                f"{pair[0]} and {pair[1]} are preference data, for objective dpo.",
                where=row.where,
                hint="To train on the other columns alone, state their data_format.",
            )
    if isinstance(row.values.get("label"), bool) and detect(row) in ("chat", "sharegpt", "completion"):
        raise DataError(
            "a true/false label is preference data, for objective kto.",
            where=row.where,
            hint="To train on every answer alike, state its data_format.",
        )


def refuse_media(row: Row, *, is_stated: bool) -> None:
    """Refuses rows with images, audios or videos; with a set format only if the text refers to one."""
    name = _media(row)
    if name is None:
        return
    others = {key: value for key, value in row.values.items() if key not in (*MEDIA_COLUMNS, *MEDIA_ARRAYS)}
    mark = MEDIA_MARK.search(json.dumps(others, ensure_ascii=False, default=str))
    if mark is not None:
        problem = f"{name} belongs to the {mark[0]} in the text"
        raise DataError(f"{problem}, but only text can be trained on.", where=row.where)
    if not is_stated:
        raise DataError(
            f"has {name}, but only text can be trained on.",
            where=row.where,
            hint="To train on the text alone, state its data_format.",
        )


def _media(row: Row) -> str | None:
    return next((n for n in (*MEDIA_COLUMNS, *MEDIA_ARRAYS) if row.values.get(n) not in (None, "", [], {})), None)


def _read_completion(row: Row, need_answer: bool) -> Conversation:
    question, answered = _pair(row, need_answer)
    # Assistant turns in the prompt are context; only those in the completion are answers to it.
    turns = tuple(replace(t, trained=False) if t.trained else t for t in _side(row, question, "user"))
    if not turns:
        raise DataError(f"{question} is empty.", where=row.where)
    if need_answer or has(row, answered):
        completion = _side(row, answered, "assistant")
        if need_answer and not any(turn.content.strip() or turn.extra for turn in completion):
            raise DataError(f"{answered} is empty.", where=row.where)
        if need_answer and not any(turn.role == "assistant" for turn in completion):
            raise DataError(f"{answered} has no assistant turn to learn from.", where=row.where)
        turns += completion
    is_chat = any(isinstance(row.values.get(name), list) for name in (question, answered))
    return Conversation(turns, read_tools(row), is_chat)


def _pair(row: Row, need_answer: bool) -> tuple[str, str]:
    for pair in (*PAIRS, *LABELLED):
        if has(row, *pair):
            return pair
    for pair in PAIRS:
        if has(row, pair[0]) and not need_answer:
            return pair
        if has(row, pair[0]) or has(row, pair[1]):
            missing = pair[1] if has(row, pair[0]) else pair[0]
            raise DataError(f"{missing} is {absence(row, missing)}.", where=row.where)
    raise DataError("prompt and completion are missing.", where=row.where)


def _side(row: Row, name: str, role: str) -> tuple[ChatTurn, ...]:
    """A prompt or completion: text is the content of one turn of that role, a list is messages."""
    value = row.values[name]
    if isinstance(value, list):
        return message_turns(value, name, row.where, opening=False)
    if name == "label" and type(value) in (int, float):
        value = str(value)
    return (ChatTurn(role, expect_text(value, name, row.where), trained=role == "assistant"),)


def _read_alpaca(row: Row, need_answer: bool) -> Conversation:
    instruction = text_column(row, "instruction")
    # Dolly's names for the same.
    is_dolly = has(row, "response") and not has(row, "output")
    given = text_column(row, "context" if is_dolly else "input", "")
    question = "\n\n".join(part for part in (instruction, given) if part.strip())
    if not question:
        raise DataError("instruction is empty.", where=row.where)
    turns = []
    system = text_column(row, "system", "")
    if system:
        turns.append(ChatTurn("system", system))
    for i, pair in enumerate(list_column(row, "history") if row.values.get("history") else []):
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            problem = f"history[{i}] is {describe(pair)}"
            raise DataError(f"{problem}; expected a list of two texts, question and answer.", where=row.where)
        turns += [ChatTurn("user", pair[0]), ChatTurn("assistant", pair[1], trained=True)]
    turns.append(ChatTurn("user", question))
    answered = "response" if is_dolly else "output"
    if need_answer or has(row, answered):
        output = text_column(row, answered)
        if need_answer and not output.strip():
            raise DataError(f"{answered} is empty.", where=row.where)
        turns.append(ChatTurn("assistant", output, trained=True))
    return Conversation(tuple(turns), is_chat=False)


def _read_tokens(row: Row, need_answer: bool) -> Tokens:
    ids = _whole_numbers(row, "input_ids")
    media = _media(row)
    if media is not None:
        raise DataError(f"has {media} beside input_ids, but only text can be trained on.", where=row.where)
    labels = _whole_numbers(row, "labels") if has(row, "labels") else ids
    masks = {name: _whole_numbers(row, name) for name in TOKEN_MASKS if has(row, name)}
    for name, values in (("labels", labels), *masks.items()):
        if len(values) != len(ids):
            raise DataError(
                f"{name} has {counted(len(values), 'item')}, but input_ids has {len(ids)}.", where=row.where
            )
    attended = masks.pop("attention_mask", [1] * len(ids))
    is_trained = [all(flags) for flags in zip(*masks.values(), strict=True)] if masks else [True] * len(ids)
    kept: list[tuple[int, bool]] = []
    for i, (token, label, is_attended) in enumerate(zip(ids, labels, attended, strict=True)):
        if not is_attended:
            continue  # padding
        if token < 0:
            raise DataError(f"input_ids[{i}] is {token}; token ids start at 0.", where=row.where)
        if label not in (token, IGNORED_LABEL):
            problem = f"labels[{i}] is {label}, but input_ids[{i}] is {token}"
            raise DataError(f"{problem}; a label repeats its token or is {IGNORED_LABEL}.", where=row.where)
        kept.append((token, label != IGNORED_LABEL and is_trained[i]))
    return Tokens(tuple(token for token, _ in kept), tuple(trained for _, trained in kept))


def _whole_numbers(row: Row, name: str) -> list[int]:
    values = list_column(row, name)
    for i, value in enumerate(values):
        if type(value) is not int:
            raise DataError(f"{name}[{i}] is {describe(value)}; expected a whole number.", where=row.where)
    return values


READERS: dict[str, Callable[[Row, bool], Form]] = {
    "chat": read_chat,
    "completion": _read_completion,
    "alpaca": _read_alpaca,
    "sharegpt": read_sharegpt,
    "text": lambda row, need_answer: Text(text_column(row, "text")),
    "tokens": _read_tokens,
}
LABELLED_READERS: dict[str, Callable[[Row], Form]] = {
    "passage": lambda row: Passage(row.values["text"], row.values["label"]),
    "words": lambda row: Words(tuple(row.values["tokens"]), tuple(row.values["tags"])),
}
"""Readers for objectives with classes; no job sets these formats."""
