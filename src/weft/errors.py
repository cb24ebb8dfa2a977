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

The text of an error says where it happened, what was found, and what would be right.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, Self


class WeftError(Exception):
    """A mistake with a clear sentence; the command line prints it and exits with 2."""

    code = "error"

    def __init__(self, message: str, *, where: str | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.where = where
        """File, line or field the error is about, e.g. `train.jsonl line 17`."""
        self.hint = hint
        """What to do about it, when the message alone does not say."""

    def at(self, where: str | None, hint: str | None = None) -> Self:
        """The same error, said of another place; a hint that is given replaces its own."""
        moved = copy.copy(self)
        moved.where, moved.hint = where, hint or self.hint
        return moved

    def __str__(self) -> str:
        text = f"{self.where}: {self.message}" if self.where else self.message
        return f"{text} {self.hint}" if self.hint else text


class ConfigError(WeftError):
    """A jobs file, an override or an option is wrong."""

    code = "config"


class WrongTypeError(ConfigError):
    """A setting has a value of another type than it accepts."""

    accepted: tuple[Any, ...] = ()
    """The types that the setting accepts."""
    value: Any = None
    """What was found."""

    @classmethod
    def of(cls, message: str, where: str | None, accepted: tuple[Any, ...], value: Any) -> Self:
        """The error of one setting."""
        error = cls(message, where=where)
        error.accepted, error.value = accepted, value
        return error


class DataError(WeftError):
    """A data file or one of its lines is wrong."""

    code = "data"
    setting: str | None = None
    """`train_data` or `eval_data`: which data of a job it is about, where that is known."""


class ModelError(WeftError):
    """A backbone cannot be loaded or is not supported."""

    code = "model"


class AdapterFileError(WeftError):
    """An adapter directory cannot be read or does not fit the backbone."""

    code = "adapter_file"


class StorageError(WeftError):
    """A directory cannot be written, is full, or is in use."""

    code = "storage"


class CheckpointError(WeftError):
    """A checkpoint is damaged or belongs to another job."""

    code = "checkpoint"


class JobError(WeftError):
    """One job cannot go on; its neighbours can."""

    code = "job"


class PlanError(WeftError):
    """What is to be planned cannot be done within its limits."""

    code = "plan_error"


class MissingExtraError(WeftError):
    """An optional package is needed and not installed."""

    code = "missing_extra"


def install_command(extra: str) -> str:
    """What installs an extra of Weft beside the copy that runs: its package, or its folder if that is a clone."""
    folder = Path(__file__).parents[2]
    name = str(folder) if (folder / "pyproject.toml").is_file() else "weft-lora"
    return f"pip install {'-e ' if name != 'weft-lora' else ''}'{name}[{extra}]'"


def first_line(error: Exception) -> str:
    """What another library says is wrong, as part of a sentence."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


def closest(word: str, accepted: list[str]) -> str | None:
    """The accepted word a user most likely meant, or None when nothing is near."""
    import difflib

    matches = difflib.get_close_matches(word, accepted, n=1, cutoff=0.6)
    return matches[0] if matches else None
