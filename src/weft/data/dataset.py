"""A job's data, ready to train on: samples that fit, and an account of what became of every row."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from weft.data.conversation import Conversation, Form, Tokens
from weft.data.formats import convert_rows
from weft.data.order import permutation
from weft.data.row import Row
from weft.data.sample import Sample
from weft.data.sources import read_rows
from weft.data.template import Renderer, Tokenizer
from weft.data.tokenise import sample_of_tokens, tokenise
from weft.errors import DataError
from weft.objectives.objective import LikelihoodObjective, Objective, Part
from weft.objectives.registry import SUPERVISED, choose_objective
from weft.spec.job import JobSpec


@dataclass(frozen=True)
class DataSummary:
    """What was read, what was left out, and how long the samples are."""

    sources: tuple[str, ...]
    """Files and Hub names, as written."""
    format: str
    """Format of the rows; several sources may have several."""
    num_rows: int
    """Rows read, before anything was left out or split off."""
    num_truncated: int
    """Rows cut to max_length that still have something to learn."""
    num_dropped_long: int
    """Rows left out because they are longer than max_length."""
    num_dropped_unsupervised: int
    """Rows left out because they have nothing to learn, some of them only after being cut."""
    length_limit: int
    """The job's max_length, in tokens."""
    num_samples: int
    num_tokens: int
    num_supervised_tokens: int
    min_length: int
    """Tokens of the shortest sample."""
    mean_length: float
    max_length: int
    """Tokens of the longest sample."""
    notes: tuple[str, ...] = ()
    """What else a user should know."""

    def describe(self) -> str:
        """One line for people."""
        lengths = f"lengths {self.min_length:,} to {self.max_length:,}, mean {self.mean_length:,.0f}"
        parts = [
            f"{self.num_samples:,} sample{'s' * (self.num_samples != 1)} ({self.format})",
            f"{self.num_tokens:,} tokens, {self.num_supervised_tokens:,} supervised, {lengths}",
        ]
        if self.num_truncated:
            parts.append(f"{self.num_truncated:,} cut to {self.length_limit:,} tokens")
        if self.num_dropped_long:
            parts.append(f"{self.num_dropped_long:,} over {self.length_limit:,} tokens dropped")
        if self.num_dropped_unsupervised:
            parts.append(f"{self.num_dropped_unsupervised:,} with nothing to learn dropped")
        return f"{', '.join(self.sources)}: " + "; ".join([*parts, *self.notes])


@dataclass(frozen=True)
class Member:
    """One run of a sample in its group."""

    sample: Sample
    is_bare: bool = False
    """Without any adapter: the reference that the objective compares with."""


@dataclass(frozen=True)
class Dataset:
    """Samples in the order of their rows, and the account of them."""

    samples: tuple[Sample, ...]
    summary: DataSummary
    objective: Objective = SUPERVISED
    """What the samples are made for: each row became a group of as many samples as it says."""

    @classmethod
    def of(cls, samples: Sequence[Sample], source: str) -> Dataset:
        """Samples that were made, not read; `source` says of what."""
        measures = _measures(samples)
        account = DataSummary((source,), "tokens", len(samples), 0, 0, 0, measures["max_length"], **measures)
        return cls(tuple(samples), account)

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 of all tokens, masks and weights, if any; a resumed run compares it to notice changed data."""
        digest = hashlib.sha256()
        for sample in self.samples:
            digest.update(sample.length.to_bytes(8, "little"))
            digest.update(sample.tokens.astype("<i4").tobytes())
            digest.update(sample.supervised.tobytes())
            if sample.weights is not None:
                digest.update(sample.weights.astype("<f8").tobytes())
        return digest.hexdigest()

    @property
    def num_groups(self) -> int:
        """Rows that became samples."""
        return len(self.samples) // self.objective.group_size

    @functools.cached_property
    def judge(self) -> LikelihoodObjective | None:
        """The objective, if it weighs tokens by their log-probabilities."""
        return self.objective if isinstance(self.objective, LikelihoodObjective) else None

    def group(self, index: int) -> tuple[Sample, ...]:
        """The samples of one row."""
        size = self.objective.group_size
        return self.samples[index * size : (index + 1) * size]

    def members(self, index: int) -> tuple[Member, ...]:
        """All that one row asks to run, in one microbatch and in this order."""
        group = self.group(index)
        bare = group if self.judge is not None and self.judge.reads_reference else ()
        return (*(Member(sample) for sample in group), *(Member(sample, is_bare=True) for sample in bare))

    @functools.cached_property
    def group_tokens(self) -> list[int]:
        """Tokens that each row trains."""
        return [sum(sample.length for sample in self.group(i)) for i in range(self.num_groups)]

    @property
    def longest_group(self) -> int:
        """Most tokens that have to share a microbatch."""
        times = 2 if self.judge is not None and self.judge.reads_reference else 1
        return times * max(self.group_tokens)

    def subset(self, indices: Iterable[int]) -> Dataset:
        """Some of the groups; the account of the rows stays that of the sources."""
        samples = tuple(sample for i in indices for sample in self.group(i))
        return replace(self, samples=samples, summary=replace(self.summary, **_measures(samples)))


@dataclass(frozen=True)
class JobData:
    """What a job trains on and what it is evaluated on."""

    train: Dataset
    eval: Dataset | None


def load_dataset(
    sources: Sequence[str],
    tokenizer: Tokenizer,
    *,
    objective: str = "auto",
    data_format: str = "auto",
    max_length: int,
    long_samples: str = "truncate",
    train_on_inputs: bool = False,
    chat_template: str | None = None,
    base_dir: Path,
) -> Dataset:
    """The samples of files (relative to `base_dir`) or Hub data sets; any problem is a DataError naming the row."""
    renderer = Renderer(tokenizer, chat_template, train_on_inputs)
    sieve = _Sieve(max_length, long_samples)
    formats: list[str] = []
    read = [read_rows(source, base_dir) for source in sources]
    columns = [row.values for rows in read for row in rows]
    chosen = choose_objective(objective, columns)
    ignored_tools = 0
    for rows in read:
        parts = [(row.where, part) for row in rows for part in chosen.parts(row.values, row.where)]
        made = [Row(part.values, where) for where, part in parts]
        found, forms = convert_rows(made, data_format)
        formats.append(found)
        if renderer.ignores_tools:
            ignored_tools += sum(1 for form in forms if isinstance(form, Conversation) and form.tools)
        pairs = zip(parts, make_samples(made, forms, renderer), strict=True)
        samples = [_weighted(sample, part, chosen, where) for (where, part), sample in pairs]
        for i, row in enumerate(rows):
            sieve.take(samples[i * chosen.group_size : (i + 1) * chosen.group_size], row.where)
    notes = _objective_notes(chosen, choose_objective("auto", columns))
    if ignored_tools:
        notes.append(f"the chat template has no place for tools: {ignored_tools:,} rows go without theirs")
    kept = sieve.result(", ".join(sources), len(columns))
    summary = DataSummary(
        sources=tuple(sources),
        format=", ".join(dict.fromkeys(formats)),
        num_rows=len(columns),
        num_truncated=sieve.num_truncated,
        num_dropped_long=sieve.num_dropped_long,
        num_dropped_unsupervised=sieve.num_untrained + sieve.num_cut_off,
        length_limit=max_length,
        notes=tuple(notes),
        **_measures(kept),
    )
    return Dataset(kept, summary, chosen)


def load_job_data(job: JobSpec, tokenizer: Tokenizer, base_dir: Path) -> JobData:
    """The training and evaluation data of a job; a fraction or count is split off by the job's seed."""

    def load(sources: Sequence[str], objective: str) -> Dataset:
        return load_dataset(
            sources,
            tokenizer,
            objective=objective,
            data_format=job.data_format,
            max_length=job.max_length,
            long_samples=job.long_samples,
            train_on_inputs=job.train_on_inputs,
            chat_template=job.chat_template,
            base_dir=base_dir,
        )

    train = load(job.train_data, job.objective)
    if job.eval_data is None:
        return JobData(train, None)
    if isinstance(job.eval_data, tuple):
        return JobData(train, load(job.eval_data, train.objective.name))
    return _split(train, job.eval_data, job)


