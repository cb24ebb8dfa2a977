"""The first tables.

Revision 0001, after nothing.
"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "tenants",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("created_at", BIG, nullable=False),
        sa.Column("is_disabled", sa.Boolean(), nullable=False),
        sa.Column("weight", sa.Float(), nullable=False),
        sa.Column("max_priority", sa.Integer(), nullable=False),
        sa.Column("max_active_jobs", sa.Integer(), nullable=True),
        sa.Column("max_trained_tokens", BIG, nullable=True),
        sa.Column("max_stored_bytes", BIG, nullable=True),
        sa.Column("max_requests_per_minute", sa.Integer(), nullable=True),
        sa.PrimaryKeyConstraint("id", name="pk_tenants"),
    )
    op.create_table(
        "workers",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("base_model", sa.String(length=512), nullable=False),
        sa.Column("address", sa.String(length=256), nullable=True),
        sa.Column("token", sa.String(length=64), nullable=True),
        sa.Column("started_at", BIG, nullable=False),
        sa.Column("seen_at", sa.Float(), nullable=False),
        sa.Column("is_draining", sa.Boolean(), nullable=False),
        sa.Column("info", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_workers"),
    )
    op.create_table(
        "audit",
        sa.Column("seq", BIG, autoincrement=True, nullable=False),
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("key", sa.String(length=32), nullable=True),
        sa.Column("action", sa.String(length=64), nullable=False),
        sa.Column("object", sa.String(length=512), nullable=False),
        sa.Column("request", sa.String(length=64), nullable=False),
        sa.Column("data", sa.JSON(), nullable=True),
        sa.Column("created_at", BIG, nullable=False),
        sa.ForeignKeyConstraint(["tenant"], ["tenants.id"], name="fk_audit_tenant"),
        sa.PrimaryKeyConstraint("seq", name="pk_audit"),
    )
    op.create_index("ix_audit_tenant", "audit", ["tenant"], unique=False)
    op.create_table(
        "checkpoints",
        sa.Column("seq", BIG, autoincrement=True, nullable=False),
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("job", sa.String(length=64), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("model", sa.String(length=512), nullable=False),
        sa.Column("metrics", sa.JSON(), nullable=False),
        sa.Column("blob", sa.String(length=256), nullable=True),
        sa.Column("created_at", BIG, nullable=False),
        sa.ForeignKeyConstraint(["tenant"], ["tenants.id"], name="fk_checkpoints_tenant"),
        sa.PrimaryKeyConstraint("seq", name="pk_checkpoints"),
        sa.UniqueConstraint("id", name="uq_checkpoints_id"),
        sa.UniqueConstraint("job", "step", name="uq_checkpoints_job_step"),
    )
    op.create_index("ix_checkpoints_job", "checkpoints", ["job"], unique=False)
    op.create_index("ix_checkpoints_tenant", "checkpoints", ["tenant"], unique=False)
    op.create_table(
        "events",
        sa.Column("seq", BIG, autoincrement=True, nullable=False),
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("job", sa.String(length=64), nullable=False),
        sa.Column("created_at", BIG, nullable=False),
        sa.Column("level", sa.String(length=8), nullable=False),
        sa.Column("type", sa.String(length=16), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("data", sa.JSON(), nullable=True),
        sa.ForeignKeyConstraint(["tenant"], ["tenants.id"], name="fk_events_tenant"),
        sa.PrimaryKeyConstraint("seq", name="pk_events"),
        sa.UniqueConstraint("id", name="uq_events_id"),
    )
    op.create_index("ix_events_job_seq", "events", ["job", "seq"], unique=False)
    op.create_index("ix_events_tenant", "events", ["tenant"], unique=False)
    op.create_table(
        "files",
        sa.Column("seq", BIG, autoincrement=True, nullable=False),
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("filename", sa.String(length=512), nullable=False),
        sa.Column("purpose", sa.String(length=32), nullable=False),
        sa.Column("bytes", BIG, nullable=False),
        sa.Column("sha256", sa.String(length=64), nullable=False),
        sa.Column("blob", sa.String(length=256), nullable=False),
        sa.Column("status", sa.String(length=16), nullable=False),
        sa.Column("status_details", sa.Text(), nullable=True),
        sa.Column("created_at", BIG, nullable=False),
        sa.Column("expires_at", BIG, nullable=True),
        sa.Column("deleted_at", BIG, nullable=True),
        sa.ForeignKeyConstraint(["tenant"], ["tenants.id"], name="fk_files_tenant"),
        sa.PrimaryKeyConstraint("seq", name="pk_files"),
        sa.UniqueConstraint("id", name="uq_files_id"),
    )
    op.create_index("ix_files_tenant", "files", ["tenant"], unique=False)
    op.create_table(
        "idempotency",
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("key", sa.String(length=255), nullable=False),
        sa.Column("request_hash", sa.String(length=64), nullable=False),
        sa.Column("object_id", sa.String(length=64), nullable=False),
        sa.Column("created_at", BIG, nullable=False),
        sa.ForeignKeyConstraint(["tenant"], ["tenants.id"], name="fk_idempotency_tenant"),
        sa.PrimaryKeyConstraint("tenant", "key", name="pk_idempotency"),
    )
    op.create_table(
        "jobs",
        sa.Column("seq", BIG, autoincrement=True, nullable=False),
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("status", sa.String(length=20), nullable=False),
        sa.Column("wanted", sa.String(length=10), nullable=True),
        sa.Column("model", sa.String(length=512), nullable=False),
        sa.Column("training_file", sa.String(length=64), nullable=False),
        sa.Column("validation_file", sa.String(length=64), nullable=True),
        sa.Column("suffix", sa.String(length=64), nullable=True),
        sa.Column("seed", BIG, nullable=False),
        sa.Column("method", sa.JSON(), nullable=False),
        sa.Column("settings", sa.JSON(), nullable=False),
        sa.Column("integrations", sa.JSON(), nullable=False),
        sa.Column("metadata", sa.JSON(), nullable=True),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("created_at", BIG, nullable=False),
        sa.Column("started_at", BIG, nullable=True),
        sa.Column("finished_at", BIG, nullable=True),
        sa.Column("estimated_finish", BIG, nullable=True),
        sa.Column("fine_tuned_model", sa.String(length=512), nullable=True),
        sa.Column("result_files", sa.JSON(), nullable=False),
        sa.Column("error", sa.JSON(), nullable=True),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("total_steps", sa.Integer(), nullable=True),
        sa.Column("trained_tokens", BIG, nullable=False),
        sa.Column("fence", BIG, nullable=False),
        sa.Column("worker", sa.String(length=64), nullable=True),
        sa.Column("lease_until", sa.Float(), nullable=True),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["tenant"], ["tenants.id"], name="fk_jobs_tenant"),
        sa.PrimaryKeyConstraint("seq", name="pk_jobs"),
        sa.UniqueConstraint("id", name="uq_jobs_id"),
    )
    op.create_index("ix_jobs_status", "jobs", ["status"], unique=False)
    op.create_index("ix_jobs_tenant", "jobs", ["tenant"], unique=False)
    op.create_table(
        "keys",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("name", sa.String(length=200), nullable=False),
        sa.Column("hash", sa.String(length=64), nullable=False),
        sa.Column("scopes", sa.JSON(), nullable=False),
        sa.Column("created_at", BIG, nullable=False),
        sa.Column("last_used_at", BIG, nullable=True),
        sa.Column("revoked_at", BIG, nullable=True),
        sa.ForeignKeyConstraint(["tenant"], ["tenants.id"], name="fk_keys_tenant"),
        sa.PrimaryKeyConstraint("id", name="pk_keys"),
    )
    op.create_index("ix_keys_tenant", "keys", ["tenant"], unique=False)
    op.create_table(
        "models",
        sa.Column("seq", BIG, autoincrement=True, nullable=False),
        sa.Column("id", sa.String(length=512), nullable=False),
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("job", sa.String(length=64), nullable=False),
        sa.Column("base", sa.String(length=512), nullable=False),
        sa.Column("blob", sa.String(length=256), nullable=False),
        sa.Column("bytes", BIG, nullable=False),
        sa.Column("created_at", BIG, nullable=False),
        sa.Column("deleted_at", BIG, nullable=True),
        sa.ForeignKeyConstraint(["tenant"], ["tenants.id"], name="fk_models_tenant"),
        sa.PrimaryKeyConstraint("seq", name="pk_models"),
        sa.UniqueConstraint("id", name="uq_models_id"),
    )
    op.create_index("ix_models_tenant", "models", ["tenant"], unique=False)
    op.create_table(
        "usage",
        sa.Column("seq", BIG, autoincrement=True, nullable=False),
        sa.Column("tenant", sa.String(length=64), nullable=False),
        sa.Column("job", sa.String(length=64), nullable=True),
        sa.Column("model", sa.String(length=512), nullable=True),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("tokens", BIG, nullable=False),
        sa.Column("request", sa.String(length=64), nullable=False),
        sa.Column("created_at", BIG, nullable=False),
        sa.ForeignKeyConstraint(["tenant"], ["tenants.id"], name="fk_usage_tenant"),
        sa.PrimaryKeyConstraint("seq", name="pk_usage"),
        sa.UniqueConstraint("request", "kind", name="uq_usage_request_kind"),
    )
    op.create_index("ix_usage_tenant", "usage", ["tenant"], unique=False)
