"""What was read from the database, given again for as long as it is the same.

Many clients ask the same again and again: is my job done, what is in the list, is this key good. SQLite says in
microseconds whether anybody, in any process, has committed since it was last asked (`PRAGMA data_version`); until then
the answer is the same. After a commit, which a worker makes about twice a second, an answer whose rows are known is
compared with them as SQLite holds them: most jobs have not changed, and looking takes a tenth of the time of making
the answer again. So a revoked key opens nothing from the next request on, and whoever changed something sees it.
PostgreSQL has no such number: there everything is read each time.
"""

from __future__ import annotations

import sqlite3
import threading
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from starlette.concurrency import run_in_threadpool

from weft.serve.db.engine import Database, Tx
from weft.serve.errors import Busy
from weft.serve.records.rows import Basis

MAX_KEPT = 1000
"""Answers kept at most; an idle service must not gather them without end."""
T = TypeVar("T")


@dataclass
class _Kept:
    found: Any
    basis: Basis | None
    rows: list[tuple[Any, ...]]
    """What the basis was when the answer was found, in the same snapshot."""
    version: int
    """Of the database when this was last known to be true."""


class Fresh:
    """Reads that are repeated; called on the event loop."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lock = threading.Lock()
        self._version: int | None = None
        self._kept: dict[Hashable, _Kept] = {}
        self._cursor: Any = None

    async def read(self, key: Hashable | None, look: Callable[[Tx], T], basis: Basis | None = None) -> T:
        """What `look` finds, as of now; `key` names everything that it depends on besides the database.

        `basis` holds all rows that it depends on, if they are few. On SQLite it is read right here: that takes less
        time than handing it to a thread. So `look` must be short; one that may not be has no key, is left to a thread,
        and is not kept.
        """
        if key is None or not self._database.is_sqlite:
            return await run_in_threadpool(self._look, look)
        with self._lock:
            version = self._forget_if_changed()
            kept = self._kept.get(key)
            if kept is None or not self._is_true(kept, version):
                kept = self._keep(key, look, basis, version)
            return cast(T, kept.found)

    def _look(self, look: Callable[[Tx], T]) -> T:
        with self._database.read() as tx:
            return look(tx)

    def _keep(self, key: Hashable, look: Callable[[Tx], T], basis: Basis | None, version: int) -> _Kept:
        """Reads after the version was: what is found may be newer than that, never older."""
        with self._database.read() as tx:
            # Past SQLAlchemy, which takes a millisecond to think about forty columns.
            rows = [] if basis is None else tx.connection.cursor().execute(basis.sql, basis.values).fetchall()
            kept = _Kept(look(tx), basis, rows, version)
        self._kept.pop(key, None)
        while len(self._kept) >= MAX_KEPT:
            del self._kept[next(iter(self._kept))]
        self._kept[key] = kept
        return kept

    def _is_true(self, kept: _Kept, version: int) -> bool:
        if kept.version != version:
            if kept.basis is None or self._rows(kept.basis.sql, kept.basis.values) != kept.rows:
                return False
            kept.version = version
        return True

    def _forget_if_changed(self) -> int:
        """The version of the database; what cannot be compared is forgotten when that is another one."""
        if self._cursor is None:
            # A connection of its own: the number tells of commits of all others, and this one never makes any.
            connection = self._database.engine.raw_connection()
            connection.detach()
            weakref.finalize(self, connection.close)
            self._cursor = connection.cursor()
        ((version,),) = self._rows("PRAGMA data_version")
        if version != self._version:
            self._kept = {key: kept for key, kept in self._kept.items() if kept.basis is not None}
            self._version = version
        return int(version)

    def _rows(self, sql: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        try:
            return cast(list[tuple[Any, ...]], self._cursor.execute(sql, values).fetchall())
        except sqlite3.OperationalError as error:
            raise Busy("the database cannot be read at the moment; try again.") from error
