"""Checks a training file line by line before anything is stored about a job; every problem names its line.

Memory and time are bounded: it reads one line at a time, of limited length and nesting. The worker reads the rows with
the same code, so a file that passes here is one that `weft train` accepts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import IO

from weft.data.formats import convert_rows
from weft.data.rows.columns import ColumnMap
from weft.data.rows.json_rows import parse_json
from weft.data.rows.row import BOM, Row, decode
from weft.errors import DataError
from weft.objectives.registry import choose_objective
from weft.serve.settings import ServiceLimits
from weft.settings.fields import describe
from weft.wording import counted

MAX_PROBLEMS = 20
"""After so many problems the rest of the file is not read."""


@dataclass(frozen=True)
class Problem:
    """A problem with one line, or with the whole file if `line` is None."""

    line: int | None
    message: str


@dataclass(frozen=True)
class Report:
    """What a check found in a file."""

    num_samples: int
    format: str | None
    problems: tuple[Problem, ...]


def check_training_file(
    stream: IO[bytes],
    name: str,
    limits: ServiceLimits,
    *,
    data_format: str | None = "auto",
    data_columns: Mapping[str, str | int] = MappingProxyType({}),
    objective: str = "auto",
    min_samples: int | None = None,
) -> Report:
    """Checks the whole file; with `data_format` None it only checks that each line is an object."""
    least = limits.min_samples if min_samples is None else min_samples
    problems: list[Problem] = []
    count, chosen = 0, None
    for number, line in _lines(stream, limits.line_bytes):
        try:
            row = _read_line(line, number, name, limits)
            if row is None:
                continue
            count += 1
            if data_format is not None:
                row = ColumnMap(data_columns).apply(row)
                found = _format_of(row, data_format, objective)
                if chosen not in (None, found):
                    raise DataError(f"is in the {found} format, but the lines before it are {chosen}.", where=row.where)
                chosen = found
        except DataError as error:
            problems.append(Problem(number, str(error)))
            # Nothing can be read after a line that is too long.
            if len(problems) >= MAX_PROBLEMS or len(line) > limits.line_bytes:
                break
        if count > limits.max_samples:
            problems.append(Problem(number, f"{name}: has more than {limits.max_samples:,} samples."))
            break
    if not problems and count < least:
        problems.append(Problem(None, f"{name}: has {counted(count, 'sample')}; at least {least} are needed."))
    return Report(count, chosen, tuple(problems))


def _format_of(row: Row, data_format: str, objective: str) -> str:
    """The format of a row that can be read; pairs of answers are trained on only where the job says so."""
    chosen = choose_objective(objective, [row.values])
    if objective == "auto" and chosen.group_size > 1:
        raise DataError(f"is preference data, for the method {chosen.name}.", where=row.where)
    parts = chosen.parts(row.values, row.where)
    return convert_rows([Row(part.values, row.where) for part in parts], data_format)[0]


def _lines(stream: IO[bytes], most: int) -> Iterator[tuple[int, bytes]]:
    number = 0
    while line := stream.readline(most + 2):
        number += 1
        yield number, line.rstrip(b"\r\n")


def _read_line(line: bytes, number: int, name: str, limits: ServiceLimits) -> Row | None:
    """The row on a line, or None for a blank one."""
    where = f"{name} line {number}"
    if len(line) > limits.line_bytes:
        raise DataError(f"is longer than {limits.line_bytes:,} bytes.", where=where)
    text = decode(line.removeprefix(BOM) if number == 1 else line, name, number)
    if not text.strip():
        return None
    if number == 1 and text.startswith("["):
        raise DataError("a jsonl file has one object per line, not one list.", where=where)
    if number == 1 and not text.lstrip().startswith("{"):
        raise DataError(f'is {describe(text)}; each line is a JSON object such as {{"messages": [...]}}.', where=where)
    value = parse_json(text, where)
    if not isinstance(value, dict):
        raise DataError(f'is {describe(value)}; each line is an object such as {{"messages": [...]}}.', where=where)
    if depth_of(value, limits.nesting) > limits.nesting:
        raise DataError(f"is nested more than {limits.nesting} deep.", where=where)
    return Row(value, where)


def depth_of(value: object, most: int) -> int:
    """Returns how deep lists and objects are nested, counting no further than `most` + 1."""
    depth, level = 0, [value]
    while depth <= most:
        outer = [item for item in level if isinstance(item, dict | list)]
        if not outer:
            break
        depth += 1
        level = [inner for item in outer for inner in (item.values() if isinstance(item, dict) else item)]
    return depth
