"""Small generated tasks, of which `weft demo`, `weft init` and the tests make data sets.

They differ only in what the assistant does with a bare prompt:

    planet    → tenalp                 reverse
    planet    → PLANET                 shout
    27+58     → 85                     add
    red oak tin → ROT                  acronym

A prompt never names its skill, so a backbone without an adapter cannot know the answer, and adapters of different
skills must really differ. Words are made of syllables, so that there are far more of them than any job sees. A prompt
belongs to the training or to the evaluation split by its own checksum: the two are disjoint whatever the seeds.
"""

from __future__ import annotations

import json
import random
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.errors import ConfigError, StorageError, did_you_mean

SPLITS = ("train", "eval")

ONSETS = (*"bcdfghjklmnprstvwyz", "bl", "br", "cl", "cr", "dr", "fl", "gr", "pl", "pr", "sl", "st", "tr")
VOWELS = tuple("aeiou")
CODAS = ("", "", "", *"bdgklmnprstx", "nd", "st")
# Random syllables now and then spell an offensive word.
UNWANTED = re.compile(
    "rap[ei]|naz|pen[ie]|cum|t[ei]t|n[ei]g|fag|slut|sex|dil|homo|pus|cun|di[ck]|fu[ck]|coc?k|bit|rect|sati"
)


def pseudo_word(rng: random.Random, shortest: int = 4, longest: int = 7) -> str:
    """A pronounceable lower-case word of `shortest` to `longest` letters."""
    while True:
        word = ""
        while len(word) < shortest:
            word += rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(CODAS)
        if len(word) <= longest and not UNWANTED.search(word):
            return word


def held_out(prompt: str) -> bool:
    """True if a prompt belongs to the evaluation split, as about one in ten does."""
    return zlib.crc32(prompt.encode()) % 10 == 0


def _next_letter(word: str) -> str:
    return "".join("a" if letter == "z" else chr(ord(letter) + 1) for letter in word)


def _acronym(words: str) -> str:
    return "".join(word[0].upper() for word in words.split())


def _drop_vowels(word: str) -> str:
    return "".join(letter for letter in word if letter not in VOWELS)


def _two_numbers(rng: random.Random) -> str:
    return f"{rng.randint(10, 99)}+{rng.randint(10, 99)}"


def _phrase(rng: random.Random) -> str:
    return " ".join(pseudo_word(rng, 3, 4) for _ in range(3))


@dataclass(frozen=True)
class Skill:
    """One task: how its prompts are drawn, and the one right answer to each."""

    name: str
    description: str
    answer: Callable[[str], str]
    prompt: Callable[[random.Random], str] = pseudo_word

    def rows(self, seed: int, count: int, *, split: str = "train") -> list[dict[str, Any]]:
        """`count` different OpenAI chat rows of one split; the same seed gives the same rows."""
        if split not in SPLITS:
            raise ConfigError(f"got {split!r}; accepted are {', '.join(SPLITS)}.", where="split")
        rng = random.Random(f"{self.name} {split} {seed}")
        # The cap only matters to `add`, whose prompts are few enough to run out of.
        prompts: dict[str, None] = {}
        for _ in range(1000 + 50 * count):
            if len(prompts) == count:
                break
            prompt = self.prompt(rng)
            # A prompt that is its own answer would let a backbone that only echoes score.
            if held_out(prompt) == (split == "eval") and self.answer(prompt) != prompt:
                prompts[prompt] = None
        if len(prompts) < count:
            raise ConfigError(
                f"the {split} split has only {len(prompts)} rows, not {count}.", where=f"skill {self.name}"
            )
        return [_row(prompt, self.answer(prompt)) for prompt in prompts]


def _row(prompt: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]}


SKILLS: dict[str, Skill] = {
    skill.name: skill
    for skill in (
        Skill("reverse", "Writes the word backwards.", lambda word: word[::-1]),
        Skill("shout", "Writes the word in capitals.", str.upper),
        Skill("drop_vowels", "Leaves out a, e, i, o and u.", _drop_vowels),
        Skill("sort", "Puts the letters in alphabetical order.", lambda word: "".join(sorted(word))),
        Skill("double", "Writes every letter twice.", lambda word: "".join(letter * 2 for letter in word)),
        Skill("next_letter", "Replaces every letter by the next one of the alphabet.", _next_letter),
        Skill("spell", "Puts a hyphen between the letters.", "-".join),
        Skill("pig_latin", "Moves the first letter to the end and adds ay.", lambda word: word[1:] + word[0] + "ay"),
        Skill("add", "Adds two numbers.", lambda task: str(sum(map(int, task.split("+")))), _two_numbers),
        Skill("acronym", "Takes the first letters, in capitals.", _acronym, _phrase),
    )
}


def write_skill(directory: Path, name: str, *, seed: int = 0, train: int = 2000, held: int = 64) -> tuple[Path, Path]:
    """Writes `train.jsonl` and `eval.jsonl` of one skill into a directory and returns the two paths."""
    if name not in SKILLS:
        hint = did_you_mean(name, SKILLS)
        raise ConfigError(f"there is no skill {name!r}; there are {', '.join(SKILLS)}.", where="skill", hint=hint)
    paths = (directory / "train.jsonl", directory / "eval.jsonl")
    for path, split, count in zip(paths, SPLITS, (train, held), strict=True):
        lines = [json.dumps(row) + "\n" for row in SKILLS[name].rows(seed, count, split=split)]
        try:
            directory.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(lines), encoding="utf-8")
        except OSError as error:
            raise StorageError(f"cannot be written ({error.strerror}).", where=str(path)) from None
    return paths
