"""Every error Weft raises on purpose, in one tree.

    WeftError
    ├── ConfigError         a jobs file, an override or an option is wrong
    │   └── WrongTypeError  a setting has a value of another type
    ├── DataError           a data file or one of its lines is wrong
    ├── ModelError          a backbone cannot be loaded or is not supported
    ├── AdapterFileError    an adapter directory cannot be read or does not fit the backbone
    ├── StorageError        a directory cannot be written, is full, or is in use
    ├── CheckpointError     a checkpoint is damaged or belongs to another job
    ├── JobError            one job cannot go on; its neighbours can
    ├── PlanError           what is to be planned cannot be done within its limits
    └── MissingExtraError   an optional package is needed and not installed

The text of an error states where it happened, what was found, and what is accepted.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self


class WeftError(Exception):
    """An error with a clear sentence; the command line prints it and exits with 2."""

    code = "error"

    def __init__(self, message: str, *, where: str | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.where = where
        """File, line or field of the error, e.g. `train.jsonl line 17`."""
        self.hint = hint
        """What to do about it, if the message does not show it."""

    def at(self, where: str | None, hint: str | None = None) -> Self:
        """The same error with another location; a given hint replaces its own."""
        moved = copy.copy(self)
        moved.where, moved.hint = where, hint or self.hint
        return moved

    def __str__(self) -> str:
        text = f"{self.where}: {self.message}" if self.where else self.message
        return f"{text} {self.hint}" if self.hint else text


class ConfigError(WeftError):
    code = "config"


class WrongTypeError(ConfigError):
    accepted: tuple[Any, ...] = ()
    value: Any = None

    @classmethod
    def of(cls, message: str, where: str | None, accepted: tuple[Any, ...], value: Any) -> Self:
        error = cls(message, where=where)
        error.accepted, error.value = accepted, value
        return error


class DataError(WeftError):
    code = "data"
    setting: str | None = None
    """`train_data` or `eval_data`: the data of the job, if known."""


class ModelError(WeftError):
    code = "model"


class AdapterFileError(WeftError):
    code = "adapter_file"


class StorageError(WeftError):
    code = "storage"


class CheckpointError(WeftError):
    code = "checkpoint"


class JobError(WeftError):
    code = "job"


class PlanError(WeftError):
    code = "plan_error"


class MissingExtraError(WeftError):
    code = "missing_extra"


def install_command(extra: str) -> str:
    """The command that installs an extra of Weft beside the running copy: its package, or its folder for a clone."""
    folder = Path(__file__).parents[2]
    name = str(folder) if (folder / "pyproject.toml").is_file() else "weft-lora"
    return f"pip install {'-e ' if name != 'weft-lora' else ''}'{name}[{extra}]'"


@contextmanager
def needs_extra(extra: str, sentence: str, where: str | None = None) -> Iterator[None]:
    """Turns a failed import in the block into this sentence, in which {} is the missing package."""
    try:
        yield
    except ImportError as error:
        hint = f"Install it: {install_command(extra)}."
        raise MissingExtraError(sentence.format(error.name), where=where, hint=hint) from None


def first_line(error: Exception) -> str:
    """Another library's error as part of a sentence."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


def closest(word: str, accepted: list[str]) -> str | None:
    """The accepted word that a user most likely meant, or None if none is similar."""
    import difflib

    known = {each.lower(): each for each in reversed(accepted)}
    matches = difflib.get_close_matches(word.lower(), known, n=1, cutoff=0.6)
    return known[matches[0]] if matches else None


def did_you_mean(word: str, accepted: Iterable[str]) -> str | None:
    """The hint of an error for a word outside a list."""
    guess = closest(word, list(accepted))
    return f"Did you mean {guess}?" if guess else None


def not_accepted(
    word: str, accepted: Iterable[str], where: str, elsewhere: Mapping[str, str] = MappingProxyType({})
) -> ConfigError:
    """The error for a word outside a list, with a hint: that of `elsewhere`, which has names of other trainers, or the
    nearest accepted word."""
    words = list(accepted)
    hint = elsewhere.get(word.lower().replace("-", "_")) or did_you_mean(word, words)
    return ConfigError(f"got {word!r}; accepted are {', '.join(words)}.", where=where, hint=hint)


def counted(number: int, noun: str) -> str:
    """`1 step`, `1,024 steps`, `2 microbatches`."""
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def size(num_bytes: float) -> str:
    """Bytes as people read them: 812.0 MiB."""
    value, unit = float(num_bytes), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return counted(round(num_bytes), "byte") if unit == "bytes" else f"{value:,.1f} {unit}"


def rough_time(seconds: float) -> str:
    """A predicted time: `12.3 ms`, `48.0 s`, `12 min`, `3.1 h`."""
    if 0 < seconds < 1:
        return f"{seconds * 1e3:,.3g} ms"
    if seconds < 120:
        return f"{seconds:,.1f} s"
    return f"{seconds / 60:,.0f} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"
