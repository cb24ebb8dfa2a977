"""What is trained of a chat, with all the ways in which chat templates are built."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from template_structures import STRUCTURES, Structure
from tiny_tokenizer import make_tokenizer
from transformers import PreTrainedTokenizerFast

from weft.data.chat_template import ChatTemplate
from weft.data.chats import ChatTurn, Conversation, Rendered
from weft.data.render import MAX_RENDERED_ALL, train_answers
from weft.errors import DataError

WHERE = "train.jsonl line 17"
SYSTEM = ChatTurn("system", "be kind")


def chat(num_answers: int, *, system: bool = False) -> Conversation:
    turns = [SYSTEM] if system else []
    for i in range(num_answers):
        turns += [ChatTurn("user", f"turn {i}?"), ChatTurn("assistant", f"answer {i}.", trained=True)]
    return Conversation(tuple(turns))


def answers_of(rendered: Sequence[Rendered]) -> list[tuple[str, str]]:
    """What stands before each answer, and the answer, in the order of the turns."""
    return [(text.text[:start], text.text[start:end]) for text in rendered for start, end in text.spans]


CASES = [
    pytest.param(structure, system, id=f"{name}{'-with-system' * system}")
    for name, structure in STRUCTURES.items()
    for system in ((False, True) if structure.takes_system else (False,))
]


@pytest.mark.parametrize(("structure", "system"), CASES)
def test_chat_when_it_has_several_turns_then_each_answer_follows_what_the_model_will_meet(
    structure: Structure, system: bool
):
    """Every answer is trained once, whole, after the very text that the model is given to answer."""
    template = ChatTemplate(make_tokenizer(template=structure.template))
    form = chat(3, system=system)
    rendered = train_answers(form, template, WHERE)
    assert len(rendered) == (3 if structure.splits == "all" or (structure.splits == "system" and system) else 1)
    found = answers_of(rendered)
    assert len(found) == 3
    for i, (before, answer) in enumerate(found):
        prompt = form.turns[: 2 * i + 1 + system]
        assert before == template.apply(prompt, form, WHERE, generation=True)
        assert f"answer {i}." in answer
        assert "ask" not in answer


@pytest.mark.parametrize("structure", [s for s in STRUCTURES.values() if not s.splits], ids=lambda s: s.name)
def test_chat_when_it_is_long_then_its_spans_are_those_of_rendering_every_turn(
    structure: Structure, monkeypatch: pytest.MonkeyPatch
):
    """The short way of a long chat finds what the long way finds."""
    template = ChatTemplate(make_tokenizer(template=structure.template))
    form = chat(MAX_RENDERED_ALL + 4)
    short = train_answers(form, template, WHERE)
    monkeypatch.setattr("weft.data.render.MAX_RENDERED_ALL", 10**9)
    assert train_answers(form, template, WHERE) == short


class CountingTokenizer:
    """A tokenizer that counts how often it renders, and how many turns in all."""

    def __init__(self, inner: PreTrainedTokenizerFast) -> None:
        self._inner = inner
        self.num_turns = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __len__(self) -> int:
        return len(self._inner)

    def __call__(self, text: list[str], **options: Any) -> Any:
        return self._inner(text, **options)

    def apply_chat_template(self, conversation: list[dict[str, Any]], **options: Any) -> Any:
        self.num_turns += len(conversation)
        return self._inner.apply_chat_template(conversation, **options)


@pytest.mark.parametrize("name", ["chatml", "llama2", "phi3", "command-a", "gemma3", "mistral-v3"])
def test_chat_when_its_turns_double_then_so_does_the_work(name: str):
    """Finding the answers takes work in proportion to the turns."""

    def turns_rendered(num_answers: int) -> int:
        tokenizer = CountingTokenizer(make_tokenizer(template=STRUCTURES[name].template))
        train_answers(chat(num_answers), ChatTemplate(tokenizer), WHERE)
        return tokenizer.num_turns

    # Two samples for the first and last answers of each kind, before and through them.
    assert turns_rendered(200) <= 12 * 400
    assert turns_rendered(400) <= 2.1 * turns_rendered(200)


def test_chat_when_a_template_shows_one_turn_in_the_middle_otherwise_then_its_span_is_right():
    """Where the text around a turn is new, a long chat is looked at there too."""
    odd = (
        "{% for m in messages %}{{ m.role }}:{{ '#' if loop.index0 == 15 }}{{ m.content }};{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    form = chat(MAX_RENDERED_ALL + 4)
    found = answers_of(train_answers(form, ChatTemplate(make_tokenizer(template=odd)), WHERE))
    assert [answer for _, answer in found] == [f"{'#' * (i == 7)}answer {i}.;" for i in range(MAX_RENDERED_ALL + 4)]


def test_chat_when_its_content_has_our_marks_then_it_is_rendered_turn_by_turn():
    """Data may hold the characters that mark contents."""
    template = ChatTemplate(make_tokenizer())
    plain = chat(MAX_RENDERED_ALL + 4)
    turns = (ChatTurn("user", "\ue0b03+\ue0b1"), *plain.turns[1:])
    found = answers_of(train_answers(Conversation(turns), template, WHERE))
    assert [answer for _, answer in found] == [f"answer {i}.<|im_end|>\n" for i in range(MAX_RENDERED_ALL + 4)]


def test_chat_when_one_question_takes_several_answers_then_those_share_a_sample():
    """With calls of tools, all that follows one question is one sample even where history is rewritten."""
    template = ChatTemplate(make_tokenizer(template=STRUCTURES["qwen3"].template))
    turns = (
        *chat(1).turns,
        ChatTurn("user", "look"),
        ChatTurn("assistant", "looking", trained=True),
        ChatTurn("tool", "seen"),
        ChatTurn("assistant", "done", trained=True),
    )
    rendered = train_answers(Conversation(turns), template, WHERE)
    assert [len(text.spans) for text in rendered] == [1, 2]


def test_chat_when_the_prompt_opens_a_thought_that_the_template_cuts_off_then_the_thought_is_trained_behind_it():
    """As DeepSeek-R1's template does with the thoughts in contents."""
    r1 = (
        "{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}{% else %}"
        "<|Assistant|>{{ m.content.split('</think>')[-1].lstrip() }}<|end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
    )
    template = ChatTemplate(make_tokenizer(template=r1))
    thought = ChatTurn("assistant", "<think>\nhm\n</think>\n\nanswer 0.", trained=True)
    for last, trained in ((thought, "hm\n</think>\n\nanswer 0.<|end|>"), (chat(1).turns[1], "answer 0.<|end|>")):
        form = Conversation((ChatTurn("user", "ask"), last))
        assert answers_of(train_answers(form, template, WHERE)) == [("<|User|>ask<|Assistant|><think>\n", trained)]


