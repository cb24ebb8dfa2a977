"""Keeps the samples that can be trained on and counts what became of the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from weft.data.sample import Sample
from weft.errors import DataError


@dataclass
class Account:
    """What became of rows; accounts of parts of a file add up to that of the file."""

    num_rows: int = 0
    num_split: int = 0
    """Rows of several groups."""
    num_told_apart: int = 0
    """Those among them whose groups are what the objective made of them, not the chat template."""
    num_groups: int = 0
    num_truncated: int = 0
    num_dropped_long: int = 0
    num_untrained: int = 0
    num_cut_off: int = 0
    """Had something to learn, but only past max_length."""
    num_without_tools: int = 0
    """Rows with tools that the chat template has no place for."""

    def add(self, other: Account) -> None:
        """Counts what another account counted as well."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))

    def nothing_left(self, max_length: int, where: str) -> DataError:
        """The error for data of which no sample was kept: it says what became of the rows."""
        fates = [
            (self.num_untrained, "have no trained turn or text"),
            (self.num_cut_off, f"have their answers past max_length {max_length:,}"),
            (self.num_dropped_long, f"are longer than max_length {max_length:,} and were dropped"),
        ]
        reasons = ", ".join(f"{count:,} {fate}" for count, fate in fates if count)
        what = f"{self.num_groups:,} {'rows' if self.num_groups == self.num_rows else 'samples'}"
        return DataError(f"there are no supervised tokens to train on: of {what}, {reasons}.", where=where)


@dataclass
class Sieve:
    """Takes the groups of one row after the other."""

    max_length: int
    long_samples: str
    keeps_end: bool = False
    """Whether what the last token is labelled as goes to the last one that is left of a sample that is cut."""
    account: Account = field(default_factory=Account)
    kept: list[Sample] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    """The row of every group that was kept."""

    def take_row(self, groups: Sequence[Sequence[Sample]], where: str, *, is_told_apart: bool = False) -> None:
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
        account.num_told_apart += is_told_apart

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
