"""The database as one small type: transactions that read, transactions that write, the clock that counts, and rows.

SQLite uses WAL and synchronous=FULL, and writers take the lock when they begin, so that none can fail half way for want
of it. A writer that finds the lock taken waits a random moment and tries again; SQLite's own waiting lets a busy writer
starve the others. On PostgreSQL these are plain transactions; the functions of this package lock the rows they change.

A problem of the database, and not of the request, is Busy: it is locked, away or full, or it undid the transaction to
end a deadlock. Then nothing was written, unless the error is Unsure: the connection broke during the commit.
"""

from __future__ import annotations

import contextlib
import json
import random
import secrets
import string
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.exc import DBAPIError, OperationalError

from weft.errors import ConfigError, needs_extra
from weft.serve.errors import Busy, NotFound, Unsure

Tx = sa.Connection
LOCK_WAIT_S = 10.0
"""How long a writer tries to get SQLite's lock before it raises Busy."""
PAUSE_S = (0.002, 0.05)
"""The shortest and the longest pause between two tries; it is random so that two writers do not collide again."""
_Made = TypeVar("_Made")
_PRAGMAS = ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", "busy_timeout=20")


class Database:
    """Transactions on one database. Threads may share it."""

    def __init__(self, engine: sa.Engine, *, lock_wait_s: float = LOCK_WAIT_S) -> None:
        self.engine = engine
        self.is_sqlite = engine.dialect.name == "sqlite"
        self._lock_wait_s = lock_wait_s
        self._writing = engine.execution_options(weft_writes=True)
        # Threads of one process wait for each other here, in order, and only the first of them tries SQLite's lock.
        self._turn = threading.Lock()

    @contextlib.contextmanager
    def begin(self) -> Iterator[Tx]:
        """Opens a transaction that may write: it is committed when the block ends, or undone if the block raises."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(_connection_errors())
            if self.is_sqlite and not self._turn.acquire(timeout=self._lock_wait_s):
                raise Busy("the database is busy; try again.")
            if self.is_sqlite:
                stack.callback(self._turn.release)
            connection = stack.enter_context(self._writing.connect())
            transaction = self._begin(connection)
            with transaction:
                yield connection
                with _commit_errors():
                    transaction.commit()

    def run(self, work: Callable[[Tx], _Made]) -> _Made:
        """Runs `work` in a transaction that may write, and runs it again if the database undid it to end a deadlock."""
        deadline = time.monotonic() + self._lock_wait_s
        while True:
            try:
                with self.begin() as tx:
                    return work(tx)
            except _Undone:
                if time.monotonic() > deadline:
                    raise
                time.sleep(random.uniform(*PAUSE_S))

    @contextlib.contextmanager
    def read(self) -> Iterator[Tx]:
        """Opens a transaction that only reads; writers do not hold it up."""
        with _connection_errors(), self.engine.connect() as connection, connection.begin():
            yield connection

    def close(self) -> None:
        self.engine.dispose()

    def _begin(self, connection: Tx) -> sa.RootTransaction:
        deadline = time.monotonic() + self._lock_wait_s
        while True:
            try:
                return connection.begin()
            except OperationalError as error:
                if not (self.is_sqlite and is_locked(error)):
                    raise
                if time.monotonic() > deadline:
                    raise Busy("the database is locked by another process; try again.") from None
                time.sleep(random.uniform(*PAUSE_S))


def open_database(url: str, *, lock_wait_s: float = LOCK_WAIT_S) -> Database:
    """Opens the database at a URL such as `sqlite:////var/lib/weft/weft.db` or `postgresql://user@host/weft`."""
    try:
        parsed = sa.make_url(_with_driver(url))
    except sa.exc.ArgumentError:
        raise ConfigError(
            f"{url!r} is not a database URL; use sqlite:///PATH or postgresql://…", where="--db"
        ) from None
    if parsed.get_backend_name() not in ("sqlite", "postgresql"):
        found = parsed.get_backend_name()
        raise ConfigError(f"{found} is not supported; use sqlite:///PATH or postgresql://…", where="--db")
    options: dict[str, Any] = {"json_serializer": json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode}
    if parsed.get_backend_name() == "postgresql":
        options |= {"pool_pre_ping": True, "pool_size": 10, "max_overflow": 40, "connect_args": {"connect_timeout": 5}}
    else:
        if parsed.database:
            Path(parsed.database).parent.mkdir(parents=True, exist_ok=True)
        options |= {"pool_size": 50, "max_overflow": 50, "connect_args": {"check_same_thread": False}}
    with needs_extra("postgres", "PostgreSQL needs psycopg.", "--db"):
        engine = sa.create_engine(parsed, **options)
    if parsed.get_backend_name() == "sqlite":
        event.listen(engine, "connect", _set_up_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
    return Database(engine, lock_wait_s=lock_wait_s)


def now(tx: Tx) -> float:
    """Returns unix seconds by the database's clock, the only clock that counts for leases and times."""
    if tx.dialect.name == "sqlite":
        return float(tx.exec_driver_sql("SELECT (julianday('now') - 2440587.5) * 86400.0").scalar_one())
    return float(tx.exec_driver_sql("SELECT extract(epoch FROM clock_timestamp())").scalar_one())


