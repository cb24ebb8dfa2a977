"""What was read from the database, given again for as long as nothing in it has changed.

Many clients ask the same again and again: is my job done, what is in the list, is this key good. SQLite says in
microseconds whether anybody, in any process, has committed since it was last asked (`PRAGMA data_version`); until then
the answer is the same, and afterwards nothing that was kept is used. So a revoked key opens nothing from the next
request on, and whoever changed something sees it. PostgreSQL has no such number: there everything is read each time.
"""

from __future__ import annotations

import sqlite3
import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Any, TypeVar, cast

from starlette.concurrency import run_in_threadpool

from weft.serve.db.engine import Database, Tx
from weft.serve.errors import Busy

MAX_KEPT = 1000
"""Answers kept at most; an idle service must not gather them without end."""
T = TypeVar("T")


class Fresh:
    """Reads that are repeated; called on the event loop."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lock = threading.Lock()
        self._version: int | None = None
        self._kept: dict[Hashable, Any] = {}
        self._cursor: Any = None

    async def read(self, key: Hashable | None, look: Callable[[Tx], T]) -> T:
        """What `look` finds, as of now; `key` names everything that it depends on besides the database.

        On SQLite it is read right here: that takes less time than handing it to a thread. So `look` must be short; one
        that may not be has no key, is left to a thread, and is not kept.
        """
        if key is None or not self._database.is_sqlite:
            return await run_in_threadpool(self._look, look)
        with self._lock:
            self._forget_if_changed()
            if key not in self._kept:
                # Read after the version was: it may be newer than that, never older.
                found = self._look(look)
                if len(self._kept) >= MAX_KEPT:
                    self._kept.clear()
                self._kept[key] = found
            return cast(T, self._kept[key])

    def _look(self, look: Callable[[Tx], T]) -> T:
        with self._database.read() as tx:
            return look(tx)

    def _forget_if_changed(self) -> None:
        if self._cursor is None:
            # A connection of its own: the number tells of commits of all others, and this one never makes any.
            connection = self._database.engine.raw_connection()
            connection.detach()
            weakref.finalize(self, connection.close)
            self._cursor = connection.cursor()
        try:
            (version,) = self._cursor.execute("PRAGMA data_version").fetchone()
        except sqlite3.OperationalError as error:
            raise Busy("the database cannot be read at the moment; try again.") from error
        if version != self._version:
            self._kept.clear()
            self._version = version
