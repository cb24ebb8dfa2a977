"""From a chunk of rows to samples: converted, rendered, tokenised, and kept if they fit.

What becomes of a chunk depends on nothing but the chunk and a few words about its file, so chunks can be converted one
after the other or side by side.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from weft.data.chat.chat_template import ChatTemplate, Tokenizer
from weft.data.chat.renderer import Renderer
from weft.data.conversation import Conversation, Form, Passage, Tokens, Words
from weft.data.formats import convert_rows, refuse_media
from weft.data.prepared.settings import DataSettings
from weft.data.prepared.sieve import Account, Sieve
from weft.data.rows.column_map import ColumnMap
from weft.data.rows.row import Row
from weft.data.sample import Sample
from weft.data.samples import Samples
from weft.data.tokens.labelled import sample_of_passage, sample_of_words
from weft.data.tokens.tokenise import sample_of_tokens, tokenise
from weft.errors import ConfigError, DataError
from weft.objectives.distillation import Distillation
from weft.objectives.heads.classes import Classification
from weft.objectives.heads.head_objective import HeadObjective
from weft.objectives.objective import Objective, Part
from weft.objectives.registry import OBJECTIVES, SUPERVISED, choose_objective
from weft.objectives.teacher_columns import IDS


@dataclass(frozen=True)
class ConvertedChunk:
    """What became of a chunk."""

    samples: Samples
    rows: npt.NDArray[np.int64]
    """The row of every group, counted from the first of the chunk."""
    account: Account
    data_format: str
    objective: str
    """What its samples were made for."""
    claimed: str
    """The objective that its columns ask for."""

    @classmethod
    def empty(cls, objective: Objective) -> ConvertedChunk:
        """No samples, only what they would be made for."""
        name = objective.name
        return cls(Samples.of([]), np.empty(0, np.int64), Account(), "", objective=name, claimed=name)


class RowGroups(NamedTuple):
    """What became of one row."""

    groups: list[list[Sample]]
    is_told_apart: bool
    """Whether the objective made several groups of it."""


@dataclass(frozen=True)
class Converter:
    """Converts rows for one tokenizer and one way of reading data."""

    tokenizer: Tokenizer
    settings: DataSettings

    def __reduce__(self) -> tuple[Any, ...]:
        """What is made on the way stays here when a converter is sent to another process."""
        return Converter, (self.tokenizer, self.settings)

    @functools.cached_property
    def renderer(self) -> Renderer:
        """What makes text of rows; a template that is none is a ConfigError."""
        settings = self.settings
        template = ChatTemplate(self.tokenizer, settings.chat_template, settings.clock)
        return Renderer(template, settings.train_on_inputs, settings.mask_history)

    def convert(self, read: Sequence[Row], *, objective: str, first_format: str | None) -> ConvertedChunk:
        """The samples of some rows of one source; a row that is wrong is a DataError naming it.

        `objective` is what the rows so far are converted for, at first what the job says. Where that was `auto` and a
        row here asks for another one, the chunk has no samples, only that objective. `first_format` is what the first
        rows of the source turned out to be, None for those.
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
        found, forms, groups = _convert(rows, chosen, settings.data_format, first_format, self.renderer)
        max_length = settings.max_length
        if settings.group_texts:
            _check_grouped(found, chosen)
            max_length = sys.maxsize
        keeps_end = isinstance(chosen, HeadObjective) and chosen.labels_end
        sieve = Sieve(max_length, settings.long_samples, keeps_end=keeps_end)
        if isinstance(chosen, Distillation):
            _check_teachers(rows, groups)
        for row, of_row in zip(rows, groups, strict=True):
            sieve.take_row(of_row.groups, row.where, is_told_apart=of_row.is_told_apart)
        if self.renderer.ignores_tools:
            sieve.account.num_without_tools = sum(1 for form in forms if isinstance(form, Conversation) and form.tools)
        return ConvertedChunk(
            samples=Samples.of(sieve.kept),
            rows=np.array(sieve.rows, dtype=np.int64),
            account=sieve.account,
            data_format=found,
            objective=chosen.name,
            claimed=claimed.name,
        )


def is_before(one: Objective, other: Objective) -> bool:
    """Whether an objective is chosen before another one where rows ask for both."""
    names = list(OBJECTIVES)
    return names.index(one.name) < names.index(other.name)


