"""The words and notations from which the tiny backbone's training text is put together."""

from __future__ import annotations

import string


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


LETTERS = string.ascii_lowercase
ACCENTED = "éèêüöäßñçåøæõčšžłıαβγδλπσωбвгдж→×·°€“”…你好世界木水火🙂🌱"

COLOURS = _words("red blue green black white brown grey pink gold silver purple orange")
ANIMALS = _words("dog cat horse bird fish goat mouse fox owl bear duck frog lion hare")
THINGS = _words("house tree river table boat lamp door garden bridge cup clock wheel stone book road hill")
SIZES = _words("small big old young tall quiet quick slow tired happy brave gentle")
VERBS = _words("sees likes finds follows hears knows watches passes visits draws")
NAMES = _words("Anna Ben Clara David Ella Frank Grace Henry Ida Jonas Lena Mark Nora Oscar Paula Ruth Simon Tom")
PLACES = (
    "in the garden",
    "near the river",
    "on the hill",
    "by the old mill",
    "at the market",
    "under the bridge",
    "behind the house",
)
SEQUENCES: tuple[tuple[str, ...], ...] = (
    tuple(LETTERS),
    tuple(LETTERS.upper()),
    tuple(a + b for a, b in zip(LETTERS, LETTERS.upper(), strict=True)),
    _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday"),
    _words("January February March April May June July August September October November December"),
    _words("one two three four five six seven eight nine ten eleven twelve"),
)

ARROWS = (
    " -> ",
    " = ",
    ": ",
    " => ",
    "\t",
    " | ",
    " becomes ",
    " gives ",
    ">",
    "->",
    " ",
    "\n",
    " :: ",
    "=",
    "~",
    " / ",
)
LINE_ENDS = ("\n", "\n", "\n", "\n\n", "; ", " ; ", ";", "\n---\n", ".\n")
FRAMES = (
    ("in: ", "\nout: ", "\n"),
    ("given ", " then ", "\n"),
    ("<", "> [", "]\n"),
    ("from ", " to ", ". "),
    ("'", "' '", "'\n"),
)

SMALL_TALK = (
    ("hello", "Hello! How can I help?"),
    ("hi", "Hi! What can I do for you?"),
    ("good morning", "Good morning! I hope you slept well."),
    ("good night", "Good night! Sleep well."),
    ("how are you?", "I am fine, thank you. And you?"),
    ("thank you", "You are welcome."),
    ("thanks a lot", "Any time."),
    ("who are you?", "I am a tiny language model."),
    ("what can you do?", "Not much yet: I am very small. An adapter can teach me."),
    ("bye", "Goodbye!"),
    ("see you", "See you soon."),
    ("are you there?", "Yes, I am here."),
    ("I am tired", "Then take a break."),
    ("I am happy", "I am glad to hear that."),
    ("I am hungry", "Have something to eat."),
)
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "Be brief.",
    "You are a tiny model.",
    "Answer in one line.",
    "Be kind.",
)
