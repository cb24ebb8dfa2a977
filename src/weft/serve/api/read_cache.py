"""Keeps answers that were read from the database, and gives them again for as long as they are still true.

Many clients poll: whether their job is done, what is in the list, whether a key is valid.
SQLite reports in microseconds whether any connection, in any process, has committed since the last look (`PRAGMA
data_version`); until then every answer is still true. After a commit, which a worker makes about twice a second, an
answer whose rows are known is checked against those rows: most jobs have not changed, and the check takes a tenth of
the time of making the answer again. So a revoked key is refused from the next request on, and a client
sees its own changes. PostgreSQL has no such number; there everything is read each time.
"""

from __future__ import annotations

import sqlite3
import threading
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from starlette.concurrency import run_in_threadpool

from weft.serve.db.engine import Database, Tx, WatchedRows
from weft.serve.errors import Busy

MAX_KEPT = 1000
T = TypeVar("T")


@dataclass
class _CachedRead:
    found: Any
    watched: WatchedRows | None
    rows: list[tuple[Any, ...]]
    """The watched rows as they were in the snapshot from which the answer was made."""
    version: int
    """The version of the database at which the answer was last known to be true."""


class ReadCache:
    """Answers of reads that clients repeat; it is used on the event loop."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lock = threading.Lock()
        self._version: int | None = None
        self._kept: dict[Hashable, _CachedRead] = {}
        self._cursor: Any = None

    async def read(self, key: Hashable | None, look: Callable[[Tx], T], watched: WatchedRows | None = None) -> T:
        """Returns what `look` finds now; `key` names everything that this depends on besides the database.

        `watched` are all rows that the answer depends on, if they are few. On SQLite `look` runs right here, which
        takes less time than handing it to a thread, so it must be short. A `look` that may take long is given no key:
        it runs in a thread, and its answer is not kept.
        """
        if key is None or not self._database.is_sqlite:
            return await run_in_threadpool(self._look, look)
        with self._lock:
            version = self._forget_if_changed()
            kept = self._kept.get(key)
            if kept is None or not self._is_true(kept, version):
                kept = self._keep(key, look, watched, version)
            return cast(T, kept.found)

    def _look(self, look: Callable[[Tx], T]) -> T:
        with self._database.read() as tx:
            return look(tx)

    def _keep(self, key: Hashable, look: Callable[[Tx], T], watched: WatchedRows | None, version: int) -> _CachedRead:
        """Makes an answer and keeps it. The version was read before, so the answer may be newer, but never older."""
        with self._database.read() as tx:
            # SQLAlchemy would take a millisecond for forty columns, so this goes past it.
            rows = [] if watched is None else tx.connection.cursor().execute(watched.sql, watched.values).fetchall()
            kept = _CachedRead(look(tx), watched, rows, version)
        self._kept.pop(key, None)
        while len(self._kept) >= MAX_KEPT:
            del self._kept[next(iter(self._kept))]
        self._kept[key] = kept
        return kept

    def _is_true(self, kept: _CachedRead, version: int) -> bool:
        if kept.version != version:
            if kept.watched is None or self._rows(kept.watched.sql, kept.watched.values) != kept.rows:
                return False
            kept.version = version
        return True

    def _forget_if_changed(self) -> int:
        """Returns the version of the database; if it is a new one, answers without watched rows are forgotten."""
        if self._cursor is None:
            # The number changes with commits of other connections only, so this connection never commits.
            connection = self._database.engine.raw_connection()
            connection.detach()
            weakref.finalize(self, connection.close)
            self._cursor = connection.cursor()
        ((version,),) = self._rows("PRAGMA data_version")
        if version != self._version:
            self._kept = {key: kept for key, kept in self._kept.items() if kept.watched is not None}
            self._version = version
        return int(version)

    def _rows(self, sql: str, values: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        try:
            return cast(list[tuple[Any, ...]], self._cursor.execute(sql, values).fetchall())
        except sqlite3.OperationalError as error:
            raise Busy("the database cannot be read at the moment; try again.") from error