def _convert(
    rows: Sequence[Row], objective: Objective, data_format: str, first_format: str | None, renderer: Renderer
) -> tuple[str, list[Form], list[RowGroups]]:
    """The format of the rows, the forms of their parts, and the groups of samples of each row."""
    of_rows = [objective.parts(row.values, row.where) for row in rows]
    parts = [(row.where, part) for row, several in zip(rows, of_rows, strict=True) for part in several]
    made = [Row(part.values, where) for where, part in parts]
    if objective.part_format is not None:
        for row in rows:
            # What objectives make of a row has only the columns that they know.
            refuse_media(row, is_stated=data_format != "auto")
        _check_stated(data_format, objective)
        data_format = objective.part_format
    found, forms = convert_rows(made, data_format, first_format=first_format)
    pairs = zip(parts, make_samples(made, forms, renderer), strict=True)
    samples = iter([[_counted(s, part, objective, where) for s in several] for (where, part), several in pairs])
    groups = [
        _groups(list(itertools.islice(samples, len(several))), objective, row.where)
        for row, several in zip(rows, of_rows, strict=True)
    ]
    return found, forms, groups


def _check_grouped(data_format: str, objective: Objective) -> None:
    """ConfigError where rows are no texts that could be joined."""
    if data_format != "text" or objective is not SUPERVISED:
        what = f"in the {data_format} format" if data_format != "text" else f"for objective {objective.name}"
        raise ConfigError(f"joins plain texts, and the rows are {what}.", where="group_texts")


def _check_stated(data_format: str, objective: Objective) -> None:
    """ConfigError for a stated format without answers where these are needed; the rest, the columns tell."""
    if data_format in ("text", "tokens") and objective.part_format == "auto":
        raise ConfigError(
            f"got {data_format}; objective {objective.name} reads a prompt and answers to it, in columns it knows: "
            "leave it out.",
            where="data_format",
        )


def make_samples(rows: Sequence[Row], forms: Sequence[Form], renderer: Renderer) -> Iterator[list[Sample]]:
    """The samples of each row, in order, of whatever length."""
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
    """DataError for the first row whose teacher names another number of tokens than the one before."""
    known = None
    for row, of_row in zip(rows, groups, strict=True):
        for sample in itertools.chain(*of_row.groups):
            number = 0 if sample.teacher is None else sample.teacher.ids.shape[1]
            if known not in (None, number):
                found = f"holds {number} tokens of its teacher for each token"
                raise DataError(f"{found}, and the rows before it {known}; give all the same number.", where=row.where)
            known = number


def _groups(parts: Sequence[Sequence[Sample]], objective: Objective, where: str) -> RowGroups:
    """The groups that a row's parts make: each sample by itself, or one group of what belongs together."""
    if objective.group_size == 1:
        return RowGroups([[sample] for part in parts for sample in part], len(parts) > 1)
    if any(len(part) > 1 for part in parts):
        raise DataError(
            f"has several answers that the chat template shows otherwise once later turns follow, and objective "
            f"{objective.name} needs them in one sample.",
            where=where,
            hint="Set mask_history to train the last answer only, or another chat_template.",
        )
    return RowGroups([[part[0] for part in parts]], is_told_apart=False)


def _counted(sample: Sample, part: Part, objective: Objective, where: str) -> Sample:
    """The sample as much as it counts, with its label; weights that its objective would not name are a DataError."""
    if (objective is SUPERVISED or isinstance(objective, Distillation)) and sample.weights is not None:
        found = f"messages have weights besides 0 and 1, which objective {objective.name} does not know"
        raise DataError(f"{found}{'; set it to weighted' if objective is SUPERVISED else ''}.", where=where)
    sample = sample.weighted(part.weight)
    if part.teacher is not None:
        if len(part.teacher.ids) != sample.num_supervised:
            found = f"{IDS} has {len(part.teacher.ids)} items"
            raise DataError(f"{found}, but {sample.num_supervised} tokens are supervised.", where=where)
        sample = sample.taught(*part.teacher)
    if part.label is None:
        return sample
    return sample.labelled_end(part.label) if isinstance(objective, HeadObjective) else sample.labelled(part.label)
