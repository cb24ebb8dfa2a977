"""What a job starts from when it goes on from a fine-tuned model: that model's adapter, unpacked where the engine
finds it."""

from __future__ import annotations

from pathlib import Path

from weft.errors import ConfigError
from weft.serve.blobs import Blobs
from weft.serve.db.engine import Database, Tx
from weft.serve.errors import NotFound
from weft.serve.records.checkpoints import get_checkpoint
from weft.serve.records.models import get_model
from weft.serve.records.rows import Record
from weft.serve.worker.voices import unpack
from weft.store.atomic import storage_errors


def fetch_start(job: Record, model: str, database: Database, blobs: Blobs, place: Path) -> str:
    """The directory of the adapter of a model or checkpoint of the job's tenant."""
    directory = place / "start"
    with storage_errors(directory):
        directory.mkdir(exist_ok=True)
    try:
        with database.read() as tx:
            blob = _blob_of(tx, job["tenant"], model)
        blobs.fetch(blob, directory / "archive")
    except NotFound:
        raise ConfigError(f"{model} was deleted before the job could start from it.", where="model") from None
    unpack(directory / "archive", directory)
    return str(directory)


def _blob_of(tx: Tx, tenant: str, model: str) -> str:
    if ":ckpt-step-" not in model:
        return str(get_model(tx, tenant, model)["blob"])
    blob = get_checkpoint(tx, tenant, model)["blob"]
    if blob is None:
        raise NotFound(f"The model '{model}' has no weights.", where="model")
    return str(blob)
