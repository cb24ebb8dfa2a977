"""A job's data, ready to train on: samples that fit, and counts of the rows that were kept, cut and left out."""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from weft.data.order import BatchSchedule
from weft.data.samples import Sample, Samples
from weft.errors import counted
from weft.objectives.distillation import Distillation
from weft.objectives.heads import HeadObjective
from weft.objectives.objective import LikelihoodObjective, Objective
from weft.objectives.registry import SUPERVISED


@dataclass(frozen=True)
class DataSummary:
    sources: tuple[str, ...]
    format: str
    num_rows: int
    num_truncated: int
    """Samples cut to max_length that still have something to learn; the samples of a group count as one."""
    num_dropped_long: int
    """Samples left out because they are longer than max_length."""
    num_dropped_unsupervised: int
    """Samples left out because they have nothing to learn, some of them only after being cut."""
    length_limit: int
    num_samples: int
    num_tokens: int
    num_supervised_tokens: int
    min_length: int
    mean_length: float
    max_length: int
    notes: tuple[str, ...] = ()
    group_size: int = 1

    def describe(self) -> str:
        lengths = f"lengths {self.min_length:,} to {self.max_length:,}, mean {self.mean_length:,.0f}"
        number, what = self.num_samples // self.group_size, "pair" if self.group_size == 2 else "sample"
        parts = [
            f"{counted(number, what)} ({self.format})",
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
    sample: Sample
    """With the rows in front of it that the job's adapter fills."""
    own: Sample


@dataclass(frozen=True, eq=False)
class Dataset:
    samples: Samples
    summary: DataSummary
    objective: Objective = SUPERVISED
    source_groups: tuple[int, ...] = ()
    """Groups of each source, in order; empty if all are of one."""
    rows: npt.NDArray[np.int64] | None = None
    """Number of the row of each group; None if each group has its own. A chat may become several samples."""

    num_leading: int = 0
    """Rows in front of each sample of a job for virtual tokens of its adapter."""

    @classmethod
    def of(cls, samples: Sequence[Sample], source: str) -> Dataset:
        made = Samples.of(samples)
        result = measures(made)
        return cls(made, DataSummary((source,), "tokens", len(made), 0, 0, 0, result["max_length"], **result))

    @property
    def fingerprint(self) -> str:
        """SHA-256 of all tokens, masks and weights, if any; a resumed run compares it to detect changed data."""
        return self.samples.fingerprint

    @property
    def num_groups(self) -> int:
        return len(self.samples) // self.objective.group_size

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.source_groups or (self.num_groups,)

    @functools.cached_property
    def likelihood_objective(self) -> LikelihoodObjective | None:
        return self.objective if isinstance(self.objective, LikelihoodObjective) else None

    @functools.cached_property
    def head(self) -> HeadObjective | None:
        return self.objective if isinstance(self.objective, HeadObjective) else None

    @functools.cached_property
    def distillation(self) -> Distillation | None:
        return self.objective if isinstance(self.objective, Distillation) else None

    @property
    def reads_reference(self) -> bool:
        return self.objective.reads_reference

    @property
    def has_teacher(self) -> bool:
        return self.samples.arrays.num_teacher_tokens > 0

    @property
    def reference_bytes(self) -> int:
        """Bytes of the cached reference outputs of all samples: a number per supervised token, or an id and a number
        for each of its most likely tokens; 0 where they are too large to be cached, or in the data."""
        num_runs = (1 + self.has_mismatches) * (self.reads_reference and not self.has_teacher)
        each = 4 if self.distillation is None else 8 * (self.distillation.top_k or 0)
        return each * num_runs * int(self.samples.num_supervised.sum())

    def reference_tokens(self, num_run: Callable[[npt.NDArray[np.int64]], int]) -> int:
        """Tokens that a job's reference runs on, where the job runs `num_run` tokens of groups. It runs once on each,
        or each time where its outputs are too large to be cached."""
        if not self.reads_reference or self.has_teacher:
            return 0
        each = self._run_tokens
        return min(num_run(each), int(each.sum())) if self.reference_bytes else num_run(each)

    @property
    def has_mismatches(self) -> bool:
        """True if a group's prompt also runs with the next group's answer."""
        return self.likelihood_objective is not None and self.likelihood_objective.reads_mismatch

    def sample_indices(self, index: int) -> range:
        size = self.objective.group_size
        return range(index * size, (index + 1) * size)

    def members(self, index: int) -> tuple[Member, ...]:
        """All runs of one group, which share a microbatch, in order."""
        group = [self.samples[i] for i in self.sample_indices(index)]
        if self.has_mismatches:
            group.append(self._mismatched(index))
        return tuple(Member(sample.led_by(self.num_leading), sample) for sample in group)

    def member_lengths(self, index: int) -> list[int]:
        indices = self.sample_indices(index)
        lengths = [int(length) for length in self.samples.lengths[indices.start : indices.stop]]
        if self.has_mismatches:
            lengths.append(int(self._mismatch_lengths[index]))
        return [self.num_leading + length for length in lengths]

    def _mismatched(self, index: int) -> Sample:
        """A group's prompt with the answer of the next group, the last one's with that of the first."""
        own, other = self.samples[index], self.samples[(index + 1) % self.num_groups]
        prompt = own.tokens[: min(own.first_supervised, self.summary.length_limit - 1)]
        answer = slice(other.first_supervised, None)
        tokens = np.concatenate([prompt, other.tokens[answer]])
        supervised = np.concatenate([np.zeros(len(prompt), np.bool_), other.supervised[answer]])
        return Sample(tokens, supervised).cut(self.summary.length_limit)

    @functools.cached_property
    def _mismatch_lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each group's prompt with the next group's answer."""
        limit = self.summary.length_limit
        supervised = np.flatnonzero(self.samples.arrays.supervised)
        starts = self.samples.starts
        prompts = supervised[np.searchsorted(supervised, starts)] - starts
        answers = np.roll(self.samples.lengths - prompts, -1)
        lengths: npt.NDArray[np.int64] = np.minimum(np.minimum(prompts, limit - 1) + answers, limit)
        return lengths

    @functools.cached_property
    def group_tokens(self) -> npt.NDArray[np.int64]:
        size = self.objective.group_size
        tokens: npt.NDArray[np.int64] = self.samples.lengths.reshape(-1, size).sum(axis=1) + size * self.num_leading
        return tokens

    @property
    def _run_tokens(self) -> npt.NDArray[np.int64]:
        tokens = self.group_tokens
        return tokens + self._mismatch_lengths + self.num_leading if self.has_mismatches else tokens

    @property
    def longest_group(self) -> int:
        return int(self._run_tokens.max())

    def subset(self, groups: Iterable[int] | npt.NDArray[np.int64]) -> Dataset:
        """Some of the groups, in order; the summary of the rows stays that of the sources."""
        chosen = np.fromiter(groups, np.int64)
        ends = np.searchsorted(chosen, np.cumsum(self.sizes))
        size = self.objective.group_size
        samples = self.samples.take((chosen[:, None] * size + np.arange(size)).reshape(-1))
        rows = None if self.rows is None else self.rows[chosen]
        return replace(
            self,
            samples=samples,
            summary=replace(self.summary, **measures(samples)),
            source_groups=tuple(int(size) for size in np.diff(ends, prepend=0)),
            rows=rows,
        )


@dataclass(frozen=True)
class JobData:
    train: Dataset
    eval: Dataset | None

    def led_by(self, num_rows: int) -> JobData:
        led = [None if part is None else replace(part, num_leading=num_rows) for part in (self.train, self.eval)]
        assert led[0] is not None
        return JobData(led[0], led[1])

    def forward_tokens(self, schedule: BatchSchedule, eval_steps: int | None) -> int:
        """Tokens that a whole job runs forward only: those of its evaluations, and those of its reference. Jobs that
        share a reference run it once together, which is not counted here."""
        num_tokens = self.train.reference_tokens(schedule.num_tokens)
        if self.eval is None:
            return num_tokens
        num_evals = schedule.num_evals(eval_steps)
        num_tokens += self.eval.reference_tokens(lambda each: num_evals * int(each.sum()))
        return num_tokens + num_evals * self.eval.summary.num_tokens


def measures(samples: Samples) -> dict[str, Any]:
    """The part of a summary that is counted from the samples."""
    num_tokens = int(samples.lengths.sum())
    return {
        "num_samples": len(samples),
        "num_tokens": num_tokens,
        "num_supervised_tokens": int(samples.num_supervised.sum()),
        "min_length": int(samples.lengths.min()),
        "mean_length": num_tokens / len(samples),
        "max_length": int(samples.lengths.max()),
    }


MAX_HELD = 16
"""Global batches in memory: what runs, and what a planner reads ahead."""


@dataclass(frozen=True)
class GlobalBatch:
    """The samples between two optimizer steps; they are read when they are first needed."""

    data: Dataset
    groups: tuple[int, ...]

    @functools.cached_property
    def members(self) -> tuple[Member, ...]:
        return tuple(member for group in self.groups for member in self.data.members(group))

    @functools.cached_property
    def lengths(self) -> list[int]:
        return [length for group in self.groups for length in self.data.member_lengths(group)]

    @functools.cached_property
    def divisor(self) -> float:
        samples = self.data.samples
        weights = [samples.total_weight(i) for group in self.groups for i in self.data.sample_indices(group)]
        return self.data.objective.divisor(weights)

    @functools.cached_property
    def num_tokens(self) -> int:
        return int(self.data.group_tokens[list(self.groups)].sum())


class GlobalBatches:
    """All global batches of one job: a function of its samples and its order, with the last ones in memory."""

    def __init__(self, data: Dataset, order: BatchSchedule) -> None:
        self.order = order
        self.data = data
        self._held: OrderedDict[int, GlobalBatch] = OrderedDict()

    def __getitem__(self, step: int) -> GlobalBatch:
        held = self._held.get(step)
        if held is None:
            held = GlobalBatch(self.data, tuple(self.order.batch(step).tolist()))
            self._held[step] = held
            if len(self._held) > MAX_HELD:
                self._held.popitem(last=False)
        return held

    def lengths(self, step: int) -> list[int]:
        return self[step].lengths

    def samples_from(self, step: int) -> Iterator[Sample]:
        """The samples, without leading rows, of a step and of later steps in its epoch, in order."""
        end = min((step // self.order.steps_per_epoch + 1) * self.order.steps_per_epoch, self.order.num_steps)
        for later in range(step, end):
            for group in self.order.batch(later).tolist():
                yield from (member.own for member in self.data.members(group))

    def groups(self, step: int, first: int = 0) -> tuple[int, ...]:
        """Number of members from `first` on that share a microbatch, group by group; empty where each is by itself."""
        size = self.data.objective.group_size * (1 + self.data.has_mismatches)
        return (size,) * ((len(self[step].lengths) - first) // size) if size > 1 else ()
