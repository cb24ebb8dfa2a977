"""Ids, rows as plain mappings, and pages of them in the API's order."""

from __future__ import annotations

import secrets
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from weft.serve.db.engine import Tx
from weft.serve.errors import NotFound

Record = dict[str, Any]
"""One row, by the names of its columns."""
_LETTERS = string.ascii_letters + string.digits


@dataclass(frozen=True)
class Page:
    """Some rows of a list, and whether there are more after them."""

    items: list[Record]
    has_more: bool


@dataclass(frozen=True)
class Basis:
    """All rows that an answer is made of, in plain SQL for SQLite: while they are the same, the answer is."""

    sql: str
    values: tuple[Any, ...]


def new_id(prefix: str) -> str:
    """An id nobody can guess: `file-` and 24 letters and digits."""
    return prefix + "".join(secrets.choice(_LETTERS) for _ in range(24))


def first(tx: Tx, query: sa.Select[Any]) -> Record | None:
    """The first row of a query, or None."""
    row = tx.execute(query.limit(1)).mappings().first()
    return None if row is None else dict(row)


def every(tx: Tx, query: sa.Select[Any]) -> list[Record]:
    """All rows of a query."""
    return [dict(row) for row in tx.execute(query).mappings()]


def page(
    tx: Tx,
    table: sa.Table,
    where: Sequence[sa.ColumnElement[bool]],
    *,
    after: str | None,
    limit: int,
    newest_first: bool = True,
) -> Page:
    """Up to `limit` rows after the one with id `after`; an id that is not in the list is NotFound.

    A deleted row may still be a place to go on from: `where` must not leave it out of the look-up, so only the
    tenant's and the parent's conditions (the first of `where`) apply to it.
    """
    query = sa.select(table).where(*where)
    if after:
        place = tx.execute(sa.select(table.c.seq).where(table.c.id == after, where[0])).scalar_one_or_none()
        if place is None:
            raise NotFound(f"No such object: {after}", where="after")
        query = query.where(table.c.seq < place if newest_first else table.c.seq > place)
    query = query.order_by(table.c.seq.desc() if newest_first else table.c.seq.asc())
    items = every(tx, query.limit(limit + 1))
    return Page(items[:limit], len(items) > limit)
