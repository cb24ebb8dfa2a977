"""Keeps the samples that can be trained on and counts the others; cuts joined texts in blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import numpy as np
import numpy.typing as npt

from weft.data.sample import Sample
from weft.data.samples import Samples, TokenArrays
from weft.errors import DataError


@dataclass
class RowCounts:
    """Counts of rows by outcome; counts of parts of a file add up to those of the file."""

    num_rows: int = 0
    num_split: int = 0
    """Rows of several groups."""
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
    """Filters the groups of one row after the other."""

    max_length: int
    long_samples: str
    keeps_end: bool = False
    """True if the label of the last token moves to the last token left of a sample that is cut."""
    account: RowCounts = field(default_factory=RowCounts)
    kept: list[Sample] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    """Row of every group that was kept."""

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
                f"has {longest:,} tokens, but max_length is {self.max_length:,}.",
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
