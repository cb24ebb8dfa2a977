from __future__ import annotations

import pytest
from tiny_tokenizer import CHATML, make_tokenizer
from transformers import PreTrainedTokenizerFast

from weft.data.chat_template import ChatTemplate, Tokenizer
from weft.data.chats import ChatTurn, Conversation, Rendered, Text
from weft.data.render import Renderer
from weft.errors import ConfigError, DataError

WHERE = "train.jsonl line 17"
PAIR = Conversation((ChatTurn("user", "hi"), ChatTurn("assistant", "hello", True)), is_chat=False)
CHAT = Conversation((*PAIR.turns, ChatTurn("user", "more"), ChatTurn("assistant", "bye", True)))
DEFAULT_SYSTEM = "{% if messages[0].role != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}" + CHATML
FORGETFUL = (  # shows thoughts only in the last turn, as templates of reasoning models do
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if loop.last and message.role == 'assistant' %}<think></think>{% endif %}"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOLS = (
    "{{ tools | tojson if tools }}"
    "{% for m in messages %}{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }};{% endfor %}"
)


def only(texts: tuple[Rendered, ...]) -> Rendered:
    (text,) = texts
    return text


def trained(rendered: Rendered) -> list[str]:
    return [rendered.text[start:end] for start, end in rendered.spans]


def test_protocol_when_tokenizer_is_hugging_faces_then_it_has_all_we_need(tokenizer: PreTrainedTokenizerFast):
    assert isinstance(tokenizer, Tokenizer)
    assert not isinstance(object(), Tokenizer)


def test_chat_when_rendered_then_assistant_turns_with_their_end_markers_are_trained(tokenizer: PreTrainedTokenizerFast):
    rendered = only(Renderer(ChatTemplate(tokenizer)).render(CHAT, WHERE))
    assert trained(rendered) == ["hello<|im_end|>\n", "bye<|im_end|>\n"]
    assert rendered.text.startswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nhello<|im_end|>")
    assert not rendered.is_bare


def test_chat_when_a_turn_is_not_trained_then_only_the_others_are(tokenizer: PreTrainedTokenizerFast):
    quiet = Conversation((ChatTurn("user", "hi"), ChatTurn("assistant", "hello"), *CHAT.turns[2:]))
    assert trained(only(Renderer(ChatTemplate(tokenizer)).render(quiet, WHERE))) == ["bye<|im_end|>\n"]


def test_chat_when_trained_on_inputs_then_everything_is_trained(tokenizer: PreTrainedTokenizerFast):
    rendered = only(Renderer(ChatTemplate(tokenizer), train_on_inputs=True).render(CHAT, WHERE))
    assert trained(rendered) == [rendered.text]


def test_chat_when_the_template_adds_a_system_prompt_then_it_is_not_trained():
    rendered = only(Renderer(ChatTemplate(make_tokenizer(template=DEFAULT_SYSTEM))).render(CHAT, WHERE))
    assert rendered.text.startswith("<|im_start|>system\nYou help.")
    assert trained(rendered) == ["hello<|im_end|>\n", "bye<|im_end|>\n"]


def test_chat_when_the_job_has_its_own_template_then_it_wins(tokenizer: PreTrainedTokenizerFast):
    own = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}|{% endfor %}{{ 'a:' if add_generation_prompt }}"
    rendered = only(Renderer(ChatTemplate(tokenizer, own)).render(CHAT, WHERE))
    assert rendered.text == "u:hi|a:hello|u:more|a:bye|"
    assert trained(rendered) == ["hello|", "bye|"]


def test_chat_when_trained_on_inputs_then_a_template_that_rewrites_history_gives_one_sample():
    rendered = only(
        Renderer(ChatTemplate(make_tokenizer(template=FORGETFUL)), train_on_inputs=True).render(CHAT, WHERE)
    )
    assert trained(rendered) == [rendered.text]


def test_chat_when_history_is_masked_then_only_the_last_answer_is_trained(tokenizer: PreTrainedTokenizerFast):
    for template in (CHATML, FORGETFUL):
        renderer = Renderer(ChatTemplate(make_tokenizer(template=template)), mask_history=True)
        rendered = only(renderer.render(CHAT, WHERE))
        assert trained(rendered) == [("<think></think>" if template == FORGETFUL else "") + "bye<|im_end|>\n"]
        assert "hello<|im_end|>" in rendered.text


def test_chat_when_the_template_refuses_then_the_error_names_the_line_and_its_words():
    strict = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(
        DataError, match=rf"^{WHERE}: the chat template refuses this conversation: roles must alternate\."
    ):
        only(Renderer(ChatTemplate(make_tokenizer(template=strict))).render(CHAT, WHERE))
    with pytest.raises(DataError, match="the chat template refuses this conversation"):
        only(Renderer(ChatTemplate(make_tokenizer(template="{{ messages[0].content + 1 }}"))).render(CHAT, WHERE))


