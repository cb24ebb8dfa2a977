from __future__ import annotations

import json
from typing import Any

import pytest

from weft.data.chats import Conversation
from weft.data.formats import convert_rows
from weft.data.row import Row
from weft.errors import DataError

WHERE = "train.jsonl line 17"
HELLO = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]


def read(values: dict[str, Any], *, need_answer: bool = True) -> Conversation:
    _, forms = convert_rows([Row(values, WHERE)], "auto", need_answer=need_answer)
    assert isinstance(forms[0], Conversation)
    return forms[0]


def error_of(values: dict[str, Any]) -> str:
    with pytest.raises(DataError) as caught:
        read(values)
    text = str(caught.value)
    assert text.startswith(f"{WHERE}: ")
    return text.removeprefix(f"{WHERE}: ")


def messages(*turns: Any) -> dict[str, Any]:
    return {"messages": list(turns)}


def test_chat_when_read_then_only_assistant_turns_are_trained():
    chat = read(messages({"role": "system", "content": "be kind"}, *HELLO, *HELLO))
    assert [(t.role, t.content, t.trained) for t in chat.turns] == [
        ("system", "be kind", False),
        ("user", "hi", False),
        ("assistant", "hello", True),
        ("user", "hi", False),
        ("assistant", "hello", True),
    ]
    assert chat.is_chat


def test_chat_when_weight_is_zero_then_the_turn_is_not_trained():
    quiet = {"role": "assistant", "content": "no", "weight": 0}
    loud = {"role": "assistant", "content": "yes", "weight": 1}
    assert [t.trained for t in read(messages(HELLO[0], quiet, HELLO[0], loud)).turns] == [False, False, False, True]


def test_chat_when_content_is_parts_then_their_text_is_joined():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert read(messages({"role": "user", "content": parts}, HELLO[1])).turns[0].content == "ab"


def test_chat_when_role_is_developer_then_it_is_a_system_turn():
    assert read(messages({"role": "developer", "content": "x"}, *HELLO)).turns[0].role == "system"


def test_chat_when_it_opens_with_the_assistant_then_that_turn_is_context():
    assert [t.trained for t in read(messages(HELLO[1], *HELLO)).turns] == [False, False, True]


