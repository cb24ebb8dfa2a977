"""From a chunk of rows to samples: converted, rendered, tokenised, and kept if they fit.

The result depends only on the chunk and a few facts about its file, so chunks can be converted in order or in parallel.
"""

from __future__ import annotations

import datetime
import functools
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from weft.data.chat.chat_template import ChatTemplate, Tokenizer
from weft.data.chat.renderer import Renderer
from weft.data.conversation import Conversation, Form, Passage, Tokens, Words
from weft.data.formats import convert_rows, refuse_media
from weft.data.prepared.sieve import LengthFilter, RowCounts
from weft.data.rows.columns import ColumnMap
from weft.data.rows.row import Row
from weft.data.sample import Sample
from weft.data.samples import Samples
from weft.data.tokens.tokenise import sample_of_passage, sample_of_tokens, sample_of_words, tokenise
from weft.errors import ConfigError, DataError
from weft.objectives.distillation import Distillation
from weft.objectives.heads.classes import Classification
from weft.objectives.heads.head_objective import HeadObjective
from weft.objectives.objective import Objective, Part
from weft.objectives.registry import OBJECTIVES, SUPERVISED, choose_objective
from weft.objectives.teacher_columns import IDS


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """Settings for reading, rendering, masking and cutting rows; the fields are those of a job."""

    objective: str
    data_format: str
    data_columns: Mapping[str, str | int]
    max_length: int
    long_samples: str
    train_on_inputs: bool
    mask_history: bool
    chat_template: str | None
    """Template used instead of the tokenizer's."""
    group_texts: bool = False
    """True if texts are joined and cut in blocks of max_length."""
    labels: tuple[str, ...] = ()
    """Names of classes, for objectives with classes."""
    clock: datetime.datetime | None
    """Time for chat templates that read it; None for the current time."""


@dataclass(frozen=True)
class ConvertedChunk:
    """The result of a chunk."""

    samples: Samples
    rows: npt.NDArray[np.int64]
    """Row of every group, counted from the first of the chunk."""
    account: RowCounts
    data_format: str
    objective: str
    """Objective that its samples were made for."""
    claimed: str
    """Objective that its columns need."""

    @classmethod
    def empty(cls, objective: Objective) -> ConvertedChunk:
        name = objective.name
        return cls(Samples.of([]), np.empty(0, np.int64), RowCounts(), "", objective=name, claimed=name)


class RowGroups(NamedTuple):
    """The result of one row."""

    groups: list[list[Sample]]
    is_split_by_objective: bool
    """True if the objective made several groups of it."""


@dataclass(frozen=True)
class Converter:
    """Converts rows for one tokenizer and one set of settings."""

    tokenizer: Tokenizer
    settings: DataSettings

    def __reduce__(self) -> tuple[Any, ...]:
        """Leaves cached objects behind when a converter is sent to another process."""
        return Converter, (self.tokenizer, self.settings)

    @functools.cached_property
    def renderer(self) -> Renderer:
        """The renderer; a template that is not valid is a ConfigError."""
        settings = self.settings
        template = ChatTemplate(self.tokenizer, settings.chat_template, settings.clock)
        return Renderer(template, settings.train_on_inputs, settings.mask_history)

    def convert(self, read: Sequence[Row], *, objective: str, first_format: str | None) -> ConvertedChunk:
        """The samples of some rows of one source; a row that is wrong is a DataError naming it.

        `objective` is that of the rows so far, at first the job's. If that is `auto` and a row here needs another one,
        the chunk has no samples, only that objective. `first_format` is the detected format of the source's first rows,
        None for those.
        """
        settings = self.settings
        named = ColumnMap(settings.data_columns)
        rows = [named.apply(row) for row in read]
        claimed = choose_objective("auto", [row.values for row in rows])
        chosen = claimed if objective == "auto" else OBJECTIVES[objective]
        if isinstance(chosen, Classification):
            chosen = type(chosen)(settings.labels)
        if settings.objective == "auto" and is_before(claimed, chosen):
            return ConvertedChunk.empty(claimed)
        if not rows:
            return ConvertedChunk.empty(chosen)
        data_format, forms, groups = _convert(rows, chosen, settings.data_format, first_format, self.renderer)
        max_length = settings.max_length
        if settings.group_texts:
            _check_grouped(data_format, chosen)
            max_length = sys.maxsize
        keeps_end = isinstance(chosen, HeadObjective) and chosen.labels_end
        sieve = LengthFilter(max_length, settings.long_samples, keeps_end=keeps_end)
        if isinstance(chosen, Distillation):
            _check_teachers(rows, groups)
        for row, of_row in zip(rows, groups, strict=True):
            sieve.take_row(of_row.groups, row.where, is_split_by_objective=of_row.is_split_by_objective)
        if self.renderer.ignores_tools:
            sieve.account.num_without_tools = sum(1 for form in forms if isinstance(form, Conversation) and form.tools)
        return ConvertedChunk(
            samples=Samples.of(sieve.kept),
            rows=np.array(sieve.rows, dtype=np.int64),
            account=sieve.account,
            data_format=data_format,
            objective=chosen.name,
            claimed=claimed.name,
        )