def test_chat_when_the_template_marks_answers_and_opens_them_with_more_then_they_follow_what_the_model_will_meet():
    structure = STRUCTURES["olmo3-generation"]
    opened = structure.template.replace("assistant\n{% endif %}", "assistant\n<think>{% endif %}")
    assert opened != structure.template
    template = ChatTemplate(make_tokenizer(template=opened))
    ((before, answer),) = answers_of(train_answers(chat(1), template, WHERE))
    assert (before[-8:], answer) == ("\n<think>", "answer 0.<|im_end|>")


def test_opening_when_a_template_shows_answered_questions_in_another_way_then_there_is_none():
    for name, opening in (("deepseek-r1", "<think>\n"), ("chatml", ""), ("mistral-v3", "")):
        assert ChatTemplate(make_tokenizer(template=STRUCTURES[name].template)).prompt_opening == opening
    marked = "{% for m in messages %}{{ '!' if loop.last }}{{ m.content }}{% endfor %}"
    assert ChatTemplate(make_tokenizer(template=marked)).prompt_opening == ""


def test_chat_when_its_template_marks_answers_then_those_are_trained():
    """`{% generation %}` marks what is trained, here without the newline after the end marker."""
    template = ChatTemplate(make_tokenizer(template=STRUCTURES["olmo3-generation"].template))
    quiet = chat(2)
    form = Conversation((quiet.turns[0], ChatTurn("assistant", "not this"), *quiet.turns[2:]))
    assert [answer for _, answer in answers_of(train_answers(form, template, WHERE))] == ["answer 1.<|im_end|>"]


def test_chat_when_turns_follow_the_last_answer_then_they_stay_in_its_sample():
    """What comes after the last answer is context that is not trained."""
    form = Conversation((*chat(2).turns, ChatTurn("user", "bye")))
    (rendered,) = train_answers(form, ChatTemplate(make_tokenizer()), WHERE)
    assert rendered.text.endswith("bye<|im_end|>\n")
    assert len(rendered.spans) == 2
    rewriting = ChatTemplate(make_tokenizer(template=STRUCTURES["gemma4"].template))
    assert len(train_answers(form, rewriting, WHERE)) == 2


def test_chat_when_an_answer_cannot_be_separated_from_its_question_then_reports_it():
    """A template that turns everything round shows no border."""
    backwards = (
        "{% for m in messages[::-1] %}{{ m.role }}:{{ m.content }};{% endfor %}{{ '>' if add_generation_prompt }}"
    )
    with pytest.raises(DataError, match=rf"^{WHERE}: the chat template renders the turns before an answer otherwise"):
        train_answers(chat(2), ChatTemplate(make_tokenizer(template=backwards)), WHERE)
