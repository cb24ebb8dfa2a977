"""Puts what jobs made into the file store, before the transaction that names it."""

from __future__ import annotations

import logging
from pathlib import Path

from weft.engine.events import CheckpointSaved, JobSucceeded
from weft.errors import StorageError
from weft.serve.blobs import Blobs
from weft.serve.worker.directory import WorkDirectory
from weft.serve.worker.held import Heard, Held
from weft.serve.worker.outcome import store_result

LOG = logging.getLogger("weft.serve.worker")


def store_heard(held: Held, blobs: Blobs, work: WorkDirectory) -> None:
    """Stores the adapters that were heard of.

    A file store that does not answer holds up nobody but the job that has ended: its result is tried again. A
    checkpoint's adapter is left out: the checkpoint itself is there, only that nobody can try it out.
    """
    held.is_unstored = False
    for heard in held.heard:
        try:
            _store(held, heard, blobs, work)
        except StorageError as error:
            LOG.warning("not stored: %s", error, extra={"fields": {"job": held.id, "tenant": held.tenant}})
            held.is_unstored |= isinstance(heard.event, JobSucceeded)


def _store(held: Held, heard: Heard, blobs: Blobs, work: WorkDirectory) -> None:
    event = heard.event
    if isinstance(event, JobSucceeded) and held.result is None:
        assert event.adapter_dir is not None
        held.result = store_result(held, Path(event.adapter_dir), work.run.metrics_path(held.name), blobs)
    elif isinstance(event, CheckpointSaved) and heard.export and event.step not in held.blobs:
        held.blobs[event.step] = blobs.put_dir(heard.export)
