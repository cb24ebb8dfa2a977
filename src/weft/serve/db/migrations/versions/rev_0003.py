"""Workers on many machines: who they are, what is wanted of them, and checkpoints that travel.

Revision 0003, after 0002.
"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.add_column("workers", sa.Column("machine", sa.String(length=256), nullable=True))
    op.add_column("workers", sa.Column("lease_s", sa.Float(), nullable=True))
    op.add_column("workers", sa.Column("wanted", sa.String(length=10), nullable=True))
    op.add_column("jobs", sa.Column("saved_step", sa.Integer(), nullable=True))
    op.add_column("jobs", sa.Column("saved_blob", sa.String(length=256), nullable=True))
    op.add_column("jobs", sa.Column("min_job_bytes", BIG, nullable=True))
