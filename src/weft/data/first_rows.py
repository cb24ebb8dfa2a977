"""What the first rows of a job's data ask for: enough to refuse a job before anything large is read."""

from __future__ import annotations

import itertools
from contextlib import suppress
from pathlib import Path

from weft.data.rows.column_map import ColumnMap
from weft.data.rows.find import find_source
from weft.errors import WeftError
from weft.objectives.objective import Objective
from weft.objectives.registry import choose_objective
from weft.spec.job import JobSpec

LOOKED_AT = 16
"""Rows of each file; what only later ones ask for shows when all are read."""


def first_objective(job: JobSpec, base_dir: Path) -> Objective:
    """The objective that a job names, or the one that the first rows of its files ask for.

    Data sets of the Hub are not fetched for that, and whatever is wrong with the data is left to whoever reads it all.
    """
    named, rows = ColumnMap(job.data_columns), []
    for given in job.train_sources if job.objective == "auto" else ():
        with suppress(WeftError):
            source = find_source(given.path, base_dir, has_header=not named.by_number)
            if not source.is_on_hub:
                rows += [named.apply(row).values for row in itertools.islice(source.rows(), LOOKED_AT)]
    return choose_objective(job.objective, rows)
