from __future__ import annotations

from typing import Any

import pytest

from weft.data.chats import Conversation, Form, Text, Tokens
from weft.data.formats import READERS, convert_rows
from weft.data.row import Row
from weft.errors import ConfigError, DataError
from weft.spec.job import FORMATS

MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]


def rows(*values: dict[str, Any]) -> list[Row]:
    return [Row(value, f"train.jsonl line {i}") for i, value in enumerate(values, 1)]


def read(values: dict[str, Any], data_format: str = "auto", *, need_answer: bool = True) -> Form:
    return convert_rows(rows(values), data_format, need_answer=need_answer)[1][0]


def turns(values: dict[str, Any], data_format: str = "auto") -> list[tuple[str, str, bool]]:
    form = read(values, data_format)
    assert isinstance(form, Conversation)
    return [(turn.role, turn.content, turn.trained) for turn in form.turns]


def error_of(*values: dict[str, Any], data_format: str = "auto") -> str:
    with pytest.raises(DataError) as caught:
        convert_rows(rows(*values), data_format)
    return str(caught.value)


def test_every_format_of_a_job_has_a_reader():
    assert {"auto", *READERS} == set(FORMATS)


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({"messages": MESSAGES, "prompt": "hi"}, "chat"),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, "sharegpt"),
        ({"instruction": "a", "input": "", "output": "b", "answer": "c"}, "alpaca"),
        ({"question": "a", "answer": "b"}, "completion"),
        ({"prompt": "a", "completion": "b", "text": "c"}, "completion"),
        ({"prompt": "a", "response": "b"}, "completion"),
        ({"input": "a", "output": "b"}, "completion"),
        ({"text": "a", "label": True}, "text"),
        ({"input_ids": [1, 2], "text": "a"}, "tokens"),
        ({"messages": None, "prompt": "a", "completion": "b"}, "completion"),
    ],
)
def test_auto_when_columns_are_known_then_finds_the_format(values: dict[str, Any], found: str):
    assert convert_rows(rows(values), "auto")[0] == found


def test_auto_when_columns_are_unknown_then_lists_them_and_the_accepted_ones():
    assert error_of({"id": 1, "msgs": [], "empty": None}).startswith(
        "train.jsonl line 1: has the columns id, msgs; expected messages (chat), conversations (sharegpt), "
    )


def test_auto_when_formats_are_mixed_then_names_the_line():
    found = error_of({"text": "a"}, {"text": "b"}, {"messages": MESSAGES})
    assert found == "train.jsonl line 3: is in the chat format, but the rows before it are text."


def test_auto_when_a_later_row_lacks_a_column_then_names_the_column():
    assert error_of({"messages": MESSAGES}, {"msgs": MESSAGES}) == "train.jsonl line 2: messages is missing."


@pytest.mark.parametrize(
    "values",
    [
        {"messages": MESSAGES, "label": False},
        {"prompt": "a", "completion": "b", "label": True},
    ],
)
def test_auto_when_rows_are_labelled_answers_then_names_the_objective_for_them(values: dict[str, Any]):
    found = error_of(values)
    assert found.startswith("train.jsonl line 1: ")
    assert "a true/false label is preference data, for objective kto." in found


@pytest.mark.parametrize(
    "values",
    [
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        {"input": {}, "preferred_output": [], "non_preferred_output": []},
    ],
)
def test_auto_when_another_objective_meets_pairs_then_names_the_one_for_them(values: dict[str, Any]):
    assert "are preference data, for objective dpo." in error_of(values)


def test_auto_when_a_later_row_is_a_preference_then_names_its_line():
    found = error_of({"messages": MESSAGES}, {"messages": MESSAGES, "label": True})
    assert found.startswith("train.jsonl line 2: a true/false label is preference data, for objective kto.")


def test_preferences_when_the_format_is_stated_then_the_other_columns_are_read():
    assert turns({"messages": MESSAGES, "label": False}, "chat")[1] == ("assistant", "hello", True)


def test_format_when_unknown_then_lists_the_accepted_ones():
    with pytest.raises(ConfigError, match="got 'openai'; accepted are auto, chat,"):
        read({"text": "a"}, "openai")


