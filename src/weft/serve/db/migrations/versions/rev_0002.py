"""Uploads in parts; the tokens a job is expected to train.

Revision 0002, after 0001.
"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "uploads",
        sa.Column("seq", BIG, autoincrement=True, nullable=False),
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("filename", sa.String(length=512), nullable=False),
        sa.Column("purpose", sa.String(length=32), nullable=False),
        sa.Column("bytes", BIG, nullable=False),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("file", sa.String(length=64), nullable=True),
        sa.Column("keep_s", BIG, nullable=True),
        sa.Column("created_at", BIG, nullable=False),
        sa.Column("expires_at", BIG, nullable=False),
        sa.ForeignKeyConstraint(["tenant"], ["tenants.id"], name="fk_uploads_tenant"),
        sa.PrimaryKeyConstraint("seq", name="pk_uploads"),
        sa.UniqueConstraint("id", name="uq_uploads_id"),
    )
    op.create_index("ix_uploads_tenant", "uploads", ["tenant"], unique=False)
    op.create_table(
        "upload_parts",
        sa.Column("seq", BIG, autoincrement=True, nullable=False),
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("upload", sa.String(length=64), nullable=False),
        sa.Column("bytes", BIG, nullable=False),
        sa.Column("blob", sa.String(length=256), nullable=False),
        sa.Column("created_at", BIG, nullable=False),
        sa.ForeignKeyConstraint(["tenant"], ["tenants.id"], name="fk_upload_parts_tenant"),
        sa.PrimaryKeyConstraint("seq", name="pk_upload_parts"),
        sa.UniqueConstraint("id", name="uq_upload_parts_id"),
    )
    op.create_index("ix_upload_parts_tenant", "upload_parts", ["tenant"], unique=False)
    op.create_index("ix_upload_parts_upload", "upload_parts", ["upload"], unique=False)
    op.add_column("jobs", sa.Column("planned_tokens", BIG, nullable=True))