def is_locked(error: DBAPIError) -> bool:
    return "database is locked" in str(error.orig) or "database table is locked" in str(error.orig)


class _Undone(Busy):
    """The database undid the transaction; the same one may well succeed at once."""


@contextlib.contextmanager
def _connection_errors() -> Iterator[None]:
    """Raises Busy for errors of a database that is away, locked or full, or that undid the transaction."""
    try:
        yield
    except DBAPIError as error:
        if _sqlstate(error) in _UNDONE:
            raise _Undone("another transaction was in the way; try again.") from error
        if error.connection_invalidated:
            raise _Undone("the connection to the database was lost; try again.") from error
        if is_locked(error) or _is_away(error):
            raise Busy("the database cannot be reached at the moment; try again.") from error
        if _sqlite_code(error).startswith("SQLITE_CANTOPEN"):
            raise Busy("the file cannot be opened or made; look at its directory, permissions and disk.") from error
        if _sqlstate(error).startswith(_OUT_OF_ROOM) or _sqlite_code(error).startswith(_SQLITE_OUT_OF_ROOM):
            raise Busy("the database cannot write: its disk is full or broken; try again later.") from error
        raise
    except sa.exc.TimeoutError as error:
        raise Busy("too many requests wait for the database; try again.") from error


@contextlib.contextmanager
def _commit_errors() -> Iterator[None]:
    """Raises Unsure if the connection broke during the commit; the caller must find out whether it happened."""
    try:
        yield
    except DBAPIError as error:
        if error.connection_invalidated:
            raise Unsure("the connection to the database was lost while it wrote; look before trying again.") from error
        raise


_UNDONE = ("40001", "40P01")
"""PostgreSQL's codes for a failed serialisation and a deadlock."""
_AWAY = ("08", "57", "25006")
"""PostgreSQL's codes for a lost connection, a server that stops or starts, and a copy that is read-only."""
_OUT_OF_ROOM = ("53", "58")
"""PostgreSQL's codes for no disk, memory or connections left, and for errors of its files."""
_SQLITE_OUT_OF_ROOM = ("SQLITE_FULL", "SQLITE_IOERR", "SQLITE_READONLY")


def _sqlstate(error: DBAPIError) -> str:
    return str(getattr(error.orig, "sqlstate", None) or "")


def _is_away(error: DBAPIError) -> bool:
    # A server that cannot be reached sends no code.
    unreachable = isinstance(error, OperationalError) and "connect" in str(error.orig)
    return unreachable or _sqlstate(error).startswith(_AWAY)


def _sqlite_code(error: DBAPIError) -> str:
    return str(getattr(error.orig, "sqlite_errorname", None) or "")


def _with_driver(url: str) -> str:
    for prefix in ("postgresql://", "postgres://"):
        if url.startswith(prefix):
            return "postgresql+psycopg://" + url.removeprefix(prefix)
    return url


