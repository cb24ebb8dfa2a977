"""Brings a database up to this version in one transaction; several processes may try it at once."""

from __future__ import annotations

from pathlib import Path

import sqlalchemy as sa

from weft.errors import ConfigError
from weft.serve.db.engine import Database, Tx

SCRIPTS = Path(__file__).parent / "migrations"
_LOCK = 7_733_101
"""The number of the PostgreSQL lock under which migrations run one after another."""


def migrate(database: Database) -> str:
    """Creates or upgrades the tables and returns the revision; refuses a database of a newer version."""
    from alembic import command
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config()
    config.set_main_option("script_location", str(SCRIPTS).replace("%", "%%"))
    scripts = ScriptDirectory.from_config(config)
    head = str(scripts.get_current_head())
    with database.begin() as tx:
        if tx.dialect.name == "postgresql":
            tx.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK)))
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


def revision(tx: Tx) -> str | None:
    """Returns the revision of a database, or None if it has no tables yet."""
    from alembic.runtime.migration import MigrationContext

    return MigrationContext.configure(tx).get_current_revision()
