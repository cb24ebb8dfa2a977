"""The rows of tenants with their limits, their API keys, their requests by idempotency key, and the audit table.

A limit of None is no limit. A key is `weft_<id>_<secret>`: the secret is 32 random bytes, and only its SHA-256 is
stored. A plain hash is enough for a random secret, which cannot be guessed. It is compared in constant time. The audit
table has one row for every change made through the API or by the operator.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from weft.errors import ConfigError
from weft.serve.db.engine import Database, DbRow, Tx, WatchedRows, every, first, lock_setup, now, one
from weft.serve.db.tables import AUDIT, IDEMPOTENCY, KEYS, TENANTS
from weft.serve.errors import Conflict, NotFound

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
    return first(tx, sa.select(TENANTS).where(TENANTS.c.id == tenant))


def get_tenant(tx: Tx, tenant: str) -> DbRow:
    return one(tx, sa.select(TENANTS).where(TENANTS.c.id == tenant), NotFound(f"there is no tenant {tenant!r}."))


def list_tenants(tx: Tx) -> list[DbRow]:
    return every(tx, sa.select(TENANTS).order_by(TENANTS.c.created_at, TENANTS.c.id))


def update_tenant(tx: Tx, tenant: str, *, is_disabled: bool | None = None, **limits: Any) -> DbRow:
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


SCOPES = ("files", "jobs", "models", "chat", "usage", "admin")
DEFAULT_SCOPES = SCOPES[:-1]
"""The scopes of a key unless others are named; `admin` shows the operator's pages as well."""
_KEY = re.compile(r"weft_([0-9a-f]{12})_([A-Za-z0-9_-]{43})")
_USED_EVERY_S = 60
_KEY_BY_ID = sa.select(KEYS).where(KEYS.c.id == sa.bindparam("id"))
_TENANT_BY_ID = sa.select(TENANTS).where(TENANTS.c.id == sa.bindparam("id"))
"""Both queries are made once because every request needs them."""
_KEY_ROWS = "SELECT * FROM keys JOIN tenants ON tenants.id = keys.tenant WHERE keys.id = ?"


def create_key(tx: Tx, tenant: str, name: str = "", scopes: Sequence[str] = DEFAULT_SCOPES) -> str:
    """Makes a new key of the tenant and returns it; it cannot be shown again."""
    wrong = [scope for scope in scopes if scope not in SCOPES]
    if wrong or not scopes:
        raise ConfigError(f"got {', '.join(wrong) or 'none'}; accepted are {', '.join(SCOPES)}.", where="scopes")
    id, secret = secrets.token_hex(6), secrets.token_urlsafe(32)
    row = {
        "id": id,
        "tenant": tenant,
        "name": name,
        "hash": _hash(secret),
        "scopes": list(scopes),
        "created_at": int(now(tx)),
    }
    tx.execute(sa.insert(KEYS).values(row))
    return f"weft_{id}_{secret}"


def first_key(database: Database, *, auth: bool) -> str | None:
    """Makes the tenant `default` if there is no tenant, and returns a key for it if there was none. Processes that
    start at once take turns, so that one of them does it."""
    with database.begin() as tx:
        lock_setup(tx)
        if find_tenant(tx, DEFAULT_TENANT) is None and (not auth or not list_tenants(tx)):
            create_tenant(tx, DEFAULT_TENANT)
        if auth and not list_keys(tx) and find_tenant(tx, DEFAULT_TENANT) is not None:
            return create_key(tx, DEFAULT_TENANT, "first", SCOPES)
    return None


def find_key(tx: Tx, text: str) -> DbRow | None:
    """Finds a key that is correct, not revoked and of an enabled tenant, with the tenant's row as `owner`."""
    match = _KEY.fullmatch(text)
    if match is None:
        return None
    key = _first(tx, _KEY_BY_ID, match[1])
    # An unknown id costs the same comparison as a known one.
    expected = key["hash"] if key else "0" * 64
    if not hmac.compare_digest(_hash(match[2]), expected) or key is None or key["revoked_at"] is not None:
        return None
    owner = _first(tx, _TENANT_BY_ID, key["tenant"])
    if owner is None or owner["is_disabled"]:
        return None
    return {**key, "owner": owner}


