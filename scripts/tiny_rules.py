"""The string rules the tiny backbone meets before any adapter: prompt in, answer out, by kind of prompt.

A rule is either *open* (shown in plain text and in chats) or *plain* (never shown in a chat). Every skill of the demo
is plain: the backbone has seen what it takes to reverse a word, but no chat in which the assistant does so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from weft.cli.demo import SKILLS

Rule = Callable[[str], str]

KIND_OF_SKILL = {"add": "numbers", "acronym": "phrase"}
"""Kind of prompt of a skill; the others take a word."""

VOWELS = "aeiou"


def _previous_letter(word: str) -> str:
    return "".join("z" if letter == "a" else chr(ord(letter) - 1) for letter in word)


def _swap_pairs(word: str) -> str:
    return "".join(word[i : i + 2][::-1] for i in range(0, len(word), 2))


def _word_rules() -> dict[str, Rule]:
    return {
        "echo": lambda w: w,
        "first": lambda w: w[0],
        "last": lambda w: w[-1],
        "without first": lambda w: w[1:],
        "without last": lambda w: w[:-1],
        "swap ends": lambda w: w[-1] + w[1:-1] + w[0],
        "rotate left": lambda w: w[1:] + w[0],
        "rotate right": lambda w: w[-1] + w[:-1],
        "twice": lambda w: f"{w} {w}",
        "length": lambda w: str(len(w)),
        "title": str.capitalize,
        "dots": ".".join,
        "star vowels": lambda w: "".join("*" if letter in VOWELS else letter for letter in w),
        "first three": lambda w: w[:3],
        "last three": lambda w: w[-3:],
        "brackets": lambda w: f"({w})",
        "every second": lambda w: w[::2],
        "swap pairs": _swap_pairs,
        "end capital": lambda w: w[:-1] + w[-1].upper(),
        "with s": lambda w: w + "s",
        "double first": lambda w: w[0] + w,
    }


def _phrase_rules() -> dict[str, Rule]:
    return {
        "echo": lambda p: p,
        "first word": lambda p: p.split()[0],
        "last word": lambda p: p.split()[-1],
        "middle word": lambda p: p.split()[1],
        "words backwards": lambda p: " ".join(p.split()[::-1]),
        "joined": lambda p: p.replace(" ", ""),
        "dashes": lambda p: p.replace(" ", "-"),
        "titles": str.title,
        "commas": lambda p: p.replace(" ", ", "),
        "last letters": lambda p: "".join(word[-1] for word in p.split()),
    }


def _number_rules() -> dict[str, Rule]:
    return {
        "echo": lambda p: p,
        "left": lambda p: p.split("+")[0],
        "right": lambda p: p.split("+")[1],
        "swapped": lambda p: "+".join(p.split("+")[::-1]),
        "spaced": lambda p: p.replace("+", " + "),
        "larger": lambda p: str(max(map(int, p.split("+")))),
        "smaller": lambda p: str(min(map(int, p.split("+")))),
    }


OPEN_RULES: dict[str, dict[str, Rule]] = {"word": _word_rules(), "phrase": _phrase_rules(), "numbers": _number_rules()}
"""Rules by kind and name that chats may show."""

PLAIN_RULES: dict[str, dict[str, Rule]] = {
    "word": {
        "previous letter": _previous_letter,
        "sort down": lambda w: "".join(sorted(w, reverse=True)),
        "only vowels": lambda w: "".join(letter for letter in w if letter in VOWELS) or "-",
        "spaces": " ".join,
        "backwards capitals": lambda w: w[::-1].upper(),
        "commas": ", ".join,
    },
    "phrase": {"initials": lambda p: "".join(word[0] for word in p.split()), "shout words": str.upper},
    "numbers": {"plus one": lambda p: str(int(p.split("+")[0]) + 1)},
}
"""Further rules that, like the skills, only plain text shows."""


@dataclass(frozen=True)
class NamedRule:
    """A rule with its kind of prompt and the name a heading may give it."""

    kind: str
    name: str
    apply: Rule


SKILL_RULES: tuple[NamedRule, ...] = tuple(
    NamedRule(KIND_OF_SKILL.get(name, "word"), name.replace("_", " "), skill.answer) for name, skill in SKILLS.items()
)
"""The demo's skills as rules of plain text."""

CHAT_RULES: tuple[NamedRule, ...] = tuple(
    NamedRule(kind, name, rule) for kind, rules in OPEN_RULES.items() for name, rule in rules.items()
)
"""The rules a chat may show."""

OTHER_RULES: tuple[NamedRule, ...] = CHAT_RULES + tuple(
    NamedRule(kind, name, rule) for kind, rules in PLAIN_RULES.items() for name, rule in rules.items()
)
"""Every rule that is no skill."""
