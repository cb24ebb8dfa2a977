"""The tables. Every row but a worker's and those of `adapters` belongs to a tenant, and no query leaves the tenant out.

Times are unix seconds by the database's own clock. Ids are those of the API (`file-…`, `ftjob-…`); `seq` orders what
has the same second. JSON columns hold what the API shows as objects.
"""

from __future__ import annotations

import sqlalchemy as sa

METADATA = sa.MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    }
)
BIG = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
"""SQLite numbers rows by itself only in a column of type INTEGER."""


def _seq() -> sa.Column[int]:
    return sa.Column("seq", BIG, primary_key=True, autoincrement=True)


def _tenant() -> sa.Column[str]:
    return sa.Column("tenant", sa.String(64), sa.ForeignKey("tenants.id"), nullable=False, index=True)


TENANTS = sa.Table(
    "tenants",
    METADATA,
    sa.Column("id", sa.String(64), primary_key=True),
    sa.Column("name", sa.String(200), nullable=False),
    sa.Column("created_at", BIG, nullable=False),
    sa.Column("is_disabled", sa.Boolean, nullable=False, default=False),
    sa.Column("weight", sa.Float, nullable=False, default=1.0),  # its share beside others
    sa.Column("max_priority", sa.Integer, nullable=False, default=0),
    sa.Column("max_active_jobs", sa.Integer),  # None: no limit, here and below
    sa.Column("max_trained_tokens", BIG),
    sa.Column("max_stored_bytes", BIG),
    sa.Column("max_requests_per_minute", sa.Integer),
)

KEYS = sa.Table(
    "keys",
    METADATA,
    sa.Column("id", sa.String(32), primary_key=True),
    _tenant(),
    sa.Column("name", sa.String(200), nullable=False, default=""),
    sa.Column("hash", sa.String(64), nullable=False),  # SHA-256 of the secret, which is nowhere
    sa.Column("scopes", sa.JSON, nullable=False),  # of: files, jobs, models, chat, usage, admin
    sa.Column("created_at", BIG, nullable=False),
    sa.Column("last_used_at", BIG),
    sa.Column("revoked_at", BIG),
)

FILES = sa.Table(
    "files",
    METADATA,
    _seq(),
    sa.Column("id", sa.String(64), nullable=False, unique=True),
    _tenant(),
    sa.Column("filename", sa.String(512), nullable=False),
    sa.Column("purpose", sa.String(32), nullable=False),
    sa.Column("bytes", BIG, nullable=False),
    sa.Column("sha256", sa.String(64), nullable=False),
    sa.Column("blob", sa.String(256), nullable=False),  # its name in the file store, made by us
    sa.Column("status", sa.String(16), nullable=False),  # uploaded, processed, error
    sa.Column("status_details", sa.Text),
    sa.Column("created_at", BIG, nullable=False),
    sa.Column("expires_at", BIG),
    sa.Column("deleted_at", BIG),
)

UPLOADS = sa.Table(
    "uploads",
    METADATA,
    _seq(),
    sa.Column("id", sa.String(64), nullable=False, unique=True),
    _tenant(),
    sa.Column("filename", sa.String(512), nullable=False),
    sa.Column("purpose", sa.String(32), nullable=False),
    sa.Column("bytes", BIG, nullable=False),  # of the whole file, as announced
    sa.Column("status", sa.String(16), nullable=False),  # pending, completed, cancelled
    sa.Column("file", sa.String(64)),  # what it was completed as
    sa.Column("keep_s", BIG),  # how long that file is kept, if not for good
    sa.Column("created_at", BIG, nullable=False),
    sa.Column("expires_at", BIG, nullable=False),
)

UPLOAD_PARTS = sa.Table(
    "upload_parts",
    METADATA,
    _seq(),
    sa.Column("id", sa.String(64), nullable=False, unique=True),
    _tenant(),
    sa.Column("upload", sa.String(64), nullable=False, index=True),
    sa.Column("bytes", BIG, nullable=False),
    sa.Column("blob", sa.String(256), nullable=False),
    sa.Column("created_at", BIG, nullable=False),
)

JOBS = sa.Table(
    "jobs",
    METADATA,
    _seq(),
    sa.Column("id", sa.String(64), nullable=False, unique=True),
    _tenant(),
    sa.Column("status", sa.String(20), nullable=False, index=True),  # see weft.serve.db.jobs
    sa.Column("wanted", sa.String(10)),  # cancel, pause or resume: requested, not yet done by the worker
    sa.Column("model", sa.String(512), nullable=False),
    sa.Column("training_file", sa.String(64), nullable=False),
    sa.Column("validation_file", sa.String(64)),
    sa.Column("suffix", sa.String(64)),
    sa.Column("seed", BIG, nullable=False),
    sa.Column("method", sa.JSON, nullable=False),  # as the API shows it, `auto` resolved once known
    sa.Column("settings", sa.JSON, nullable=False),  # what `weft train` would read: the job as trained
    sa.Column("integrations", sa.JSON, nullable=False),
    sa.Column("metadata", sa.JSON),
    sa.Column("priority", sa.Integer, nullable=False, default=0),
    sa.Column("created_at", BIG, nullable=False),
    sa.Column("started_at", BIG),
    sa.Column("finished_at", BIG),
    sa.Column("estimated_finish", BIG),
    sa.Column("fine_tuned_model", sa.String(512)),
    sa.Column("result_files", sa.JSON, nullable=False),
    sa.Column("error", sa.JSON),
    sa.Column("step", sa.Integer, nullable=False, default=0),
    sa.Column("total_steps", sa.Integer),
    sa.Column("trained_tokens", BIG, nullable=False, default=0),  # up to the last durable point; set, never added to
    sa.Column("planned_tokens", BIG),  # what it is to train in all: guessed from its files, then counted by the worker
    sa.Column("fence", BIG, nullable=False, default=0),  # raised by every worker that takes the job
    sa.Column("worker", sa.String(64)),
    sa.Column("lease_until", sa.Float),
    sa.Column("attempts", sa.Integer, nullable=False, default=0),  # takeovers after a crash
    sa.Column("saved_step", sa.Integer),  # the step of its newest training checkpoint in the file store
    sa.Column("saved_blob", sa.String(256)),  # that checkpoint, for workers that do not see the directory it is in
    sa.Column("min_job_bytes", BIG),  # only a worker with so many bytes for jobs can hold it; a smaller one found out
)

