"""Keeps the table of shared adapters in step with a directory or URL, in a thread of `weft serve`."""

from __future__ import annotations

import logging
import threading

from weft.errors import StorageError, WeftError
from weft.serve.adapter_folders import Seen, adapter_at, adapters_below, is_url, row_of
from weft.serve.api.errors import ApiError
from weft.serve.api.pending_answers import check_adapter
from weft.serve.db import adapters
from weft.serve.db.engine import Database
from weft.serve.db.workers import live_workers
from weft.serve.settings import Settings

LOG = logging.getLogger("weft.serve")
SCAN_S, URL_SCAN_S = 2.0, 10.0
"""Seconds between two scans of a directory, and of a URL."""


class FolderScan:
    """Keeps the table in step with a directory or URL; every adapter is checked once by a worker."""

    def __init__(self, settings: Settings, database: Database) -> None:
        self._settings, self._database = settings, database
        self._seen: Seen | None = None
        """What the last scan found; a file that is being copied has another version each time."""

    def start(self) -> None:
        threading.Thread(target=self._run, name="adapter-scan", daemon=True).start()

    def _run(self) -> None:
        waiting, problem = threading.Event(), ""
        while True:
            try:
                self.scan()
                self.check()
                problem = ""
            except WeftError as error:
                # What was found before is served on. It is reported once.
                if str(error) != problem:
                    LOG.warning("adapters could not be looked for: %s", error)
                problem = str(error)
            except Exception:
                LOG.exception("adapters could not be looked for")
            waiting.wait(URL_SCAN_S if is_url(str(self._settings.adapters)) else SCAN_S)

    def scan(self) -> None:
        """Adds adapters that are new or have changed, and removes those that have gone."""
        root = self._settings.adapters
        assert root is not None
        with self._database.read() as tx:
            known = {(row["root"], row["name"]): row for row in adapters.list_adapters(tx, root)}
        before = self._seen or {}
        found = {(root, name): own for name, own in adapters_below(root, before).items()}
        away = set()
        # What was loaded by the API lies elsewhere.
        for (own_root, name), row in known.items():
            if own_root == adapters.BY_API:
                try:
                    own = adapter_at(name, row["path"], before)
                except StorageError:
                    away.add((own_root, name))
                    continue
                if own is not None:
                    found[own_root, name] = own
        is_first = self._seen is None
        self._seen = {(key[1], own.path): own for key, own in found.items()}
        changed = {
            key: own
            for key, own in found.items()
            if (key not in known or known[key]["version"] != own.version)
            and (is_first or own == before.get((key[1], own.path)))
        }
        gone = known.keys() - found.keys() - away
        if not changed and not gone:
            return
        with self._database.begin() as tx:
            for (own_root, name), own in changed.items():
                adapters.put_adapter(tx, own_root, name, **row_of(own, self._settings.base_models))
            for key in gone:
                adapters.remove_adapter(tx, *key)
        for key, own in changed.items():
            self._report(key[1], "serves" if key not in known else "serves again", own.error)
        for _, name in gone:
            LOG.info("an adapter has gone", extra={"fields": {"adapter": name}})

    def check(self) -> None:
        """Has a worker read the adapters that none has read yet; one that it cannot use gets its error."""
        root = self._settings.adapters
        assert root is not None
        with self._database.read() as tx:
            rows = [row for row in adapters.list_adapters(tx, root) if not row["is_checked"] and row["error"] is None]
            workers = {base: live_workers(tx, base) for base in {row["base"] for row in rows}}
        for row in rows:
            if workers[row["base"]]:
                try:
                    error = check_adapter(workers[row["base"]][0], adapters.source_of(row))
                except ApiError:
                    # The worker is busy or gone; another scan tries again.
                    continue
                with self._database.begin() as tx:
                    adapters.note_check(tx, row, error)
                if error is not None:
                    self._report(row["name"], "", error)

    def _report(self, name: str, event: str, error: str | None) -> None:
        if error is None:
            LOG.info("adapter", extra={"fields": {"adapter": name, "event": event}})
        else:
            LOG.warning("the adapter %s cannot be used: %s", name, error)
