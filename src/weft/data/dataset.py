"""A job's data, ready to train on: samples that fit, and an account of what became of every row."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from weft.data.sample import Sample
from weft.objectives.objective import LikelihoodObjective, Objective
from weft.objectives.registry import SUPERVISED


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
    """Samples cut to max_length that still have something to learn; the samples of a group count as one."""
    num_dropped_long: int
    """Samples left out because they are longer than max_length."""
    num_dropped_unsupervised: int
    """Samples left out because they have nothing to learn, some of them only after being cut."""
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
    """What the samples are made for: they come in groups of as many as it says."""
    rows: tuple[int, ...] = ()
    """The row that each group was made of, as a number; none: each of its own. A chat may become several samples."""

    @classmethod
    def of(cls, samples: Sequence[Sample], source: str) -> Dataset:
        """Samples that were made, not read; `source` says of what."""
        found = measures(samples)
        account = DataSummary((source,), "tokens", len(samples), 0, 0, 0, found["max_length"], **found)
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
        """Groups of samples, which global batches are counted in."""
        return len(self.samples) // self.objective.group_size

    @functools.cached_property
    def judge(self) -> LikelihoodObjective | None:
        """The objective, if it weighs tokens by their log-probabilities."""
        return self.objective if isinstance(self.objective, LikelihoodObjective) else None

    def group(self, index: int) -> tuple[Sample, ...]:
        """The samples of one group."""
        size = self.objective.group_size
        return self.samples[index * size : (index + 1) * size]

    def members(self, index: int) -> tuple[Member, ...]:
        """All that one group asks to run, in one microbatch and in this order."""
        group = self.group(index)
        bare = group if self.judge is not None and self.judge.reads_reference else ()
        return (*(Member(sample) for sample in group), *(Member(sample, is_bare=True) for sample in bare))

    @functools.cached_property
    def group_tokens(self) -> list[int]:
        """Tokens that each group trains."""
        return [sum(sample.length for sample in self.group(i)) for i in range(self.num_groups)]

    @property
    def longest_group(self) -> int:
        """Most tokens that have to share a microbatch."""
        times = 2 if self.judge is not None and self.judge.reads_reference else 1
        return times * max(self.group_tokens)

    def subset(self, indices: Iterable[int]) -> Dataset:
        """Some of the groups; the account of the rows stays that of the sources."""
        chosen = list(indices)
        samples = tuple(sample for i in chosen for sample in self.group(i))
        rows = tuple(self.rows[i] for i in chosen) if self.rows else ()
        return replace(self, samples=samples, summary=replace(self.summary, **measures(samples)), rows=rows)

    def groups_by_row(self) -> list[list[int]]:
        """The groups of every row that became any."""
        found: dict[int, list[int]] = {}
        for i in range(self.num_groups):
            found.setdefault(self.rows[i] if self.rows else i, []).append(i)
        return list(found.values())


@dataclass(frozen=True)
class JobData:
    """What a job trains on and what it is evaluated on."""

    train: Dataset
    eval: Dataset | None


def measures(samples: Sequence[Sample]) -> dict[str, Any]:
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
