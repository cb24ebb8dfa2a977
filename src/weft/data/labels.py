"""Collects the classes of data whose job does not name them: one pass over the labels of all training rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from weft.data.rows.column_map import ColumnMap
from weft.data.rows.find import find_source
from weft.errors import DataError
from weft.objectives.heads.classes import Classification, label_name
from weft.spec.job import SourceSpec

MOST_LABELS = 10_000
"""More labels than these are a mistake: a column of other numbers or of texts."""


def find_labels(
    sources: Sequence[SourceSpec], objective: Classification, data_columns: Mapping[str, str | int], base_dir: Path
) -> tuple[str, ...]:
    """The names of all labels: numbers from 0 to the largest where all are numbers, else in alphabetical order."""
    named, labels = ColumnMap(data_columns), set[str]()
    for source in sources:
        rows = find_source(source.path, base_dir, has_header=not named.by_number, max_rows=source.rows).rows()
        for row in map(named.apply, rows):
            labels |= {label_name(given, "label", row.where) for given in objective.given_labels(row.values, row.where)}
            if len(labels) > MOST_LABELS:
                raise DataError(f"there are more than {MOST_LABELS:,} labels up to here.", where=row.where)
    names = sorted(labels)
    if all(name.isdecimal() for name in names):
        largest = max((int(name) for name in names), default=-1)
        if largest >= MOST_LABELS:
            where = sources[0].path
            raise DataError(f"the largest label is {largest:,}; expected one below {MOST_LABELS:,}.", where=where)
        names = [str(number) for number in range(largest + 1)]
    if len(names) < 2:
        problem = f"has only the label {names[0]!r}" if names else "has no labels"
        raise DataError(f"{problem}; objective {objective.name} needs two or more.", where=sources[0].path)
    return tuple(names)
