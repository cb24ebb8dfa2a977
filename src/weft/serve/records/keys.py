"""API keys `weft_<id>_<secret>`: the secret is 32 random bytes, and only its SHA-256 is stored.

A plain hash is enough for a random secret, which nobody can guess. It is compared in constant time.
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
from weft.serve.db.engine import Tx, now
from weft.serve.db.tables import KEYS, TENANTS
from weft.serve.errors import NotFound
from weft.serve.records.rows import DbRow, WatchedRows, every, first

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
    """Sets the time at which a key was last used to now."""
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
    key = first(tx, sa.select(KEYS).where(*where))
    if key is None:
        raise NotFound(f"there is no key {id!r}; `weft keys list` shows the ids.")
    return key


def key_id(text: str) -> str:
    """Returns the id in a key, or the text itself, so that people may revoke with either."""
    match = _KEY.fullmatch(text)
    return match[1] if match else text


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
