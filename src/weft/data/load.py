"""Makes the samples of a job of its files: rows are read, converted, rendered, tokenised, and kept if they fit."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from weft.data.chat.chat_template import ChatTemplate, Tokenizer
from weft.data.chat.renderer import Renderer
from weft.data.conversation import Conversation, Form, Tokens
from weft.data.dataset import Dataset, DataSummary, JobData, measures
from weft.data.formats import convert_rows
from weft.data.order import permutation
from weft.data.rows.column_map import ColumnMap
from weft.data.rows.row import Row
from weft.data.rows.sources import read_rows
from weft.data.sample import Sample
from weft.data.samples import Samples
from weft.data.tokenise import sample_of_tokens, tokenise
from weft.errors import DataError
from weft.objectives.objective import Objective, Part
from weft.objectives.registry import SUPERVISED, choose_objective
from weft.spec.job import JobSpec

SPLIT_NOTE = (
    "{:,} chats are {:,} samples, because their chat template shows earlier answers otherwise once later turns follow "
    "(mask_history trains the last answer only)"
)


def load_dataset(
    sources: Sequence[str],
    tokenizer: Tokenizer,
    *,
    objective: str = "auto",
    data_format: str = "auto",
    data_columns: Mapping[str, str | int] = MappingProxyType({}),
    max_length: int,
    long_samples: str = "truncate",
    train_on_inputs: bool = False,
    mask_history: bool = False,
    chat_template: str | None = None,
    clock: datetime.datetime | None = None,
    base_dir: Path,
) -> Dataset:
    """The samples of files (relative to `base_dir`) or Hub data sets; any problem is a DataError naming the row.

    `clock` is what time it is for chat templates that ask; None: what time it is.
    """
    renderer = Renderer(ChatTemplate(tokenizer, chat_template, clock), train_on_inputs, mask_history)
    sieve = _Sieve(max_length, long_samples)
    formats: list[str] = []
    named = ColumnMap(data_columns)
    read = [
        [named.apply(row) for row in read_rows(source, base_dir, has_header=not named.by_number)] for source in sources
    ]
    columns = [row.values for rows in read for row in rows]
    chosen = choose_objective(objective, columns)
    notes = _objective_notes(chosen, choose_objective("auto", columns))
    ignored_tools = 0
    for rows in read:
        found, forms, groups = _convert(rows, chosen, data_format, renderer)
        formats.append(found)
        if renderer.ignores_tools:
            ignored_tools += sum(1 for form in forms if isinstance(form, Conversation) and form.tools)
        for row, of_row in zip(rows, groups, strict=True):
            sieve.take_row(of_row, row.where)
    if ignored_tools:
        notes.append(f"the chat template has no place for tools: {ignored_tools:,} rows go without theirs")
    if sieve.num_split:
        notes.append(SPLIT_NOTE.format(sieve.num_split, sieve.num_groups - sieve.num_rows + sieve.num_split))
    kept = Samples.of(sieve.result(", ".join(sources)))
    summary = DataSummary(
        sources=tuple(sources),
        format=", ".join(dict.fromkeys(formats)),
        num_rows=len(columns),
        num_truncated=sieve.num_truncated,
        num_dropped_long=sieve.num_dropped_long,
        num_dropped_unsupervised=sieve.num_untrained + sieve.num_cut_off,
        length_limit=max_length,
        notes=tuple(notes),
        **measures(kept),
    )
    return Dataset(kept, summary, chosen, np.array(sieve.rows, dtype=np.int64) if sieve.num_split else None)


def load_job_data(
    job: JobSpec, tokenizer: Tokenizer, base_dir: Path, *, clock: datetime.datetime | None = None
) -> JobData:
    """The training and evaluation data of a job; a fraction or count is split off by the job's seed.

    `clock` is what time it is for chat templates that ask: when the job's run began; None: now.
    """
    at = clock or datetime.datetime.now()

    def load(setting: str, sources: Sequence[str], objective: str) -> Dataset:
        try:
            return load_dataset(
                sources,
                tokenizer,
                objective=objective,
                data_format=job.data_format,
                data_columns=job.data_columns,
                max_length=job.max_length,
                long_samples=job.long_samples,
                train_on_inputs=job.train_on_inputs,
                mask_history=job.mask_history,
                chat_template=job.chat_template,
                clock=at,
                base_dir=base_dir,
            )
        except DataError as error:
            error.setting = setting
            raise

    train = load("train_data", job.train_data, job.objective)
    if job.eval_data is None:
        return JobData(train, None)
    if isinstance(job.eval_data, tuple):
        return JobData(train, load("eval_data", job.eval_data, train.objective.name))
    return _split(train, job.eval_data, job)


def _convert(
    rows: Sequence[Row], objective: Objective, data_format: str, renderer: Renderer
) -> tuple[str, list[Form], list[list[list[Sample]]]]:
    """The format of the rows of one source, the forms of their parts, and the groups of samples of each row."""
    parts = [(row.where, part) for row in rows for part in objective.parts(row.values, row.where)]
    made = [Row(part.values, where) for where, part in parts]
    found, forms = convert_rows(made, data_format)
    pairs = zip(parts, make_samples(made, forms, renderer), strict=True)
    samples = [[_weighted(s, part, objective, where) for s in several] for (where, part), several in pairs]
    size = objective.group_size
    groups = [_groups(samples[i * size : (i + 1) * size], objective, row.where) for i, row in enumerate(rows)]
    return found, forms, groups


def make_samples(rows: Sequence[Row], forms: Sequence[Form], renderer: Renderer) -> Iterator[list[Sample]]:
    """The samples of each row, in order, of whatever length."""
    texts = [
        () if isinstance(form, Tokens) else renderer.render(form, row.where)
        for row, form in zip(rows, forms, strict=True)
    ]
    tokenised = tokenise([text for several in texts for text in several], renderer.tokenizer)
    for row, form, several in zip(rows, forms, texts, strict=True):
        if isinstance(form, Tokens):
            yield [sample_of_tokens(form, renderer.tokenizer, renderer.train_on_inputs, row.where)]
        else:
            yield [next(tokenised) for _ in several]


def _groups(parts: Sequence[Sequence[Sample]], objective: Objective, where: str) -> list[list[Sample]]:
    """The groups that a row's parts make: each sample by itself, or one group of what belongs together."""
    if objective.group_size == 1:
        return [[sample] for part in parts for sample in part]
    if any(len(part) > 1 for part in parts):
        raise DataError(
            f"has several answers that the chat template shows otherwise once later turns follow, and objective "
            f"{objective.name} needs them in one sample.",
            where=where,
            hint="Set mask_history to train the last answer only, or another chat_template.",
        )
    return [[part[0] for part in parts]]


