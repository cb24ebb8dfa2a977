"""Generates the text the tiny backbone is trained on: endless, seeded, and free of the demo's skills in chat form.

A document is a run of characters; control characters stand for the special tokens, so that a corpus is one array of
bytes. Words that `weft.cli.demo` holds out for evaluation are left out here as well.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
from tiny_rules import CHAT_RULES, OTHER_RULES, SKILL_RULES, NamedRule, Rule
from tiny_words import (
    ACCENTED,
    ANIMALS,
    ARROWS,
    COLOURS,
    FRAMES,
    LETTERS,
    LINE_ENDS,
    NAMES,
    PLACES,
    SEQUENCES,
    SIZES,
    SMALL_TALK,
    SYSTEM_PROMPTS,
    THINGS,
    VERBS,
)

from weft.cli.demo import held_out, pseudo_word

SPECIAL_TOKENS = ("<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
"""Token i of this list is written as the character chr(i) and has the id 256 + i."""

T = TypeVar("T")

END, SYSTEM, USER, ASSISTANT = "\x01", "\x02", "\x03", "\x04"


class Writer:
    """Draws documents; the same seed gives the same documents."""

    def __init__(self, seed: int, *, words: int = 40_000) -> None:
        self.rng = random.Random(f"tiny text {seed}")
        self._draw = self.rng.random
        self._words = [w for w in (self._new_word() for _ in range(words)) if not held_out(w)]
        documents: list[tuple[int, Callable[[], str]]] = [
            (44, self.rule_block),
            (24, self.rule_chat),
            (6, self.small_talk),
            (4, self.facts_chat),
            (8, self.sums),
            (5, self.key_values),
            (4, self.sequence),
            (3, self.letters_of_a_word),
            (4, self.sentences),
            (4, self.copies),
        ]
        self._documents = [write for weight, write in documents for _ in range(weight)]

    def document(self) -> str:
        """The next document; it ends with the end token."""
        text = self.pick(self._documents)()
        return text if text.endswith(END) else text + END

    # ---- material

    def pick(self, items: Sequence[T]) -> T:
        """One item of a sequence; several times as fast as random.choice, and this is the inner loop."""
        return items[int(self._draw() * len(items))]

    def below(self, bound: int) -> int:
        """A whole number from 0 to bound - 1."""
        return int(self._draw() * bound)

    def _new_word(self) -> str:
        if self._draw() < 0.65:
            shortest = 3 + self.below(4)
            return pseudo_word(self.rng, shortest, shortest + 3)
        return "".join(self.pick(LETTERS) for _ in range(3 + self.below(6)))

    def prompt(self, kind: str) -> str:
        """A prompt of a kind (word, phrase, numbers) that is not held out."""
        while True:
            if kind == "word":
                return self.pick(self._words)
            if kind == "phrase":
                text = " ".join(self.pick(self._words)[:6] for _ in range(2 + self.below(3)))
            else:
                text = f"{self.number()}+{self.number()}"
            if not held_out(text):
                return text

    def number(self) -> int:
        """A number below 100, most often of two digits."""
        return 10 + self.below(90) if self._draw() < 0.85 else self.below(10)

    # ---- plain text

    def rule_block(self) -> str:
        """Examples of one rule, one after the other, in one of many notations."""
        rule = self.pick(SKILL_RULES) if self._draw() < 0.6 else self.pick(OTHER_RULES)
        apply, title = rule.apply, rule.name
        if rule.kind == "word" and self._draw() < 0.12:
            apply, title = self._two_rules()
        head = f"{title}{self.pick((':', '', ' words:', '.'))}\n" if self._draw() < 0.3 else ""
        return head + self.examples(rule.kind, apply, 3 + self.below(13))

    def _two_rules(self) -> tuple[Rule, str]:
        words = [rule for rule in (*SKILL_RULES, *OTHER_RULES) if rule.kind == "word"]
        simple = (
            "reverse",
            "shout",
            "double",
            "sort",
            "without first",
            "without last",
            "rotate left",
            "swap ends",
            "twice",
        )
        first = self.pick([rule for rule in words if rule.name in simple and rule.name != "shout"])
        second = self.pick([rule for rule in words if rule.name in simple])
        return (lambda word: second.apply(first.apply(word))), f"{first.name}, {second.name}"

    def examples(self, kind: str, apply: Rule, count: int) -> str:
        """`count` lines of prompt and answer in one notation."""
        if self._draw() < 0.2:
            before, arrow, after = self.pick(FRAMES)
        else:
            before, arrow, after = self.pick(("", "", "", "- ", "* ")), self.pick(ARROWS), self.pick(LINE_ENDS)
        prompts = [self.prompt(kind) for _ in range(count)]
        return "".join([f"{before}{prompt}{arrow}{apply(prompt)}{after}" for prompt in prompts])

    def sums(self) -> str:
        """Sums and differences of small numbers in several notations."""
        form = self.pick(("{a}+{b}={c}", "{a} + {b} = {c}", "{a} plus {b} is {c}", "{c} = {a} + {b}", "{c}-{b}={a}"))
        lines = []
        for _ in range(4 + self.below(12)):
            a, b = self.prompt("numbers").split("+")
            lines.append(form.format(a=a, b=b, c=int(a) + int(b)))
        return self.pick(("\n", "; ", ", ")).join(lines) + "\n"

    def key_values(self) -> str:
        """A table of keys and values, and look-ups in it."""
        keys = list(dict.fromkeys(self.pick(self._words) for _ in range(3 + self.below(5))))
        table = {key: str(self.number()) if self._draw() < 0.4 else self.pick(self._words) for key in keys}
        arrow, after = self.pick(("=", ": ", " is ", " -> ")), self.pick(("\n", "; ", ", "))
        asked = [self.pick(keys) for _ in range(2 + self.below(4))]
        head = after.join(f"{key}{arrow}{value}" for key, value in table.items())
        return f"{head}\n" + "".join(f"{key}? {table[key]}\n" for key in asked)

    def sequence(self) -> str:
        """A known order, forwards or backwards: letters, capitals, days, months, numbers."""
        items = [str(n) for n in range(100)] if self._draw() < 0.3 else self.pick(SEQUENCES)
        start, step = self.below(len(items)), self.pick((1, 1, 1, 2, -1))
        count = 5 + self.below(20)
        return self.pick((" ", ", ", "\n", "")).join(items[(start + step * i) % len(items)] for i in range(count))

    def letters_of_a_word(self) -> str:
        """What there is to say about the letters of some words."""
        lines = []
        for _ in range(2 + self.below(4)):
            word = self.pick(self._words)
            place = self.below(len(word))
            after = word[place + 1] if place + 1 < len(word) else "the end"
            lines.append(
                self.pick(
                    (
                        f"{word} has {len(word)} letters: {', '.join(word)}.",
                        f"{word} starts with {word[0]} and ends with {word[-1]}.",
                        f"letter {place + 1} of {word} is {word[place]}.",
                        f"{word}: {' '.join(f'{i + 1}{letter}' for i, letter in enumerate(word))}",
                        f"{word}: {' '.join(letter + letter.upper() for letter in word)}",
                        f"in {word}, {word[place]} comes before {after}.",
                        f"{word} in capitals is {word.upper()}.",
                    )
                )
            )
        return "\n".join(lines)

    def sentences(self) -> str:
        """Simple English."""
        return " ".join(self._sentence() for _ in range(2 + self.below(5)))

    def _sentence(self) -> str:
        pick = self.pick
        return pick(
            (
                f"The {pick(SIZES)} {pick(ANIMALS)} {pick(VERBS)} the {pick(COLOURS)} {pick(THINGS)}.",
                f"{pick(NAMES)} {pick(VERBS)} a {pick(COLOURS)} {pick(ANIMALS)} {pick(PLACES)}.",
                f"There are {2 + self.below(9)} {pick(ANIMALS)}s {pick(PLACES)}.",
                f"{pick(NAMES)} and {pick(NAMES)} have a {pick(THINGS)}, a {pick(THINGS)} and a {pick(THINGS)}.",
                f"Is the {pick(THINGS)} {pick(COLOURS)}? No, it is {pick(COLOURS)}.",
            )
        )

    def copies(self) -> str:
        """Strings of any characters, each repeated, so that every byte has been seen."""
        alphabet = self.pick((LETTERS, string.printable[:95], ACCENTED, ACCENTED + LETTERS))
        lines = []
        for _ in range(2 + self.below(4)):
            text = "".join(self.pick(alphabet) for _ in range(3 + self.below(8)))
            lines.append(" ".join([text] * (2 + self.below(2))))
        return "\n".join(lines)

    # ---- chats

    def rule_chat(self) -> str:
        """A chat in which the assistant follows one open rule, which only its own turns reveal."""
        rule = self._chat_rule()
        turns = [(prompt, rule.apply(prompt)) for prompt in (self.prompt(rule.kind) for _ in range(1 + self.below(6)))]
        named = rule.name if self._draw() < 0.15 else None
        return self.chat(turns, system=named)

    def _chat_rule(self) -> NamedRule:
        # Most often the assistant repeats what it gets: an untrained backbone then has a definite, wrong first guess.
        kind = self.pick(("word", "word", "word", "phrase", "numbers"))
        rules = [rule for rule in CHAT_RULES if rule.kind == kind]
        return rules[0] if self._draw() < 0.3 else self.pick(rules)

    def small_talk(self) -> str:
        """A friendly chat, with requests to repeat something."""
        turns = []
        for _ in range(1 + self.below(3)):
            if self._draw() < 0.5:
                turns.append(self.pick(SMALL_TALK))
            else:
                text = self.pick((self._sentence, lambda: self.prompt("word"), lambda: self.prompt("phrase")))()
                turns.append((self.pick(("say {}", "repeat: {}", "please write {}", "{}")).format(text), text))
        return self.chat(turns, system=self.pick(SYSTEM_PROMPTS) if self._draw() < 0.3 else None)

    def facts_chat(self) -> str:
        """A chat about something the user has just said."""
        pick = self.pick
        name, animal, thing, colour = pick(NAMES), pick(ANIMALS), pick(THINGS), pick(COLOURS)
        called = pick(self._words).capitalize()
        turns = [
            (f"My {animal} is called {called}. What is my {animal} called?", f"{called}."),
            (f"The {thing} is {colour}. What colour is the {thing}?", f"The {thing} is {colour}."),
            (f"{name} has {2 + self.below(8)} {animal}s. Who has {animal}s?", f"{name}."),
            (f"I live {pick(PLACES)}. My name is {name}. What is my name?", f"Your name is {name}."),
        ]
        self.rng.shuffle(turns)
        return self.chat(turns[: 1 + self.below(2)])

    def chat(self, turns: list[tuple[str, str]], system: str | None = None) -> str:
        """The turns as the tokenizer's chat template writes them."""
        head = f"{SYSTEM}{system}{END}" if system else ""
        return head + "".join([f"{USER}{prompt}{END}{ASSISTANT}{answer}{END}" for prompt, answer in turns])


def shard(seed: int, num_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    """At least `num_bytes` of text as bytes, and the place where each document starts."""
    writer = Writer(seed)
    parts: list[bytes] = []
    starts: list[int] = []
    size = 0
    while size < num_bytes:
        starts.append(size)
        parts.append(writer.document().encode())
        size += len(parts[-1])
    return np.frombuffer(b"".join(parts), dtype=np.uint8), np.array(starts, dtype=np.int64)
