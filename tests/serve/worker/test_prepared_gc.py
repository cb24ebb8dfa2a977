"""A deleted file leaves nothing in what a worker has prepared."""

from __future__ import annotations

from pathlib import Path

from tiny_tokenizer import make_tokenizer

from weft.data.load import load_dataset
from weft.data.prepared.cache import PreparedCache, default_cache
from weft.serve.db import files
from weft.serve.db.engine import Database
from weft.serve.db.jobs import create_job, request_change
from weft.serve.worker.directory import forget_deleted_files


def kept_sources(cache: PreparedCache) -> set[str]:
    return {source for entry in cache.entries() for source in entry.sources}


def test_prepared_data_when_its_file_is_deleted_then_goes_once_no_job_reads_it(
    database: Database, tmp_path: Path, monkeypatch
):
    """Data of files that are still there stays, and that of files which are not the service's."""
    monkeypatch.setenv("WEFT_CACHE", str(tmp_path / "cache"))
    names = {}
    with database.begin() as tx:
        for what in ("kept", "deleted", "needed"):
            row = files.create_file(tx, "acme", filename="a", purpose="fine-tune", bytes=1, sha256="0", blob=what)
            names[what] = f"{row['id']}.jsonl"
        job = create_job(tx, "acme", model="tiny", training_file=names["needed"][: -len(".jsonl")], settings={})["id"]
    names["other"] = "train.jsonl"
    for what, name in names.items():
        (tmp_path / name).write_text(f'{{"text": "{what}"}}\n')
        load_dataset([name], make_tokenizer(), max_length=64, base_dir=tmp_path)
    cache = default_cache()
    assert cache is not None and kept_sources(cache) == set(names.values())
    assert forget_deleted_files(database, cache) == 0
    with database.begin() as tx:
        for what in ("deleted", "needed"):
            files.delete_file(tx, "acme", names[what].removesuffix(".jsonl"))
    assert forget_deleted_files(database, cache) == 1
    assert kept_sources(cache) == {names["kept"], names["needed"], names["other"]}
    with database.begin() as tx:
        request_change(tx, "acme", job, "cancel")
    assert forget_deleted_files(database, cache) == 1
    assert kept_sources(cache) == {names["kept"], names["other"]}
    # Nothing at hand is left either: what is needed again is prepared again.
    load_dataset([names["deleted"]], make_tokenizer(), max_length=64, base_dir=tmp_path)
    assert kept_sources(cache) == {names["kept"], names["other"], names["deleted"]}