def make_samples(rows: Sequence[Row], forms: Sequence[Form], renderer: Renderer) -> Iterator[Sample]:
    """One sample per row, in order, of whatever length."""
    pairs = list(zip(rows, forms, strict=True))
    texts = [renderer.render(form, row.where) for row, form in pairs if not isinstance(form, Tokens)]
    tokenised = tokenise(texts, renderer.tokenizer)
    for row, form in pairs:
        if isinstance(form, Tokens):
            yield sample_of_tokens(form, renderer.tokenizer, renderer.train_on_inputs, row.where)
        else:
            yield next(tokenised)


@dataclass
class _Sieve:
    """Keeps the samples that can be trained on and counts the others."""

    max_length: int
    long_samples: str
    kept: list[Sample] = field(default_factory=list)
    num_truncated: int = 0
    num_dropped_long: int = 0
    num_untrained: int = 0
    num_cut_off: int = 0
    """Had something to learn, but only past max_length."""

    def take(self, group: Sequence[Sample], where: str) -> None:
        """Keeps, cuts or drops the samples of one row; with long_samples `error` a long one is a DataError."""
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

    def result(self, where: str, num_rows: int) -> tuple[Sample, ...]:
        """The samples kept; none at all is a DataError that says what became of the rows."""
        if self.kept:
            return tuple(self.kept)
        fates = [
            (self.num_untrained, "have no trained turn or text"),
            (self.num_cut_off, f"have their answers past max_length {self.max_length:,}"),
            (self.num_dropped_long, f"are longer than max_length {self.max_length:,} and were dropped"),
        ]
        reasons = ", ".join(f"{count:,} {fate}" for count, fate in fates if count)
        raise DataError(f"there are no supervised tokens to train on: of {num_rows:,} rows, {reasons}.", where=where)


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
    num_samples = data.num_groups
    num_eval = round(num_samples * amount) if amount < 1 else int(amount)
    if not 1 <= num_eval < num_samples:
        side = "no sample to evaluate on" if num_eval < 1 else "no sample to train on"
        raise DataError(
            f"{amount:g} of {num_samples:,} samples leaves {side}.",
            where=f"{job.name}: eval_data",
            hint="Split off another amount, or name files.",
        )
    # A third number, so that the split never repeats the draw of an epoch.
    order = permutation(num_samples, (job.seed, 0, 1))
    chosen = np.sort(order[:num_eval])
    rest = np.sort(order[num_eval:])
    return JobData(data.subset(rest.tolist()), data.subset(chosen.tolist()))


def _measures(samples: Sequence[Sample]) -> dict[str, Any]:
    """The part of a summary that is counted from the samples."""
    lengths = [sample.length for sample in samples]
    return {
        "num_samples": len(samples),
        "num_tokens": sum(lengths),
        "num_supervised_tokens": sum(sample.num_supervised for sample in samples),
        "min_length": min(lengths),
        "mean_length": sum(lengths) / len(lengths),
        "max_length": max(lengths),
    }