def is_before(one: Objective, other: Objective) -> bool:
    """True if an objective takes precedence over another one where rows need both."""
    names = list(OBJECTIVES)
    return names.index(one.name) < names.index(other.name)


def _convert(
    rows: Sequence[Row], objective: Objective, data_format: str, first_format: str | None, renderer: Renderer
) -> tuple[str, list[Form], list[RowGroups]]:
    of_rows = [objective.parts(row.values, row.where) for row in rows]
    parts = [(row.where, part) for row, several in zip(rows, of_rows, strict=True) for part in several]
    made = [Row(part.values, where) for where, part in parts]
    if objective.part_format is not None:
        for row in rows:
            # What objectives make of a row has only the columns that they know.
            refuse_media(row, is_stated=data_format != "auto")
        _check_stated(data_format, objective)
        data_format = objective.part_format
    data_format, forms = convert_rows(made, data_format, first_format=first_format)
    pairs = zip(parts, make_samples(made, forms, renderer), strict=True)
    samples = iter([[_counted(s, part, objective, where) for s in several] for (where, part), several in pairs])
    groups = [
        _groups(list(itertools.islice(samples, len(several))), objective, row.where)
        for row, several in zip(rows, of_rows, strict=True)
    ]
    return data_format, forms, groups


def _check_grouped(data_format: str, objective: Objective) -> None:
    """ConfigError if rows are not texts that could be joined."""
    if data_format != "text" or objective is not SUPERVISED:
        what = f"in the {data_format} format" if data_format != "text" else f"for objective {objective.name}"
        raise ConfigError(f"joins plain texts, and the rows are {what}.", where="group_texts")


def _check_stated(data_format: str, objective: Objective) -> None:
    """ConfigError for a set format without answers where these are needed; the columns decide the rest."""
    if data_format in ("text", "tokens") and objective.part_format == "auto":
        raise ConfigError(
            f"got {data_format}; objective {objective.name} reads a prompt and answers to it, in columns it knows: "
            "leave it out.",
            where="data_format",
        )


def make_samples(rows: Sequence[Row], forms: Sequence[Form], renderer: Renderer) -> Iterator[list[Sample]]:
    """The samples of each row, in order, of any length."""
    texts = [
        () if isinstance(form, Tokens | Passage | Words) else renderer.render(form, row.where)
        for row, form in zip(rows, forms, strict=True)
    ]
    tokenised = tokenise([text for several in texts for text in several], renderer.tokenizer)
    for row, form, several in zip(rows, forms, texts, strict=True):
        if isinstance(form, Tokens):
            yield [sample_of_tokens(form, renderer.tokenizer, renderer.train_on_inputs, row.where)]
        elif isinstance(form, Passage):
            yield [sample_of_passage(form, renderer.tokenizer)]
        elif isinstance(form, Words):
            yield [sample_of_words(form, renderer.tokenizer, row.where)]
        else:
            yield [next(tokenised) for _ in several]


def _check_teachers(rows: Sequence[Row], groups: Sequence[RowGroups]) -> None:
    """DataError for the first row whose teacher gives another number of tokens than the one before."""
    known = None
    for row, of_row in zip(rows, groups, strict=True):
        for sample in itertools.chain(*of_row.groups):
            number = 0 if sample.teacher is None else sample.teacher.ids.shape[1]
            if known not in (None, number):
                problem = f"holds {number} tokens of its teacher for each token"
                raise DataError(
                    f"{problem}, and the rows before it {known}; give all the same number.", where=row.where
                )
            known = number


def _groups(parts: Sequence[Sequence[Sample]], objective: Objective, where: str) -> RowGroups:
    """The groups of a row's parts: each sample by itself, or one group of what belongs together."""
    if objective.group_size == 1:
        return RowGroups([[sample] for part in parts for sample in part], len(parts) > 1)
    if any(len(part) > 1 for part in parts):
        raise DataError(
            f"has several answers that the chat template shows otherwise once later turns follow, and objective "
            f"{objective.name} needs them in one sample.",
            where=where,
            hint="Set mask_history to train the last answer only, or another chat_template.",
        )
    return RowGroups([[part[0] for part in parts]], is_split_by_objective=False)


def _counted(sample: Sample, part: Part, objective: Objective, where: str) -> Sample:
    """The sample with its weight and its label; weights that its objective does not accept are a DataError."""
    if (objective is SUPERVISED or isinstance(objective, Distillation)) and sample.weights is not None:
        problem = f"messages have weights besides 0 and 1, which objective {objective.name} does not know"
        raise DataError(f"{problem}{'; set it to weighted' if objective is SUPERVISED else ''}.", where=where)
    sample = sample.weighted(part.weight)
    if part.teacher is not None:
        if len(part.teacher.ids) != sample.num_supervised:
            problem = f"{IDS} has {len(part.teacher.ids)} items"
            raise DataError(f"{problem}, but {sample.num_supervised} tokens are supervised.", where=where)
        sample = sample.with_teacher(*part.teacher)
    if part.label is None:
        return sample
    return sample.labelled_end(part.label) if isinstance(objective, HeadObjective) else sample.labelled(part.label)