EVENTS = sa.Table(
    "events",
    METADATA,
    _seq(),
    sa.Column("id", sa.String(64), nullable=False, unique=True),
    _tenant(),
    sa.Column("job", sa.String(64), nullable=False),
    sa.Column("created_at", BIG, nullable=False),
    sa.Column("level", sa.String(8), nullable=False),  # info, warn, error
    sa.Column("type", sa.String(16), nullable=False),  # message, metrics
    sa.Column("message", sa.Text, nullable=False),
    sa.Column("data", sa.JSON),
    sa.Index(None, "job", "seq"),
)

CHECKPOINTS = sa.Table(
    "checkpoints",
    METADATA,
    _seq(),
    sa.Column("id", sa.String(64), nullable=False, unique=True),
    _tenant(),
    sa.Column("job", sa.String(64), nullable=False, index=True),
    sa.Column("step", sa.Integer, nullable=False),
    sa.Column("model", sa.String(512), nullable=False),
    sa.Column("metrics", sa.JSON, nullable=False),
    sa.Column("blob", sa.String(256)),  # a PEFT archive in the file store
    sa.Column("created_at", BIG, nullable=False),
    sa.UniqueConstraint("job", "step"),
)

MODELS = sa.Table(
    "models",
    METADATA,
    _seq(),
    sa.Column("id", sa.String(512), nullable=False, unique=True),
    _tenant(),
    sa.Column("job", sa.String(64), nullable=False),
    sa.Column("base", sa.String(512), nullable=False),
    sa.Column("blob", sa.String(256), nullable=False),  # a PEFT archive in the file store
    sa.Column("bytes", BIG, nullable=False),
    sa.Column("created_at", BIG, nullable=False),
    sa.Column("deleted_at", BIG),
)

ADAPTERS = sa.Table(
    "adapters",
    METADATA,
    sa.Column("root", sa.String(1024), primary_key=True),  # the directory where it was found; "" if an admin loaded it
    sa.Column("name", sa.String(512), primary_key=True),
    sa.Column("path", sa.Text, nullable=False),
    sa.Column("version", sa.String(64), nullable=False),  # changes with its files
    sa.Column("base", sa.String(512), nullable=False),
    sa.Column("bytes", BIG, nullable=False),
    sa.Column("created_at", BIG, nullable=False),
    sa.Column("is_checked", sa.Boolean, nullable=False, default=False),  # a worker has read this version
    sa.Column("error", sa.Text),  # why it cannot be used
)

USAGE = sa.Table(
    "usage",
    METADATA,
    _seq(),
    _tenant(),
    sa.Column("job", sa.String(64)),
    sa.Column("model", sa.String(512)),
    sa.Column("kind", sa.String(16), nullable=False),  # evaluated, prompt, completion; trained tokens are in `jobs`
    sa.Column("tokens", BIG, nullable=False),
    sa.Column("request", sa.String(64), nullable=False),  # of an evaluation: its job and step
    sa.Column(
        "num", BIG, nullable=False, default=1, server_default="1"
    ),  # requests that were added up, of one past day
    sa.Column("created_at", BIG, nullable=False),
    sa.UniqueConstraint("request", "kind"),
)

IDEMPOTENCY = sa.Table(
    "idempotency",
    METADATA,
    sa.Column("tenant", sa.String(64), sa.ForeignKey("tenants.id"), primary_key=True),
    sa.Column("key", sa.String(255), primary_key=True),
    sa.Column("request_hash", sa.String(64), nullable=False),
    sa.Column("object_id", sa.String(64), nullable=False),  # what the first request made
    sa.Column("created_at", BIG, nullable=False),
)

AUDIT = sa.Table(
    "audit",
    METADATA,
    _seq(),
    _tenant(),
    sa.Column("key", sa.String(32)),
    sa.Column("action", sa.String(64), nullable=False),
    sa.Column("object", sa.String(512), nullable=False, default=""),
    sa.Column("request", sa.String(64), nullable=False, default=""),
    sa.Column("data", sa.JSON),
    sa.Column("created_at", BIG, nullable=False),
)

WORKERS = sa.Table(
    "workers",
    METADATA,
    sa.Column("id", sa.String(64), primary_key=True),
    sa.Column("base_model", sa.String(512), nullable=False),
    sa.Column("address", sa.String(256)),  # where it answers prompts, on this machine or a private network
    sa.Column("token", sa.String(64)),  # the secret that prompts must bring
    sa.Column("started_at", BIG, nullable=False),
    sa.Column("seen_at", sa.Float, nullable=False),
    sa.Column("is_draining", sa.Boolean, nullable=False, default=False),
    sa.Column("info", sa.JSON, nullable=False),  # device, memory, tokens per second, jobs: for dashboard and metrics
    sa.Column("machine", sa.String(256)),  # the name of the host it runs on
    sa.Column("lease_s", sa.Float),  # how long it may be silent before it counts as lost
    sa.Column("wanted", sa.String(10)),  # drain or remove: what the operator wants of it
)