def watched_key(text: str) -> WatchedRows:
    """Returns the rows to watch for `find_key`; a text that is not a key has none."""
    match = _KEY.fullmatch(text)
    return WatchedRows(_KEY_ROWS, (match[1] if match else "",))


def _first(tx: Tx, query: sa.Select[Any], id: str) -> DbRow | None:
    row = tx.execute(query, {"id": id}).mappings().first()
    return None if row is None else dict(row)


def needs_touch(key: DbRow, at: float) -> bool:
    """Whether `last_used_at` is old enough to be worth a write."""
    return at - (key["last_used_at"] or 0) > _USED_EVERY_S


def touch_key(tx: Tx, tenant: str, id: str) -> None:
    tx.execute(sa.update(KEYS).where(KEYS.c.tenant == tenant, KEYS.c.id == id).values(last_used_at=int(now(tx))))


def list_keys(tx: Tx, tenant: str | None = None) -> list[DbRow]:
    """Lists keys without their hashes, of one tenant or, for the operator, of all."""
    columns = [column for column in KEYS.c if column.name != "hash"]
    query = sa.select(*columns).order_by(KEYS.c.created_at, KEYS.c.id)
    return every(tx, query.where(KEYS.c.tenant == tenant) if tenant else query)


def revoke_key(tx: Tx, tenant: str | None, id: str) -> DbRow:
    """Revokes a key at once; revoking it again changes nothing."""
    where = [KEYS.c.id == id, *([KEYS.c.tenant == tenant] if tenant else [])]
    tx.execute(sa.update(KEYS).where(*where, KEYS.c.revoked_at.is_(None)).values(revoked_at=int(now(tx))))
    missing = NotFound(f"there is no key {id!r}; `weft keys list` shows the ids.")
    return one(tx, sa.select(KEYS).where(*where), missing)


def key_id(text: str) -> str:
    """Returns the id in a key, or the text itself, so that people may revoke with either."""
    match = _KEY.fullmatch(text)
    return match[1] if match else text


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()


KEPT_S = 24 * 3600


def take_key(tx: Tx, tenant: str, key: str, request_hash: str, object_id: str) -> str | None:
    """Binds a key to the object the request is about to make, or returns the id of the one it made before. The insert
    decides between two simultaneous requests: the second waits for the first and then finds its row."""
    mine = [IDEMPOTENCY.c.tenant == tenant, IDEMPOTENCY.c.key == key]
    tx.execute(sa.delete(IDEMPOTENCY).where(*mine, IDEMPOTENCY.c.created_at < int(now(tx)) - KEPT_S))
    row = {"tenant": tenant, "key": key, "request_hash": request_hash, "object_id": object_id}
    if tx.dialect.name == "postgresql":
        from sqlalchemy.dialects.postgresql import insert
    else:
        from sqlalchemy.dialects.sqlite import insert  # type: ignore[assignment]
    query = insert(IDEMPOTENCY).values({**row, "created_at": int(now(tx))}).on_conflict_do_nothing()
    if tx.execute(query.returning(IDEMPOTENCY.c.key)).first() is not None:
        return None
    return find_key_use(tx, tenant, key, request_hash)


def find_key_use(tx: Tx, tenant: str, key: str, request_hash: str) -> str | None:
    """Returns the id of the object a key made before, or None; raises Conflict if the request was another."""
    recent = IDEMPOTENCY.c.created_at >= int(now(tx)) - KEPT_S
    query = sa.select(IDEMPOTENCY).where(IDEMPOTENCY.c.tenant == tenant, IDEMPOTENCY.c.key == key, recent)
    found = first(tx, query)
    if found is None:
        return None
    if found["request_hash"] != request_hash:
        raise Conflict("This Idempotency-Key was used with another request; use a new one.", where="Idempotency-Key")
    return str(found["object_id"])


def add_audit(
    tx: Tx, tenant: str, action: str, object: str = "", *, key: str | None = None, request: str = "", data: Any = None
) -> None:
    row = {"tenant": tenant, "key": key, "action": action, "object": object, "request": request, "data": data}
    tx.execute(sa.insert(AUDIT).values({**row, "created_at": int(now(tx))}))