@dataclass
class _Sieve:
    """Keeps the samples that can be trained on and counts the others."""

    max_length: int
    long_samples: str
    kept: list[Sample] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    """The row of every group that was kept."""
    num_rows: int = 0
    num_split: int = 0
    """Rows of several groups."""
    num_groups: int = 0
    num_truncated: int = 0
    num_dropped_long: int = 0
    num_untrained: int = 0
    num_cut_off: int = 0
    """Had something to learn, but only past max_length."""

    def take_row(self, groups: Sequence[Sequence[Sample]], where: str) -> None:
        """Keeps, cuts or drops the groups of one row; with long_samples `error` a long one is a DataError."""
        for group in groups:
            before = len(self.kept)
            self._take(group, where)
            self.num_groups += 1
            if len(self.kept) > before:
                self.rows.append(self.num_rows)
        self.num_rows += 1
        self.num_split += len(groups) > 1

    def _take(self, group: Sequence[Sample], where: str) -> None:
        longest = max(sample.length for sample in group)
        if not all(sample.num_supervised for sample in group):
            self.num_untrained += 1
        elif longest <= self.max_length:
            self.kept += group
        elif self.long_samples == "error":
            raise DataError(
                f"has {longest:,} tokens, but max_length is {self.max_length:,}.",
                where=where,
                hint="Raise max_length, or set long_samples to truncate or drop.",
            )
        elif self.long_samples == "drop":
            self.num_dropped_long += 1
        else:
            self._cut([sample.cut(self.max_length) for sample in group])

    def _cut(self, group: Sequence[Sample]) -> None:
        if all(sample.num_supervised for sample in group):
            self.num_truncated += 1
            self.kept += group
        else:
            self.num_cut_off += 1

    def result(self, where: str) -> list[Sample]:
        """The samples kept; none at all is a DataError that says what became of the rows."""
        if self.kept:
            return self.kept
        fates = [
            (self.num_untrained, "have no trained turn or text"),
            (self.num_cut_off, f"have their answers past max_length {self.max_length:,}"),
            (self.num_dropped_long, f"are longer than max_length {self.max_length:,} and were dropped"),
        ]
        reasons = ", ".join(f"{count:,} {fate}" for count, fate in fates if count)
        what = f"{self.num_groups:,} {'rows' if self.num_groups == self.num_rows else 'samples'}"
        raise DataError(f"there are no supervised tokens to train on: of {what}, {reasons}.", where=where)


def _weighted(sample: Sample, part: Part, objective: Objective, where: str) -> Sample:
    """The sample as much as it counts; weights that the job's objective would not name are a DataError."""
    if objective is SUPERVISED and sample.weights is not None:
        raise DataError(
            "messages have weights besides 0 and 1, which objective supervised does not know; set it to weighted.",
            where=where,
        )
    return sample.weighted(part.weight)


def _objective_notes(chosen: Objective, claimed: Objective) -> list[str]:
    """What a summary says of the objective where it is not the usual one, or not the one the columns ask for."""
    if chosen is not claimed:
        return [f"objective {chosen.name}, though the columns are those of {claimed.name}"]
    return [] if chosen is SUPERVISED else [f"objective {chosen.name}, by the columns"]


def _split(data: Dataset, amount: float, job: JobSpec) -> JobData:
    """Splits off whole rows: samples of one chat repeat each other, so none may be on both sides."""
    row_of_group = _rows_counted(data)
    num_rows = int(row_of_group[-1]) + 1
    num_eval = round(num_rows * amount) if amount < 1 else int(amount)
    if not 1 <= num_eval < num_rows:
        side = "no sample to evaluate on" if num_eval < 1 else "no sample to train on"
        what = "samples" if num_rows == data.num_groups else "rows"
        raise DataError(
            f"{amount:g} of {num_rows:,} {what} leaves {side}.",
            where=f"{job.name}: eval_data",
            hint="Split off another amount, or name files.",
        )
    is_eval = np.zeros(num_rows, dtype=np.bool_)
    # A third number, so that the split never repeats the draw of an epoch.
    is_eval[permutation(num_rows, (job.seed, 0, 1))[:num_eval]] = True
    evaluated = is_eval[row_of_group]
    return JobData(data.subset(np.flatnonzero(~evaluated)), data.subset(np.flatnonzero(evaluated)))


def _rows_counted(data: Dataset) -> npt.NDArray[np.int64]:
    """The row of every group, counting only rows that became any; groups are in the order of their rows."""
    if data.rows is None:
        return np.arange(data.num_groups)
    return np.cumsum(np.diff(data.rows, prepend=data.rows[:1]) != 0)
