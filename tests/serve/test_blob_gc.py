"""What no row names any more is deleted after a day; what any row names is not."""

from __future__ import annotations

import os
from pathlib import Path

from weft.serve.blobs import Blobs
from weft.serve.db import files
from weft.serve.db.engine import Database
from weft.serve.db.files import delete_unnamed_blobs
from weft.serve.db.jobs import create_job, request_change


def test_blobs_when_no_row_names_them_then_deleted_and_others_kept(database: Database, tmp_path: Path):
    blobs = Blobs(str(tmp_path / "blobs"))
    names = {what: blobs.put(what.encode()) for what in ("file", "gone", "needed", "model", "checkpoint", "orphan")}
    left = blobs.create()
    left.write(b"cut short")
    rows = {}
    with database.begin() as tx:
        for what in ("file", "gone", "needed"):
            blob = names[what]
            rows[what] = files.create_file(
                tx, "acme", filename="a", purpose="fine-tune", bytes=1, sha256="0", blob=blob
            )["id"]
        files.create_model(tx, "acme", "ft:x", job="j", base="tiny", blob=names["model"], bytes=1)
        files.add_checkpoint(tx, "acme", "j", 1, model="c", metrics={}, blob=names["checkpoint"])
        job = create_job(tx, "acme", model="tiny", training_file=rows["needed"], settings={})["id"]
        for what in ("gone", "needed"):
            files.delete_file(tx, "acme", rows[what])
    assert delete_unnamed_blobs(database, blobs) == 0
    for path in (tmp_path / "blobs").rglob("*"):
        os.utime(path, (0, 0))
    assert delete_unnamed_blobs(database, blobs) == 3
    left.__exit__()
    assert {name for name, _ in blobs.names()} == {names[w] for w in ("file", "needed", "model", "checkpoint")}
    with database.begin() as tx:
        request_change(tx, "acme", job, "cancel")
    assert delete_unnamed_blobs(database, blobs) == 1
