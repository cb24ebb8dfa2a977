"""From a chunk of rows to samples: converted, rendered, tokenised, and kept if they fit.

The result depends only on the chunk and a few facts about its file, so chunks can be converted in order or in parallel.
"""

from __future__ import annotations

import datetime
import functools
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from weft.data.chat_template import ChatTemplate, Tokenizer
from weft.data.chats import THOUGHTS, Conversation, Form, Passage, Tokens, Words
from weft.data.formats import convert_rows, refuse_media
from weft.data.json_rows import ColumnMap
from weft.data.render import Renderer
from weft.data.row import Row
from weft.data.samples import Sample, Samples, TokenArrays
from weft.data.tokenise import sample_of_passage, sample_of_tokens, sample_of_words, tokenise
from weft.errors import ConfigError, DataError, counted
from weft.objectives.distillation import IDS, Distillation
from weft.objectives.heads import Classification, HeadObjective
from weft.objectives.objective import Objective, Part
from weft.objectives.registry import OBJECTIVES, SUPERVISED, choose_objective


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    objective: str = "auto"
    data_format: str = "auto"
    data_columns: Mapping[str, str | int] = field(default_factory=dict)
    max_length: int
    long_samples: str = "truncate"
    train_on_inputs: bool = False
    mask_history: bool = False
    chat_template: str | None = None
    group_texts: bool = False
    """True if texts are joined and cut in blocks of max_length."""
    labels: tuple[str, ...] = ()
    clock: datetime.datetime | None = None


@dataclass(frozen=True)
class ConvertedChunk:
    samples: Samples
    rows: npt.NDArray[np.int64]
    """Row of every group, counted from the first of the chunk."""
    account: RowCounts
    data_format: str
    objective: str
    claimed: str
    """Objective that its columns need."""

    @classmethod
    def empty(cls, objective: Objective) -> ConvertedChunk:
        name = objective.name
        return cls(Samples.of([]), np.empty(0, np.int64), RowCounts(), "", objective=name, claimed=name)


class RowGroups(NamedTuple):
    groups: list[list[Sample]]
    is_split_by_objective: bool
    """True if the objective, rather than the chat template, made several groups of the row."""


@dataclass(frozen=True)
class Converter:
    tokenizer: Tokenizer
    settings: DataSettings

    def __reduce__(self) -> tuple[Any, ...]:
        """Drops cached objects when a converter is sent to another process."""
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
            if data_format != "text" or chosen is not SUPERVISED:
                what = f"in the {data_format} format" if data_format != "text" else f"for objective {chosen.name}"
                raise ConfigError(f"joins plain texts, and the rows are {what}.", where="group_texts")
            max_length = sys.maxsize
        keeps_end = isinstance(chosen, HeadObjective) and chosen.labels_end
        sieve = LengthFilter(max_length, settings.long_samples, keeps_end=keeps_end)
        if isinstance(chosen, Distillation):
            _check_teachers(rows, groups)
        for row, of_row in zip(rows, groups, strict=True):
            sieve.take_row(of_row.groups, row.where, is_split_by_objective=of_row.is_split_by_objective)
        if self.renderer.ignores_tools:
            sieve.account.num_without_tools = sum(1 for form in forms if isinstance(form, Conversation) and form.tools)
        in_columns = sum(any(row.values.get(name) for name in THOUGHTS) for row in rows)
        in_turns = sum(map(self.renderer.ignores_thoughts, forms))
        sieve.account.num_without_thoughts = max(in_columns, in_turns)
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
        if data_format in ("text", "tokens") and objective.part_format == "auto":
            raise ConfigError(
                f"got {data_format}; objective {objective.name} reads a prompt and answers to it, in columns it knows: "
                "leave it out.",
                where="data_format",
            )
        data_format = objective.part_format
    data_format, forms = convert_rows(made, data_format, first_format=first_format)
    pairs = zip(parts, make_samples(made, forms, renderer), strict=True)
    samples = iter([[_counted(s, part, objective, where) for s in several] for (where, part), several in pairs])
    groups = [
        _groups(list(itertools.islice(samples, len(several))), objective, row.where)
        for row, several in zip(rows, of_rows, strict=True)
    ]
    return data_format, forms, groups


