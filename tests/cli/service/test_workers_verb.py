"""`weft workers` as an operator meets it: who is there, drained and sent away by worker or by machine."""

from __future__ import annotations

from pathlib import Path

from weft.serve.db.engine import migrate, open_database
from weft.serve.db.workers import all_workers, put_worker


def test_workers_when_listed_drained_and_removed_then_each_line_reports_what_happens(weft, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    database = open_database(f"sqlite:///{tmp_path}/weft.db")
    migrate(database)
    with database.begin() as tx:
        for worker in ("worker-aaaaaa", "worker-bbbbbb"):
            info = {"device_name": "NVIDIA H200", "memory_bytes": 2**30, "memory_total_bytes": 2**37}
            put_worker(tx, worker, base_model="tiny", address=None, token=None, info=info, machine="loom-1")
    home = ("--data-dir", tmp_path)
    listed = weft("workers", "list", *home).out
    assert "loom-1" in listed and "NVIDIA H200" in listed and "alive" in listed
    assert "worker-bbbbbb on loom-1 drains" in weft("workers", "drain", "loom-1", *home).out
    assert weft("workers", "list", *home).out.count("drained") == 2
    assert weft("workers", "undrain", "worker-aaaaaa", *home).out.strip() == "worker-aaaaaa on loom-1 takes jobs again"
    weft("workers", "remove", "aaaaaa", *home)
    with database.read() as tx:
        assert [row["wanted"] for row in all_workers(tx)] == ["remove", "drain"]
    wrong = weft("workers", "drain", "loom-9", *home)
    assert wrong.code == 2
    assert "there is no worker or machine 'loom-9'; there are loom-1, worker-aaaaaa, worker-bbbbbb" in wrong.err
    assert weft("workers", "list", "--data-dir", tmp_path / "nowhere").code == 2
    database.close()
