"""Keeps the adapters that prompts ask for in memory; each is fetched from the file store and checked once."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections import OrderedDict
from pathlib import Path

from weft.engine.inference.attach import StoredAdapter
from weft.serve.archives import unpack
from weft.serve.blobs import Blobs
from weft.store.atomic import storage_errors
from weft.store.peft_files import CONFIG_FILE, TEMPLATE_FILE, TENSORS_FILE, read_adapter, read_chat_template

KEPT = 32
"""How many adapters are kept in memory; the least recently used one goes first."""
ADAPTER_FILES = (CONFIG_FILE, TENSORS_FILE, TEMPLATE_FILE)


class AdapterCache:
    """Adapters by the names of their archives. Several threads may use it."""

    def __init__(self, blobs: Blobs, directory: Path) -> None:
        self._blobs = blobs
        self._directory = directory
        self._kept: OrderedDict[str, StoredAdapter] = OrderedDict()
        self._lock = threading.Lock()
        self.names: tuple[str, ...] = ()
        """The archives whose adapters are in memory; reading this never waits for one that is being fetched."""

    def get(self, blob: str) -> StoredAdapter:
        """Returns the adapter in an archive; raises NotFound without one, AdapterFileError if it is broken."""
        with self._lock:
            if blob not in self._kept:
                self._kept[blob] = self._read(blob)
                while len(self._kept) > KEPT:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(blob)
            self.names = tuple(self._kept)
            return self._kept[blob]

    def _read(self, blob: str) -> StoredAdapter:
        with storage_errors(self._directory):
            self._directory.mkdir(exist_ok=True)
            place = Path(tempfile.mkdtemp(dir=self._directory))
        try:
            archive = place / "archive"
            self._blobs.fetch(blob, archive)
            unpack(archive, place, ADAPTER_FILES)
            spec, tensors, config = read_adapter(place)
            base = config.get("base_model_name_or_path")
            return StoredAdapter(
                blob, place, spec, tensors, base if isinstance(base, str) else None, read_chat_template(place)
            )
        finally:
            shutil.rmtree(place, ignore_errors=True)
