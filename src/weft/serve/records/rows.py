"""Rows of the database as plain dictionaries, pages of them in the API's order, and new ids."""

from __future__ import annotations

import secrets
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from weft.serve.db.engine import Tx
from weft.serve.errors import NotFound

DbRow = dict[str, Any]
"""One row of a table, by the names of its columns."""
_LETTERS = string.ascii_letters + string.digits


@dataclass(frozen=True)
class Page:
    """Some rows of a list, and whether there are more after them."""

    items: list[DbRow]
    has_more: bool


@dataclass(frozen=True)
class WatchedRows:
    """A query, in plain SQL for SQLite, for all rows that an answer depends on: while they are equal, the answer is."""

    sql: str
    values: tuple[Any, ...]


def new_id(prefix: str) -> str:
    """Makes an id that nobody can guess: a prefix such as `file-` and 24 letters and digits."""
    return prefix + "".join(secrets.choice(_LETTERS) for _ in range(24))


def first(tx: Tx, query: sa.Select[Any]) -> DbRow | None:
    """Returns the first row of a query, or None."""
    row = tx.execute(query.limit(1)).mappings().first()
    return None if row is None else dict(row)


def every(tx: Tx, query: sa.Select[Any]) -> list[DbRow]:
    """Returns all rows of a query."""
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
    """Returns up to `limit` rows after the one with id `after`; raises NotFound if there is no such id in the list.

    A page may go on after a deleted row, so only the first condition of `where`, on the tenant and the parent, applies
    when that row is looked up.
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