def make_samples(rows: Sequence[Row], forms: Sequence[Form], renderer: Renderer) -> Iterator[list[Sample]]:
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
                problem = f"holds {counted(number, 'token')} of its teacher for each token"
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
            problem = f"{IDS} has {counted(len(part.teacher.ids), 'item')}"
            raise DataError(f"{problem}; expected {sample.num_supervised}, one for each supervised token.", where=where)
        sample = sample.with_teacher(*part.teacher)
    if part.label is None:
        return sample
    return sample.labelled_end(part.label) if isinstance(objective, HeadObjective) else sample.labelled(part.label)


@dataclass
class RowCounts:
    num_rows: int = 0
    num_split: int = 0
    num_split_by_objective: int = 0
    """Rows with several groups because of the objective, not of the chat template."""
    num_groups: int = 0
    num_truncated: int = 0
    num_dropped_long: int = 0
    num_untrained: int = 0
    num_cut_off: int = 0
    """Rows with something to learn, but only past max_length."""
    num_without_tools: int = 0
    """Rows with tools that the chat template does not render."""
    num_without_thoughts: int = 0
    """Rows with thoughts that are not rendered."""

    def add(self, other: RowCounts) -> None:
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))

    def nothing_left(self, max_length: int, where: str) -> DataError:
        """The error for data without any sample left: it lists the counts."""
        fates = [
            (self.num_untrained, "have no trained turn or text"),
            (self.num_cut_off, f"have their answers past max_length {max_length:,}"),
            (self.num_dropped_long, f"are longer than max_length {max_length:,} and were dropped"),
        ]
        reasons = ", ".join(f"{count:,} {fate}" for count, fate in fates if count)
        what = f"{self.num_groups:,} {'rows' if self.num_groups == self.num_rows else 'samples'}"
        return DataError(f"there are no supervised tokens to train on: of {what}, {reasons}.", where=where)


@dataclass
class LengthFilter:
    max_length: int
    long_samples: str
    keeps_end: bool = False
    """True if the label of the last token moves to the last token left of a sample that is cut."""
    account: RowCounts = field(default_factory=RowCounts)
    kept: list[Sample] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)

    def take_row(self, groups: Sequence[Sequence[Sample]], where: str, *, is_split_by_objective: bool = False) -> None:
        """Keeps, cuts or drops the groups of one row; with long_samples `error` a long one is a DataError."""
        account = self.account
        for group in groups:
            before = len(self.kept)
            self._take(group, where)
            account.num_groups += 1
            if len(self.kept) > before:
                self.rows.append(account.num_rows)
        account.num_rows += 1
        account.num_split += len(groups) > 1
        account.num_split_by_objective += is_split_by_objective

    def _take(self, group: Sequence[Sample], where: str) -> None:
        longest = max(sample.length for sample in group)
        if not all(sample.num_supervised for sample in group):
            self.account.num_untrained += 1
        elif longest <= self.max_length:
            self.kept += group
        elif self.long_samples == "error":
            raise DataError(
                f"has {counted(longest, 'token')}, but max_length is {self.max_length:,}.",
                where=where,
                hint="Raise max_length, or set long_samples to truncate or drop.",
            )
        elif self.long_samples == "drop":
            self.account.num_dropped_long += 1
        else:
            self._cut([sample.cut(self.max_length, keeps_end=self.keeps_end) for sample in group])

    def _cut(self, group: Sequence[Sample]) -> None:
        if all(sample.num_supervised for sample in group):
            self.account.num_truncated += 1
            self.kept += group
        else:
            self.account.num_cut_off += 1


class BlockCutter:
    """Takes the tokens of texts in order and returns whole blocks; the rest waits for the next texts."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._rest = np.empty(0, np.int32)

    def add(self, tokens: npt.NDArray[np.int32]) -> Samples:
        joined = np.concatenate([self._rest, tokens])
        whole = len(joined) // self._length * self._length
        self._rest = joined[whole:]
        return _blocks(joined[:whole], self._length)

    def finish(self) -> Samples:
        """The last block, which is shorter; none where too little is left to learn from."""
        rest, self._rest = self._rest, np.empty(0, np.int32)
        return _blocks(rest if len(rest) > 1 else rest[:0], max(len(rest), 1))


def _blocks(tokens: npt.NDArray[np.int32], length: int) -> Samples:
    """Consecutive samples of one length; every token but the first of each is supervised."""
    number = len(tokens) // length
    supervised = np.ones(len(tokens), np.bool_)
    supervised[::length] = False
    starts = np.arange(number, dtype=np.int64) * length
    return Samples(TokenArrays(tokens, supervised), starts, np.full(number, length), np.full(number, length - 1))
