"""The rows of tenants and their limits; None means no limit."""

from __future__ import annotations

import re
from typing import Any

import sqlalchemy as sa

from weft.errors import ConfigError
from weft.serve.db.engine import Tx, now
from weft.serve.db.tables import TENANTS
from weft.serve.errors import NotFound
from weft.serve.records.rows import DbRow, every, first

TENANT_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
DEFAULT_TENANT = "default"
LIMITS = (
    "weight",
    "max_priority",
    "max_active_jobs",
    "max_trained_tokens",
    "max_stored_bytes",
    "max_requests_per_minute",
)
"""The columns an operator may set."""


def create_tenant(tx: Tx, tenant: str, name: str = "", **limits: Any) -> DbRow:
    """Adds a tenant; its id becomes part of the names of its models."""
    if not TENANT_ID.fullmatch(tenant):
        raise ConfigError(f"{tenant!r} is not a tenant id; use lower-case letters, digits and '-', at most 63.")
    if find_tenant(tx, tenant) is not None:
        raise ConfigError(f"there is already a tenant {tenant!r}.")
    row = {"id": tenant, "name": name or tenant, "created_at": int(now(tx)), **_checked(limits)}
    tx.execute(sa.insert(TENANTS).values(row))
    return get_tenant(tx, tenant)


def find_tenant(tx: Tx, tenant: str) -> DbRow | None:
    """Finds a tenant, or returns None."""
    return first(tx, sa.select(TENANTS).where(TENANTS.c.id == tenant))


def get_tenant(tx: Tx, tenant: str) -> DbRow:
    """Finds a tenant; raises NotFound if there is none."""
    row = find_tenant(tx, tenant)
    if row is None:
        raise NotFound(f"there is no tenant {tenant!r}.")
    return row


def list_tenants(tx: Tx) -> list[DbRow]:
    """Lists all tenants, for the operator."""
    return every(tx, sa.select(TENANTS).order_by(TENANTS.c.created_at, TENANTS.c.id))


def update_tenant(tx: Tx, tenant: str, *, is_disabled: bool | None = None, **limits: Any) -> DbRow:
    """Sets limits of a tenant, or disables it."""
    changes = _checked(limits)
    if is_disabled is not None:
        changes["is_disabled"] = is_disabled
    get_tenant(tx, tenant)
    if changes:
        tx.execute(sa.update(TENANTS).where(TENANTS.c.id == tenant).values(changes))
    return get_tenant(tx, tenant)


def _checked(limits: dict[str, Any]) -> dict[str, Any]:
    for name, value in limits.items():
        if name not in LIMITS:
            raise ConfigError(f"unknown limit; accepted are {', '.join(LIMITS)}.", where=name)
        if value is None and name in ("weight", "max_priority"):
            raise ConfigError("needs a number.", where=name)
        if value is not None and (value < 0 or (name == "weight" and not 0 < value <= 1e6)):
            raise ConfigError(f"got {value}; use a number above 0.", where=name)
    return dict(limits)