def test_completion_when_both_sides_are_text_then_is_a_question_and_its_answer():
    form = read({"question": "2+2?", "answer": "4"})
    assert isinstance(form, Conversation)
    assert not form.is_chat
    assert turns({"question": "2+2?", "answer": "4"}) == [("user", "2+2?", False), ("assistant", "4", True)]


def test_completion_when_sides_are_messages_then_only_the_completion_is_trained():
    values = {"prompt": [*MESSAGES, MESSAGES[0]], "completion": [MESSAGES[1], *MESSAGES]}
    assert [trained for _, _, trained in turns(values)] == [False, False, False, True, False, True]
    form = read(values)
    assert isinstance(form, Conversation)
    assert form.is_chat


def test_completion_when_a_completion_message_has_weight_zero_then_it_is_not_trained():
    quiet = {"role": "assistant", "content": "no", "weight": 0}
    assert [t for _, _, t in turns({"prompt": "a", "completion": [quiet, *MESSAGES]})] == [False, False, False, True]


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({"prompt": "a", "completion": " "}, "completion is empty."),
        ({"prompt": "a", "completion": []}, "completion is empty."),
        ({"prompt": [], "completion": "b"}, "prompt is empty."),
        ({"prompt": "a", "completion": [MESSAGES[0]]}, "completion has no assistant turn to learn from."),
        ({"prompt": "a", "completion": 7}, "completion is 7; expected text."),
        ({"question": 7, "answer": "b"}, "question is 7; expected text."),
        ({"prompt": [{"role": "usr", "content": ""}], "completion": "b"}, "prompt[0].role is 'usr'; use system,"),
        ({"prompt": "a"}, "completion is missing."),
        ({"prompt": "a", "completion": None}, "completion is null."),
        ({"answer": "a"}, "question is missing."),
        ({"text": "a"}, "prompt and completion are missing."),
    ],
)
def test_completion_when_it_is_wrong_then_the_error_names_the_column(values: dict[str, Any], found: str):
    assert error_of(values, data_format="completion").startswith(f"train.jsonl line 1: {found}")


def test_completion_when_it_is_null_in_the_first_row_then_the_error_names_it():
    assert error_of({"prompt": "a", "completion": None}).endswith(
        "completion is null; a row needs prompt and completion."
    )


def test_alpaca_when_it_has_everything_then_becomes_turns_in_order():
    values = {
        "instruction": "add",
        "input": "1 2",
        "output": "3",
        "system": "be exact",
        "history": [["hi", "hello"]],
    }
    assert turns(values) == [
        ("system", "be exact", False),
        ("user", "hi", False),
        ("assistant", "hello", True),
        ("user", "add\n\n1 2", False),
        ("assistant", "3", True),
    ]


def test_alpaca_when_input_is_empty_or_missing_then_the_instruction_stands_alone():
    assert turns({"instruction": "go", "input": "", "output": "ok"})[0] == ("user", "go", False)
    assert turns({"instruction": "go", "output": "ok"})[0] == ("user", "go", False)
    assert turns({"instruction": "", "input": "go", "output": "ok"})[0] == ("user", "go", False)


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({"instruction": "a", "output": ""}, "output is empty."),
        ({"instruction": "a"}, "output is missing."),
        ({"output": "a"}, "instruction is missing."),
        ({"instruction": "", "input": " ", "output": "a"}, "instruction is empty."),
        ({"instruction": "a", "input": ["x"], "output": "a"}, "input is a list; expected text."),
        ({"instruction": "a", "output": "b", "history": [["q"]]}, "history[0] is a list; expected a list of two texts"),
        ({"instruction": "a", "output": "b", "history": {"q": 1}}, "history is a mapping; expected a list."),
    ],
)
def test_alpaca_when_it_is_wrong_then_the_error_names_the_column(values: dict[str, Any], found: str):
    assert error_of(values, data_format="alpaca").startswith(f"train.jsonl line 1: {found}")


def test_text_when_read_then_is_itself():
    assert read({"text": "once"}) == Text("once")
    assert error_of({"text": 3}) == "train.jsonl line 1: text is 3; expected text."


def test_tokens_when_labels_are_ignored_or_padded_then_the_mask_follows():
    form = read({"input_ids": [0, 5, 6, 7, 0], "labels": [-100, -100, 6, 7, -100], "attention_mask": [0, 1, 1, 1, 0]})
    assert form == Tokens((5, 6, 7), (False, True, True))
    assert read({"input_ids": [5, 6]}) == Tokens((5, 6), (True, True))


