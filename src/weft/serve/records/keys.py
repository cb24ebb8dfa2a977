"""API keys `weft_<id>_<secret>`: 32 random bytes, of which only a SHA-256 is kept.

A plain hash is enough for a secret of full entropy: there is nothing to guess. It is compared in constant time.
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
from weft.serve.records.rows import Basis, Record, every, first

SCOPES = ("files", "jobs", "models", "chat", "usage", "admin")
DEFAULT_SCOPES = SCOPES[:-1]
"""What a key may do unless said otherwise; `admin` shows the operator's pages as well."""
_KEY = re.compile(r"weft_([0-9a-f]{12})_([A-Za-z0-9_-]{43})")
_USED_EVERY_S = 60
_KEY_BY_ID = sa.select(KEYS).where(KEYS.c.id == sa.bindparam("id"))
_TENANT_BY_ID = sa.select(TENANTS).where(TENANTS.c.id == sa.bindparam("id"))
"""Made once, as every request needs both."""
_KEY_ROWS = "SELECT * FROM keys JOIN tenants ON tenants.id = keys.tenant WHERE keys.id = ?"


def create_key(tx: Tx, tenant: str, name: str = "", scopes: Sequence[str] = DEFAULT_SCOPES) -> str:
    """A new key of the tenant, as its owner must write it down: it cannot be shown again."""
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


def find_key(tx: Tx, text: str) -> Record | None:
    """The key, with its tenant's row as `owner`, if it opens something now: right, not revoked, tenant not disabled."""
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


def key_basis(text: str) -> Basis:
    """The rows that `find_key` judges by; a text that is no key has none."""
    match = _KEY.fullmatch(text)
    return Basis(_KEY_ROWS, (match[1] if match else "",))


def _first(tx: Tx, query: sa.Select[Any], id: str) -> Record | None:
    row = tx.execute(query, {"id": id}).mappings().first()
    return None if row is None else dict(row)


def needs_touch(key: Record, at: float) -> bool:
    """Whether `last_used_at` is old enough to be worth a write."""
    return at - (key["last_used_at"] or 0) > _USED_EVERY_S


def touch_key(tx: Tx, tenant: str, id: str) -> None:
    """Notes that a key was used now."""
    tx.execute(sa.update(KEYS).where(KEYS.c.tenant == tenant, KEYS.c.id == id).values(last_used_at=int(now(tx))))


def list_keys(tx: Tx, tenant: str | None = None) -> list[Record]:
    """Keys without their hashes, of one tenant or, for the operator, of all."""
    columns = [column for column in KEYS.c if column.name != "hash"]
    query = sa.select(*columns).order_by(KEYS.c.created_at, KEYS.c.id)
    return every(tx, query.where(KEYS.c.tenant == tenant) if tenant else query)


def revoke_key(tx: Tx, tenant: str | None, id: str) -> Record:
    """The key opens nothing from now on; revoking twice is revoking once."""
    where = [KEYS.c.id == id, *([KEYS.c.tenant == tenant] if tenant else [])]
    tx.execute(sa.update(KEYS).where(*where, KEYS.c.revoked_at.is_(None)).values(revoked_at=int(now(tx))))
    key = first(tx, sa.select(KEYS).where(*where))
    if key is None:
        raise NotFound(f"there is no key {id!r}; `weft keys list` shows the ids.")
    return key


def key_id(text: str) -> str:
    """The id in a key, or the text itself: people revoke with whichever they have."""
    match = _KEY.fullmatch(text)
    return match[1] if match else text


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