def test_template_when_not_jinja_then_is_a_config_error(tokenizer: PreTrainedTokenizerFast):
    with pytest.raises(ConfigError, match="chat_template: 'chatml' is not a Jinja template"):
        ChatTemplate(tokenizer, "chatml")
    with pytest.raises(ConfigError, match=r"chat_template: is not a valid Jinja template: .* \(line 1\)"):
        only(Renderer(ChatTemplate(tokenizer, "{% for x in %}")).render(CHAT, WHERE))


def test_chat_when_there_is_no_template_then_the_error_suggests_to_set_one(base_tokenizer: PreTrainedTokenizerFast):
    with pytest.raises(
        DataError, match=rf"^{WHERE}: the row is a chat, but .* has no chat template\. Set chat_template"
    ):
        only(Renderer(ChatTemplate(base_tokenizer)).render(CHAT, WHERE))


def test_completion_when_there_is_a_template_then_is_rendered_as_turns(tokenizer: PreTrainedTokenizerFast):
    assert trained(only(Renderer(ChatTemplate(tokenizer)).render(PAIR, WHERE))) == ["hello<|im_end|>\n"]


def test_completion_when_there_is_no_template_then_is_joined_as_it_is(base_tokenizer: PreTrainedTokenizerFast):
    rendered = only(Renderer(ChatTemplate(base_tokenizer)).render(PAIR, WHERE))
    assert (rendered.text, trained(rendered), rendered.is_bare) == ("hihello", ["hello"], True)
    both = Conversation((ChatTurn("system", "be kind"), *PAIR.turns), is_chat=False)
    assert only(Renderer(ChatTemplate(base_tokenizer)).render(both, WHERE)).text == "be kind\n\nhihello"
    assert trained(only(Renderer(ChatTemplate(base_tokenizer), train_on_inputs=True).render(PAIR, WHERE))) == [
        "hihello"
    ]


def test_text_when_rendered_then_is_all_trained_and_blank_text_is_nothing(tokenizer: PreTrainedTokenizerFast):
    rendered = only(Renderer(ChatTemplate(tokenizer)).render(Text("once"), WHERE))
    assert (trained(rendered), rendered.is_bare) == (["once"], True)
    assert only(Renderer(ChatTemplate(tokenizer)).render(Text(" \n"), WHERE)).text == ""


def call_turn() -> Conversation:
    calls = [{"type": "function", "function": {"name": "f", "arguments": {"x": "é"}}}]
    turns = (ChatTurn("user", "go"), ChatTurn("assistant", "", True, {"tool_calls": calls}))
    return Conversation(turns, tools=({"name": "f"},))


def test_tools_when_the_template_knows_them_then_it_gets_them():
    renderer = Renderer(ChatTemplate(make_tokenizer(template=TOOLS)))
    assert not renderer.ignores_tools
    assert only(renderer.render(call_turn(), WHERE)).text == (
        '[{"name": "f"}]go;[{"type": "function", "function": {"name": "f", "arguments": {"x": "é"}}}];'
    )


def test_tool_calls_when_the_template_does_not_know_them_then_they_are_text(tokenizer: PreTrainedTokenizerFast):
    renderer = Renderer(ChatTemplate(tokenizer))
    assert renderer.ignores_tools
    assert trained(only(renderer.render(call_turn(), WHERE))) == ['{"name": "f", "arguments": {"x": "é"}}<|im_end|>\n']


def test_tool_calls_when_nested_too_deeply_to_write_then_is_a_data_error(tokenizer: PreTrainedTokenizerFast):
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    calls = [{"function": {"name": "f", "arguments": {"x": deep}}}]
    form = Conversation((ChatTurn("user", "go"), ChatTurn("assistant", "", True, {"tool_calls": calls})))
    with pytest.raises(DataError, match=rf"^{WHERE}: the chat template refuses this conversation"):
        only(Renderer(ChatTemplate(tokenizer)).render(form, WHERE))


def test_template_when_there_are_several_then_the_one_for_tools_is_used_with_tools(tokenizer: PreTrainedTokenizerFast):
    several = make_tokenizer()
    several.chat_template = {"default": CHATML, "tool_use": TOOLS}
    assert trained(only(Renderer(ChatTemplate(several)).render(PAIR, WHERE))) == ["hello<|im_end|>\n"]
    assert only(Renderer(ChatTemplate(several)).render(call_turn(), WHERE)).text.startswith('[{"name": "f"}]go;')


def test_prompt_when_rendered_then_ends_where_the_model_writes(
    tokenizer: PreTrainedTokenizerFast, base_tokenizer: PreTrainedTokenizerFast
):
    rendered, reference = Renderer(ChatTemplate(tokenizer)).render_prompt(CHAT, WHERE)
    assert rendered.text.endswith("<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n")
    assert reference == "bye"
    rendered, reference = Renderer(ChatTemplate(tokenizer)).render_prompt(Conversation(CHAT.turns[:3]), WHERE)
    assert rendered.text.endswith("more<|im_end|>\n<|im_start|>assistant\n")
    assert reference is None
    rendered, reference = Renderer(ChatTemplate(base_tokenizer)).render_prompt(PAIR, WHERE)
    assert (rendered.text, rendered.is_bare, reference) == ("hi", True, "hello")
    assert Renderer(ChatTemplate(tokenizer)).render_prompt(Text("once"), WHERE)[0].text == "once"
