"""A jobs file that trains, and how to write down what breaks it: the change, and the messages that it must get."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

JOBS = """\
base_model: tiny
output_dir: out
defaults:
  max_length: 64
  max_steps: 1
  lora: {rank: 4}
jobs:
  - name: one
    train_data: rows.jsonl
  - name: two
    data: rows.jsonl
    lr: 1e-3
"""
"""A jobs file that trains. Every case breaks it in one place."""

BASE, OUT, LENGTH, LORA, NAME, LR = (
    "base_model: tiny",
    "output_dir: out",
    "max_length: 64",
    "lora: {rank: 4}",
    "name: two",
    "lr: 1e-3",
)
DATA = f"data: rows.jsonl\n    {LR}"
CHAT = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
JOB_NAME_RULE = "use a to z, A to Z, digits, '.', '_' and '-', starting with a letter or digit, at most 64."


@dataclass(frozen=True)
class Case:
    """One mistake, and the messages that it must get."""

    name: str
    messages: tuple[str, ...]
    """How the sentence begins, and what else is in it."""
    edit: tuple[str, str] = ("", "")
    """A part of the jobs file, and what stands there instead."""
    text: str | None = None
    """A whole jobs file instead."""
    args: tuple[str, ...] = ("jobs.yaml",)
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    """Further files in the working directory."""


def at(line: int, setting: str) -> str:
    return f"jobs.yaml line {line}: {setting}: "


def top(setting: str, *messages: str) -> Case:
    """A setting of the run that cannot be, on the third line."""
    return Case(setting, (at(3, setting.partition(":")[0]), *messages), (OUT, f"{OUT}\n{setting}"))


def job(setting: str, own_name: str, *messages: str) -> Case:
    """A setting of the second job that cannot be; errors call it by its own name."""
    return Case(setting, (at(13, f"jobs.1.{own_name}"), *messages), (LR, f"{LR}\n    {setting}"))


def lora(settings: str, own_name: str, *messages: str, owner: str = "defaults") -> Case:
    """A setting of the adapter that cannot be, in itself or on this backbone (then the first job is its owner)."""
    return Case(settings, (at(6, f"{owner}.adapter.{own_name}"), *messages), (LORA, f"lora: {{{settings}}}"))


def rate(value: str, *messages: str) -> Case:
    return Case(f"lr {value}", (at(12, "jobs.1.learning_rate"), *messages), (LR, f"lr: {value}"))


def named(name: str, *messages: str) -> Case:
    return Case(f"name {name[:12]}", (at(10, "jobs.1.name"), *messages), (NAME, f"name: {name}"))


def data(name: str, content: str | bytes, *messages: str, file: str = "bad.jsonl", more: str = "") -> Case:
    """A data file that cannot be trained on."""
    return Case(name, messages, (DATA, f"data: {file}\n    {LR}{more}"), files={file: content})


def source(name: str, *messages: str) -> Case:
    """A data source that cannot be read at all."""
    return Case(f"data {name}", messages, (DATA, f"data: {name}\n    {LR}"))


def model(name: str, *messages: str) -> Case:
    """A base model that cannot be loaded; see `models`."""
    return Case(f"model {name}", (f"base_model MODELS/{name}: ", *messages), (BASE, f"base_model: MODELS/{name}"))


def override(text: str, *messages: str) -> Case:
    return Case(f"override {text}", messages, args=("jobs.yaml", text))