def test_chat_when_tools_are_called_then_arguments_are_objects_and_the_rest_passes_through():
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    chat = read(
        {
            "messages": [
                HELLO[0],
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "content": "2", "tool_call_id": "c1"},
                {"role": "assistant", "content": "two", "tool_calls": None},
            ],
            "tools": [{"type": "function", "function": {"name": "add"}}],
        }
    )
    assert chat.turns[1].content == ""
    assert chat.turns[1].trained
    assert chat.turns[1].message["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    assert chat.turns[2].message == {"role": "tool", "content": "2", "tool_call_id": "c1"}
    assert chat.turns[3].message == {"role": "assistant", "content": "two"}
    assert chat.tools == ({"type": "function", "function": {"name": "add"}},)


def test_chat_when_a_cell_holds_json_text_then_it_is_read():
    assert len(read({"messages": json.dumps(HELLO), "tools": "[]"}).turns) == 2


@pytest.mark.parametrize(
    ("values", "found"),
    [
        (
            messages(*HELLO, {"role": "bot", "content": "x"}),
            "messages[2].role is 'bot'; use system, user, assistant or tool.",
        ),
        (messages({"content": "x"}), "messages[0].role is missing."),
        (messages({"role": 3, "content": "x"}), "messages[0].role is 3; use system, user, assistant or tool."),
        (messages({"role": "user"}), "messages[0].content is missing."),
        (messages({"role": "user", "content": 5}), "messages[0].content is 5; expected text."),
        (messages({"role": "user", "content": None}), "messages[0].content is null."),
        (messages(HELLO[0], {**HELLO[1], "loss_mask": [0, 1]}), "messages[1].loss_mask is a list; use true or false"),
        (messages(HELLO[0], {**HELLO[1], "mask": "yes"}), "messages[1].mask is 'yes'; use true or false"),
        (messages({**HELLO[0], "loss_mask": 1}), "messages[0].loss_mask is 1, but only assistant turns are trained."),
        (messages("hi"), "messages[0] is 'hi'; expected an object."),
        (
            messages({"role": "user", "content": [{"type": "image_url"}]}),
            "messages[0].content[0].type is 'image_url'; only text parts can be trained on.",
        ),
        (
            messages({"role": "user", "content": [{"type": "text"}]}),
            "messages[0].content[0].text is nothing; expected text.",
        ),
        (messages(), "messages is empty."),
        ({"messages": {}}, "messages is a mapping; expected a list."),
        ({"messages": "[1"}, "messages: is not valid JSON: it ends in the middle of a value (column 3)."),
        (messages(HELLO[0]), "messages has no assistant turn to learn from."),
        (
            messages(HELLO[1], HELLO[0]),
            "messages[0] is the only assistant turn and answers nothing; start with a user turn.",
        ),
        (
            messages(HELLO[0], {"role": "assistant", "content": " "}),
            "messages[1].content is empty; an assistant turn needs text or tool_calls.",
        ),
        (
            messages(HELLO[0], {"role": "assistant", "content": "x", "weight": -0.5}),
            "messages[1].weight is -0.5; use a number from 0 to 1e+18, on assistant turns only.",
        ),
        (
            messages(HELLO[0], {"role": "assistant", "content": "x", "weight": 10**400}),
            "messages[1].weight is 1000",
        ),
        (
            messages({"role": "user", "content": "x", "weight": 1}),
            "messages[0].weight is 1; use a number from 0 to 1e+18, on assistant turns only.",
        ),
        (
            messages(HELLO[0], {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[]"}}]}),
            "messages[1].tool_calls[0].function.arguments is a list; expected an object.",
        ),
        (
            messages(HELLO[0], {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}),
            "messages[1].tool_calls[0].function.arguments: is not valid JSON: it ends in the middle of a value",
        ),
        (
            messages(HELLO[0], {"role": "assistant", "tool_calls": [{"name": "f"}]}),
            "messages[1].tool_calls[0].function is nothing; expected an object.",
        ),
        ({"messages": HELLO, "tools": [1]}, "tools[0] is 1; expected an object."),
        ({"messages": HELLO, "tools": "x"}, "tools: is not valid JSON: expecting value (column 1)."),
    ],
)
def test_chat_when_it_is_wrong_then_the_error_names_the_field(values: dict[str, Any], found: str):
    assert error_of(values).startswith(found)


def sharegpt(*turns: tuple[str, Any], **more: Any) -> dict[str, Any]:
    return {"conversations": [{"from": speaker, "value": value} for speaker, value in turns], **more}


def test_sharegpt_when_read_then_speakers_become_roles():
    call = '{"name": "f", "arguments": {"x": 1}}'
    chat = read(
        sharegpt(
            ("human", "hi"),
            ("function_call", call),
            ("observation", "2"),
            ("gpt", "two"),
            system="be kind",
            tools='[{"name": "f"}]',
        )
    )
    assert [(t.role, t.content, t.trained) for t in chat.turns] == [
        ("system", "be kind", False),
        ("user", "hi", False),
        ("assistant", "", True),
        ("tool", "2", False),
        ("assistant", "two", True),
    ]
    function = {"name": "f", "arguments": {"x": 1}}
    assert chat.turns[2].extra["tool_calls"] == [{"type": "function", "function": function}]
    assert chat.tools == ({"name": "f"},)


def test_sharegpt_when_turns_have_role_and_content_then_they_are_messages():
    chat = read({"conversations": HELLO})
    assert [t.role for t in chat.turns] == ["user", "assistant"]
    assert "conversations[1].role is 'bot'" in error_of({"conversations": [HELLO[0], {"role": "bot", "content": "x"}]})


@pytest.mark.parametrize(
    ("values", "found"),
    [
        (
            sharegpt(("human", "a"), ("gtp", "b")),
            "conversations[1].from is 'gtp'; use human, gpt, system, observation or function_call.",
        ),
        ({"conversations": [{"value": "a"}]}, "conversations[0].from is missing."),
        ({"conversations": [{"from": "human"}]}, "conversations[0].value is missing."),
        (sharegpt(("human", 3)), "conversations[0].value is 3; expected text."),
        (sharegpt(("human", "a")), "conversations has no assistant turn to learn from."),
        (sharegpt(("human", "a"), ("gpt", "")), "conversations[1].value is empty; an assistant turn needs text."),
        (sharegpt(("human", "a"), ("function_call", "f(x)")), "conversations[1].value: is not valid JSON: expecting"),
        (
            sharegpt(("human", "a"), ("function_call", '{"arguments": {}}')),
            "conversations[1].value.name is nothing; expected text.",
        ),
        (
            sharegpt(("system", "a"), ("human", "b"), ("gpt", "c"), system="d"),
            "system and conversations[0] are both system prompts; keep one.",
        ),
        (sharegpt(), "conversations is empty."),
    ],
)
def test_sharegpt_when_it_is_wrong_then_the_error_names_the_field(values: dict[str, Any], found: str):
    assert error_of(values).startswith(found)


def test_chat_when_no_answer_is_needed_then_a_question_alone_is_read():
    assert len(read(messages(HELLO[0]), need_answer=False).turns) == 1


QUIET_MARKS = [
    *({"weight": 0}, {"train": False}, {"training": False}, {"loss": False}),
    *({"mask": True}, {"mask": 1}, {"masked": True}, {"loss_mask": 0}, {"loss_mask": False}),
]


@pytest.mark.parametrize("mask", QUIET_MARKS)
def test_turn_when_masked_as_other_trainers_have_it_then_is_not_trained(mask: dict[str, Any]):
    """Masks of OpenAI, ShareGPT, Axolotl and ms-swift are honoured in both kinds of chats."""
    quiet, user = {"role": "assistant", "content": "no"}, {"role": "user", "content": "hi", **mask, "weight": None}
    assert [t.trained for t in read(messages(user, {**quiet, **mask}, *HELLO)).turns] == [False, False, False, True]
    human, gpt = {"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}
    chat = read({"conversations": [human, {**gpt, **mask}, human, gpt]})
    assert [t.trained for t in chat.turns] == [False, False, False, True]
    assert not any(set(mask) & set(t.extra) for t in chat.turns)


def test_turn_when_a_sharegpt_turn_has_a_weight_then_it_counts_so_much():
    """A weight between 0 and 1 is kept."""
    turns = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes", "weight": 0.5}]
    assert read({"conversations": turns}).turns[1].weight == 0.5


def test_turn_when_its_mask_cannot_be_honoured_then_reports_it():
    """A mask that means something else here is not passed over."""
    assert error_of(messages(HELLO[0], {**HELLO[1], "train": "no"})) == "messages[1].train is 'no'; use true or false."
    assert error_of(messages({**HELLO[0], "train": True}, HELLO[1])) == (
        "messages[0].train is true, but only assistant turns are trained."
    )
    detail = [{"begin_offset": 0, "end_offset": 1, "train": False}]
    assert error_of(messages(HELLO[0], {**HELLO[1], "train_detail": detail})) == (
        "messages[1].train_detail masks parts of a turn; only whole turns can be left out."
    )


def test_functions_when_written_the_old_way_then_are_tools():
    """OpenAI's `functions`, `function_call` and role `function` mean what tools mean."""
    called = {"name": "add", "arguments": '{"a": 1}'}
    turns = [HELLO[0], {"role": "assistant", "content": None, "function_call": called}]
    turns += [{"role": "function", "name": "add", "content": "1"}, HELLO[1]]
    chat = read({"messages": turns, "functions": [{"name": "add"}]})
    assert chat.tools == ({"type": "function", "function": {"name": "add"}},)
    assert [t.role for t in chat.turns] == ["user", "assistant", "tool", "assistant"]
    assert chat.turns[1].extra == {
        "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
    }
    assert chat.turns[2].extra == {"name": "add"}
