"""What Alembic runs: the scripts in `versions`, inside the transaction that `weft.serve.db.engine` has begun."""

from alembic import context

from weft.serve.db.tables import METADATA

context.configure(connection=context.config.attributes["connection"], target_metadata=METADATA, render_as_batch=True)
context.run_migrations()
