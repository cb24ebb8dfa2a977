"""The tiny backbone's training text is deterministic, and no chat in it gives a skill away."""

import sys
from pathlib import Path

import pytest

from weft.cli.demo import SKILLS, held_out

SCRIPTS = Path(__file__).parents[3] / "scripts"


@pytest.fixture
def tiny_text(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import tiny_text

    yield tiny_text
    for name in ("tiny_text", "tiny_rules", "tiny_words"):
        sys.modules.pop(name, None)


def answers_in_chats(documents: list[str]) -> list[tuple[str, str]]:
    found = []
    for document in documents:
        for turn in document.split("\x03")[1:]:
            prompt, answer = turn.split("\x01\x04")
            found.append((prompt, answer.split("\x01")[0]))
    return found


def is_answer(skill, prompt: str, answer: str) -> bool:
    word = prompt.isascii() and prompt.isalpha() and prompt.islower()
    if skill.name == "add":
        fits = prompt.replace("+", "").isdigit() and prompt.count("+") == 1
    elif skill.name == "acronym":
        fits = len(prompt.split()) == 3 and prompt.replace(" ", "").isalpha()
    else:
        fits = word and len(prompt) >= 4
    return fits and answer != prompt and skill.answer(prompt) == answer


def test_chats_of_the_training_text_do_not_show_the_skills(tiny_text) -> None:
    writer = tiny_text.Writer(5, words=4000)
    turns = answers_in_chats([writer.document() for _ in range(8000)])
    assert len(turns) > 3000
    for skill in SKILLS.values():
        # Short words now and then give two rules the same answer, as in toot → toot.
        assert sum(is_answer(skill, *turn) for turn in turns) <= len(turns) / 500, skill.name


def test_plain_text_shows_the_skills_but_no_held_out_word(tiny_text) -> None:
    writer = tiny_text.Writer(6, words=4000)
    lines = [line for _ in range(8000) for line in writer.document().split("\n")]
    examples = [line.split(" -> ") for line in lines if line.count(" -> ") == 1]
    for name in ("reverse", "sort", "next_letter"):
        shown = [prompt for prompt, answer in examples if is_answer(SKILLS[name], prompt, answer)]
        assert shown
        assert not any(map(held_out, shown))


def test_shard_when_made_twice_is_equal_and_marks_where_documents_start(tiny_text) -> None:
    text, starts = tiny_text.shard(1, 20_000)
    again, _ = tiny_text.shard(1, 20_000)
    other, _ = tiny_text.shard(2, 20_000)
    assert text.tobytes() == again.tobytes() != other.tobytes()
    assert starts[0] == 0
    # A document ends with the end token, and the next one follows it.
    assert set(text[starts[1:] - 1]) == {1}
    assert text[-1] == 1
