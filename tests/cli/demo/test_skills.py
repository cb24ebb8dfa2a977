"""Skills give valid, deterministic, disjoint and correct chat rows."""

import itertools
import json
import random

import pytest

from weft.cli.demo import SKILLS, held_out, pseudo_word, write_skill
from weft.errors import ConfigError, StorageError


def pairs(name: str, count: int = 40, split: str = "train") -> list[tuple[str, str]]:
    rows = SKILLS[name].rows(0, count, split=split)
    return [(row["messages"][0]["content"], row["messages"][1]["content"]) for row in rows]


@pytest.mark.parametrize("name", SKILLS)
def test_rows_of_every_skill_are_short_chats(name: str) -> None:
    rows = SKILLS[name].rows(3, 100)
    assert len(rows) == 100
    for row in rows:
        assert [message["role"] for message in row["messages"]] == ["user", "assistant"]
        prompt, answer = (message["content"] for message in row["messages"])
        assert prompt.isascii()
        assert answer
        assert answer.isascii()
        assert answer != prompt
        # Two role tokens and two end tokens come on top.
        assert 10 <= len(prompt) + len(answer) + 4 <= 40


@pytest.mark.parametrize("name", SKILLS)
def test_rows_when_drawn_twice_are_equal_and_depend_on_the_seed(name: str) -> None:
    skill = SKILLS[name]
    assert skill.rows(1, 30) == skill.rows(1, 30)
    assert skill.rows(1, 30) != skill.rows(2, 30)
    assert skill.rows(1, 30) == skill.rows(1, 60)[:30]


@pytest.mark.parametrize("name", SKILLS)
def test_prompts_of_the_two_splits_are_disjoint_and_never_repeat(name: str) -> None:
    train = [prompt for prompt, _ in pairs(name, 2000)]
    held = [prompt for prompt, _ in pairs(name, 100, "eval")]
    assert len(set(train)) == 2000
    assert len(set(held)) == 100
    assert not set(train) & set(held)
    assert all(map(held_out, held))


def test_one_prompt_has_a_different_answer_in_every_word_skill() -> None:
    expected = {
        "reverse": "tenalp",
        "shout": "PLANET",
        "drop_vowels": "plnt",
        "sort": "aelnpt",
        "double": "ppllaanneett",
        "next_letter": "qmbofu",
        "spell": "p-l-a-n-e-t",
        "pig_latin": "lanetpay",
    }
    assert {name: SKILLS[name].answer("planet") for name in expected} == expected
    assert SKILLS["next_letter"].answer("zoo") == "app"
    assert SKILLS["add"].answer("27+58") == "85"
    assert SKILLS["acronym"].answer("red oak tin") == "ROT"


def test_answers_of_drawn_rows_are_right_by_another_way() -> None:
    for prompt, answer in pairs("reverse"):
        assert all(answer[-1 - i] == letter for i, letter in enumerate(prompt))
    for prompt, answer in pairs("sort"):
        assert all(a <= b for a, b in itertools.pairwise(answer))
        assert all(answer.count(letter) == prompt.count(letter) for letter in prompt + answer)
    for prompt, answer in pairs("double"):
        assert answer[::2] == answer[1::2] == prompt
    for prompt, answer in pairs("add"):
        assert int(answer) - int(prompt[:2]) == int(prompt[3:])
    for prompt, answer in pairs("next_letter"):
        assert all((ord(b) - ord(a)) % 26 == 1 for a, b in zip(prompt, answer, strict=True))


def test_rows_when_there_are_not_enough_then_reports_how_many_there_are() -> None:
    with pytest.raises(ConfigError, match=r"^skill add: the eval split has only \d+ rows, not 5000\.$"):
        SKILLS["add"].rows(0, 5000, split="eval")


def test_pseudo_words_stay_within_their_length() -> None:
    rng = random.Random(0)
    words = [pseudo_word(rng, 3, 5) for _ in range(500)]
    assert {len(word) for word in words} == {3, 4, 5}
    assert len(set(words)) > 300


def test_write_skill_writes_both_splits_as_json_lines(tmp_path) -> None:
    train, held = write_skill(tmp_path / "a" / "shout", "shout", train=20, held=7)
    assert (train.name, held.name) == ("train.jsonl", "eval.jsonl")
    assert [json.loads(line) for line in train.read_text().splitlines()] == SKILLS["shout"].rows(0, 20)
    assert [json.loads(line) for line in held.read_text().splitlines()] == SKILLS["shout"].rows(0, 7, split="eval")


def test_write_skill_when_the_directory_is_a_file_then_reports_it(tmp_path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(StorageError, match=r"taken.*cannot be written"):
        write_skill(tmp_path / "taken", "shout", train=1, held=1)