def _set_up_sqlite(connection: Any, record: Any) -> None:
    # Python's own transaction handling would begin late and without the lock.
    connection.isolation_level = None
    cursor = connection.cursor()
    for pragma in _PRAGMAS:
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _begin_sqlite(connection: Tx) -> None:
    writes = connection.get_execution_options().get("weft_writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


SCRIPTS = Path(__file__).parent / "migrations"
_LOCK = 7_733_101
"""The number of the PostgreSQL lock under which processes set up the database one after another."""


@contextlib.contextmanager
def _naming(database: Database) -> Iterator[None]:
    """Adds the database's URL, without a password, to the errors of a database that cannot be used."""
    try:
        yield
    except Busy as error:
        url = database.engine.url.set(drivername=database.engine.url.get_backend_name())
        raise error.at(f"--db {url.render_as_string(hide_password=True)}") from error.__cause__


def migrate(database: Database) -> str:
    """Creates or upgrades the tables and returns the revision; refuses a database of a newer version."""
    from alembic import command
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", str(SCRIPTS).replace("%", "%%"))
    scripts = ScriptDirectory.from_config(config)
    head = str(scripts.get_current_head())
    with _naming(database), database.begin() as tx:
        lock_setup(tx)
        before = revision(tx)
        if before == head:
            return head
        if before is not None and before not in {script.revision for script in scripts.walk_revisions()}:
            raise ConfigError(
                f"the database was made by a newer version of Weft (revision {before}; this one knows up to {head}).",
                where="--db",
                hint="Install that version, or restore a backup made before.",
            )
        config.attributes["connection"] = tx
        command.upgrade(config, "head")
    return head


def lock_setup(tx: Tx) -> None:
    """Waits until no other process sets up the database; on SQLite every transaction that writes is alone already."""
    if tx.dialect.name == "postgresql":
        tx.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK)))


def revision(tx: Tx) -> str | None:
    """Returns the revision of a database, or None if it has no tables yet."""
    from alembic.runtime.migration import MigrationContext

    return MigrationContext.configure(tx).get_current_revision()


DbRow = dict[str, Any]
"""One row of a table, by the names of its columns."""
_LETTERS = string.ascii_letters + string.digits


@dataclass(frozen=True)
class Page:
    items: list[DbRow]
    has_more: bool


@dataclass(frozen=True)
class WatchedRows:
    """A query, in plain SQL for SQLite, for all rows that an answer depends on: while they are equal, the answer is."""

    sql: str
    values: tuple[Any, ...]


def new_id(prefix: str) -> str:
    """Makes an id that cannot be guessed: a prefix such as `file-` and 24 letters and digits."""
    return prefix + "".join(secrets.choice(_LETTERS) for _ in range(24))


def first(tx: Tx, query: sa.Select[Any]) -> DbRow | None:
    row = tx.execute(query.limit(1)).mappings().first()
    return None if row is None else dict(row)


def one(tx: Tx, query: sa.Select[Any], missing: NotFound, *, for_update: bool = False) -> DbRow:
    """The first row; raises `missing` without one. With `for_update` no one else can change it until the transaction
    ends."""
    row = first(tx, query.with_for_update() if for_update else query)
    if row is None:
        raise missing
    return row


def every(tx: Tx, query: sa.Select[Any]) -> list[DbRow]:
    return [dict(row) for row in tx.execute(query).mappings()]


def total(tx: Tx, column: sa.Column[Any], *where: sa.ColumnElement[bool]) -> int:
    """The sum of a column over some rows; 0 over none."""
    return int(tx.execute(sa.select(sa.func.coalesce(sa.func.sum(column), 0)).where(*where)).scalar_one())


def seq_after(tx: Tx, table: sa.Table, id: str, *where: sa.ColumnElement[bool]) -> int:
    """The number of the row after which a list goes on; raises NotFound if there is no such id."""
    missing = NotFound(f"No such object: {id}", where="after")
    return int(one(tx, sa.select(table.c.seq).where(table.c.id == id, *where), missing)["seq"])


def page(
    tx: Tx,
    table: sa.Table,
    where: Sequence[sa.ColumnElement[bool]],
    *,
    after: str | None,
    limit: int,
    newest_first: bool = True,
) -> Page:
    """Returns up to `limit` rows after the one with id `after`; raises NotFound if there is no such id in the list. A
    page may go on after a deleted row, so only the first condition of `where`, on the tenant and the parent, applies
    when that row is looked up."""
    query = sa.select(table).where(*where)
    if after:
        seq = seq_after(tx, table, after, where[0])
        query = query.where(table.c.seq < seq if newest_first else table.c.seq > seq)
    query = query.order_by(table.c.seq.desc() if newest_first else table.c.seq.asc())
    items = every(tx, query.limit(limit + 1))
    return Page(items[:limit], len(items) > limit)
