"""What a controller asks of a job as it is now, and how its rank finds the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.data.prompts import Prompt
    from weft.engine.engine import Engine
    from weft.engine.inference.generate import Decoding


@dataclass(frozen=True)
class Question:
    """Something about a job; by itself, only where it stands."""


@dataclass(frozen=True)
class ScoreQuery(Question):
    """How well it does on its evaluation data."""


@dataclass(frozen=True)
class AnswerQuery(Question):
    """What it answers to prompts."""

    prompts: Sequence[Prompt]
    decoding: Decoding


@dataclass(frozen=True)
class AdapterQuery(Question):
    """Its adapter, written to a directory that all processes see."""

    directory: Path


def answer_to(question: Question, engine: Engine, job: str) -> Any:
    """What the engine that has the job finds."""
    match question:
        case ScoreQuery():
            return engine.evaluate(job)
        case AnswerQuery(prompts, decoding):
            return engine.answer(job, prompts, decoding)
        case AdapterQuery(directory):
            engine.export_adapter(job, directory)
    return None