@pytest.mark.parametrize("name", ["loss_mask", "completion_mask", "assistant_masks"])
def test_tokens_when_a_mask_leaves_some_out_then_those_are_not_trained(name: str):
    form = read(
        {"input_ids": [5, 6, 7, 8], name: [0, 1, 1, 1], "labels": [5, 6, -100, 8], "attention_mask": [1, 1, 1, 0]}
    )
    assert form == Tokens((5, 6, 7), (False, True, False))


@pytest.mark.parametrize(
    ("values", "found"),
    [
        ({"input_ids": [1, 2.5]}, "input_ids[1] is 2.5; expected a whole number."),
        ({"input_ids": [True]}, "input_ids[0] is True; expected a whole number."),
        ({"input_ids": [-1]}, "input_ids[0] is -1; token ids start at 0."),
        ({"input_ids": [1, 2], "labels": [1]}, "labels has 1 item, but input_ids has 2."),
        ({"input_ids": [1, 2], "attention_mask": [1]}, "attention_mask has 1 item, but input_ids has 2."),
        ({"input_ids": [1, 2], "labels": [2, 3]}, "labels[0] is 2, but input_ids[0] is 1; a label repeats its token"),
        ({"input_ids": 4}, "input_ids is 4; expected a list."),
        ({"text": "a", "pixel_values": [[0.5]]}, "has pixel_values, but only text can be trained on."),
        ({"input_ids": [1], "pixel_values": [[0.5]]}, "has pixel_values, but only text can be trained on."),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "loss_mask has 1 item, but input_ids has 2."),
    ],
)
def test_tokens_when_they_are_wrong_then_the_error_names_the_item(values: dict[str, Any], found: str):
    assert error_of(values).startswith(f"train.jsonl line 1: {found}")


@pytest.mark.parametrize(
    "values", [{"prompt": "a"}, {"question": "a"}, {"instruction": "a"}, {"prompt": "a", "completion": ""}]
)
def test_row_when_no_answer_is_needed_then_a_prompt_alone_is_read(values: dict[str, Any]):
    form = read(values, need_answer=False)
    assert isinstance(form, Conversation)
    assert form.turns[0].role == "user"


@pytest.mark.parametrize("name", ["image", "images", "audio", "audios", "video", "videos"])
def test_media_when_a_row_has_any_then_is_refused(name: str):
    """Images are not trained as text; a stated format trains the text, if that has no place for them."""
    values = {"prompt": "What is this?", "completion": "A cat.", name: ["cat.png"]}
    with pytest.raises(
        DataError, match=rf"^line 1: has {name}, but only text can be trained on\. To train on the text"
    ):
        convert_rows([Row(values, "line 1")], "auto")
    assert convert_rows([Row(values, "line 1")], "completion")[0] == "completion"
    assert convert_rows([Row({**values, name: []}, "line 1")], "auto")[0] == "completion"


@pytest.mark.parametrize("mark", ["<image>", "<|image|>", "<image_1>", "<|image_pad|>", "<audio>", "<video>"])
@pytest.mark.parametrize("data_format", ["auto", "chat"])
def test_media_when_the_text_has_a_mark_for_it_then_is_refused_in_every_format(mark: str, data_format: str):
    """A placeholder beside its column would be trained as text."""
    turns = [{"role": "user", "content": f"{mark} What?"}, {"role": "assistant", "content": "A cat."}]
    with pytest.raises(DataError, match=r"^line 1: images belongs to the <.*> in the text, but only text"):
        convert_rows([Row({"messages": turns, "images": ["cat.png"]}, "line 1")], data_format)
    assert convert_rows([Row({"messages": turns}, "line 1")], data_format)[0] == "chat"


@pytest.mark.parametrize("part", [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "input_audio"}])
def test_media_when_it_is_a_part_of_a_message_then_is_refused(part: dict[str, object]):
    """Parts of a content that are not text are refused by their type."""
    turns = [{"role": "user", "content": [part]}, {"role": "assistant", "content": "A cat."}]
    with pytest.raises(DataError, match=rf"type is '{part['type']}'; only text parts can be trained on"):
        convert_rows([Row({"messages": turns}, "line 1")], "auto")
