"""The owner of the run at a URL: one process at a time, over all machines.

As in a shared directory (`store/owner.py`), an owner creates `.owner-<term>` and removes its predecessor's. It rewrites
the file every few seconds, and a successor watches it: a file that changes has a living owner, one that does not for
`LEASE_S` has none. So no clocks are compared. A predecessor on this machine with the same local copy is known to be
dead as soon as the lock of that copy is free.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

from weft.errors import StorageError
from weft.store import json_text
from weft.store.owner import Owner
from weft.store.remote.file_system import RemoteDirectory

BEAT_S = 10.0
"""Seconds between two heartbeats of an owner."""
LEASE_S = 60.0
"""An owner without a heartbeat for so long is taken for dead."""
LOOK_S = 3.0
"""Seconds between two reads of the record of an owner that may be alive."""
_NAME = re.compile(r"\.owner-(\d{1,18})")


def is_lease(name: str) -> bool:
    """True if a file at a URL is not part of the run but the record of an owner."""
    return _NAME.fullmatch(name) is not None


class Lease:
    """The ownership of the run at a URL by this process."""

    def __init__(self, remote: RemoteDirectory, owner: Owner, local: Path) -> None:
        self.owner = owner
        self._remote = remote
        self._local = local
        self._num_beats = 0
        self._lock = threading.Lock()
        self._stop = threading.Event()

    @classmethod
    def claim(
        cls,
        remote: RemoteDirectory,
        local: Path,
        *,
        notify: Callable[[str], None],
        sleep: Callable[[float], None] = time.sleep,
    ) -> Lease:
        """Becomes the owner, once the last one is known to have ended; `local` is this process's own copy, locked.

        StorageError if the last owner is alive, or another process is quicker. `notify` is called with the reason of a
        wait.
        """
        terms = _terms(remote)
        if terms:
            _await_end(remote, max(terms), local, notify, sleep)
        lease = cls(remote, Owner.here(max(terms, default=0) + 1), local)
        if not remote.create(lease._name, lease._record()):
            raise _in_use(remote, lease.owner.term)
        if (newest := max(_terms(remote))) > lease.owner.term:
            remote.delete(lease._name)
            raise _in_use(remote, newest)
        for term in terms:
            remote.delete(f".owner-{term}")
        return lease

    def keep(self) -> None:
        """Sends heartbeats until the lease is released."""

        def beat() -> None:
            while not self._stop.wait(BEAT_S):
                # An unreachable store gets a later heartbeat; `check` detects a takeover.
                with contextlib.suppress(StorageError):
                    self.beat()

        threading.Thread(target=beat, name="weft-lease", daemon=True).start()

    def beat(self) -> None:
        """Sends a heartbeat."""
        with self._lock:
            if self._stop.is_set():
                return
            self.check()
            self._num_beats += 1
            self._remote.write(self._name, self._record())

    def check(self) -> None:
        """StorageError once another process owns the run, or if the store is unreachable."""
        newest = max(_terms(self._remote), default=0)
        result = self._remote.read(f".owner-{newest}") if newest else None
        successor = None if result is None else Owner.parse(result, newest)
        if successor is None or successor.token != self.owner.token:
            by = "" if successor is None else f" by {successor}"
            raise LeaseLostError(f"was taken over{by}; this process writes nothing more there.", where=self._remote.url)

    def release(self) -> None:
        """Releases the run; the next owner need not wait."""
        self._stop.set()
        with self._lock, contextlib.suppress(StorageError):
            self.check()
            self.owner = dataclasses.replace(self.owner, is_released=True)
            self._remote.write(self._name, self._record())

    def withdraw(self) -> None:
        """Releases the run and restores its former contents, except terms: they keep counting."""
        self.release()
        if self.owner.term == 1:
            with contextlib.suppress(StorageError):
                self._remote.delete(self._name)

    @property
    def _name(self) -> str:
        return f".owner-{self.owner.term}"

    def _record(self) -> bytes:
        record = {**dataclasses.asdict(self.owner), "local": str(self._local), "beats": self._num_beats}
        return json.dumps(record).encode()


class LeaseLostError(StorageError):
    """The run at a URL belongs to another process now."""


def newest_term(remote: RemoteDirectory) -> int:
    """Number of owners that the run at a URL has had."""
    return max(_terms(remote), default=0)


def _await_end(
    remote: RemoteDirectory, term: int, local: Path, notify: Callable[[str], None], sleep: Callable[[float], None]
) -> None:
    """Returns once the owner of a term is known to have ended; StorageError if it lives."""
    before = remote.read(f".owner-{term}")
    if before is None:
        return
    owner = Owner.parse(before, term)
    if owner.is_released or (owner.is_of_this_machine and _local(before) == str(local)):
        return
    notify(f"{owner} has not released the run; without a heartbeat for {LEASE_S:g} s, this process takes over")
    for _ in range(int(LEASE_S / LOOK_S)):
        sleep(LOOK_S)
        now = remote.read(f".owner-{term}")
        if now != before:
            if now is not None and Owner.parse(now, term).is_released:
                return
            raise _in_use(remote, term)


def _local(record: bytes) -> object:
    """Local copy of an owner."""
    with contextlib.suppress(ValueError, AttributeError):
        return json_text.parse(record).get("local")
    return None


def _in_use(remote: RemoteDirectory, term: int) -> StorageError:
    result = remote.read(f".owner-{term}")
    owner = "another process" if result is None else str(Owner.parse(result, term))
    return StorageError(f"is in use by {owner}.", where=remote.url, hint="Wait for its end, or name another URL.")


def _terms(remote: RemoteDirectory) -> list[int]:
    return [int(match[1]) for name in remote.top_names() if (match := _NAME.fullmatch(name))]
