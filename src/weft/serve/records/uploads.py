"""Uploads in parts: each is announced, sent part by part, and completed as a file, or it expires after an hour.

A part is a blob that only its row here names. Parts of uploads that were cancelled, completed or left alone need no
deleting of their own: the daily clean-up finds that no row names them.
"""

from __future__ import annotations

from collections.abc import Sequence

import sqlalchemy as sa

from weft.serve.db.engine import Tx, now
from weft.serve.db.tables import UPLOAD_PARTS, UPLOADS
from weft.serve.errors import NotFound, NotPossible
from weft.serve.records.rows import DbRow, every, first, new_id

PENDING_S = 3600
"""How long an upload may take, from its beginning to its completion."""


def create_upload(tx: Tx, tenant: str, *, filename: str, purpose: str, bytes: int, keep_s: int | None) -> DbRow:
    """Adds an upload without parts; `keep_s` is how long the file is to be kept."""
    at = int(now(tx))
    row = {
        "id": new_id("upload_"),
        "tenant": tenant,
        "filename": filename,
        "purpose": purpose,
        "bytes": bytes,
        "status": "pending",
        "keep_s": keep_s,
        "created_at": at,
        "expires_at": at + PENDING_S,
    }
    tx.execute(sa.insert(UPLOADS).values(row))
    return get_upload(tx, tenant, str(row["id"]))


def get_upload(tx: Tx, tenant: str, id: str, *, for_update: bool = False) -> DbRow:
    """Finds an upload of the tenant; one that was not completed in time is `expired`."""
    query = sa.select(UPLOADS).where(UPLOADS.c.tenant == tenant, UPLOADS.c.id == id)
    row = first(tx, query.with_for_update() if for_update else query)
    if row is None:
        raise NotFound(f"No such Upload object: {id}", where="upload_id")
    if row["status"] == "pending" and row["expires_at"] <= now(tx):
        return {**row, "status": "expired"}
    return row


def open_upload(tx: Tx, tenant: str, id: str, *, for_update: bool = False) -> DbRow:
    """Finds an upload that still takes parts; raises NotPossible if it does not."""
    row = get_upload(tx, tenant, id, for_update=for_update)
    if row["status"] != "pending":
        raise NotPossible(f"Upload {id} is {row['status']} and takes no more.", where="upload_id")
    return row


def end_upload(tx: Tx, tenant: str, id: str, status: str, *, file: str | None = None) -> DbRow:
    """Marks an upload as `completed` or `cancelled`; the caller deletes its parts after the transaction."""
    mine = sa.and_(UPLOADS.c.tenant == tenant, UPLOADS.c.id == id)
    tx.execute(sa.update(UPLOADS).where(mine).values(status=status, file=file))
    return get_upload(tx, tenant, id)


def add_part(tx: Tx, tenant: str, upload: str, *, bytes: int, blob: str) -> DbRow:
    """Adds the row of a part whose bytes are already in the file store."""
    row = {"id": new_id("part_"), "tenant": tenant, "upload": upload, "bytes": bytes, "blob": blob}
    tx.execute(sa.insert(UPLOAD_PARTS).values({**row, "created_at": int(now(tx))}))
    return get_parts(tx, tenant, upload, [row["id"]])[0]


def get_parts(tx: Tx, tenant: str, upload: str, ids: Sequence[object] | None = None) -> list[DbRow]:
    """Returns the parts with these ids in this order, or all as they came; raises NotFound for an unknown id."""
    query = sa.select(UPLOAD_PARTS).where(UPLOAD_PARTS.c.tenant == tenant, UPLOAD_PARTS.c.upload == upload)
    parts = {row["id"]: row for row in every(tx, query.order_by(UPLOAD_PARTS.c.seq))}
    for id in ids or ():
        if id not in parts:
            raise NotFound(f"No such part of this upload: {id}", where="part_ids")
    return list(parts.values()) if ids is None else [parts[id] for id in ids]


def pending_bytes(tx: Tx, tenant: str) -> int:
    """Adds up the bytes that unfinished uploads have announced."""
    query = sa.select(sa.func.coalesce(sa.func.sum(UPLOADS.c.bytes), 0))
    mine = sa.and_(UPLOADS.c.tenant == tenant, UPLOADS.c.status == "pending", UPLOADS.c.expires_at > now(tx))
    return int(tx.execute(query.where(mine)).scalar_one())
