"""A run behind a URL: it is trained in a local copy, and what is written there is uploaded in the background.

Training never waits for the store. While that is away the copy holds what is not uploaded, and at the end the last
changes must arrive. A copy whose process was killed is gone on with on its machine; on another one, what lies behind
the URL is.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from weft.errors import StorageError
from weft.store.atomic import add_guard
from weft.store.remote.file_system import RemoteDirectory
from weft.store.remote.lease import Lease, LeaseLostError, newest_term
from weft.store.remote.local_copy import LocalCopy, download, whole_names
from weft.store.remote.mirror import Mirror

OPTION = "--out"


@dataclass(frozen=True)
class RunUrl:
    """Where a run is, if that is no directory of this machine."""

    url: str
    content: str = "run"
    """What its owner calls the run there."""
    mark: str = "run.json"
    """The file whose presence means that there is one."""

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        """The last part of the URL."""
        return self.url.rstrip("/").rpartition("/")[2]

    @contextlib.contextmanager
    def trained(self, cache: Path, *, resume: bool, tell: Callable[[str], None]) -> Iterator[Path]:
        """Yields the local directory of the run, and owns the URL until the block ends, with all changes uploaded.

        StorageError if somebody else owns it, if it does not hold what `resume` says, or if the last changes could not
        be uploaded. `cache`: where local copies are. `tell` hears what is worth knowing meanwhile.
        """
        remote = RemoteDirectory(self.url, OPTION)
        copy = LocalCopy(cache, remote.url, self.mark)
        is_saved = False
        try:
            lease = self._own(remote, copy, resume, tell)
            mirror = Mirror(copy, remote, lease)
            unguard = add_guard(copy.path, mirror.check)
            lease.keep()
            mirror.start(tell)
            try:
                yield copy.path
            except KeyboardInterrupt:
                # Asked twice to stop: the copy keeps what is not uploaded.
                mirror.stop()
                raise
            except BaseException:
                with contextlib.suppress(StorageError):
                    mirror.drain((0.0,))
                    is_saved = True
                raise
            else:
                self._drain(mirror, copy)
                is_saved = True
            finally:
                unguard()
                lease.release() if copy.holds_run else lease.withdraw()
        finally:
            copy.close(remove=is_saved or not copy.holds_run)

    @contextlib.contextmanager
    def looked_at(self) -> Iterator[Path]:
        """Yields a local directory with all files but tensors, to be read; whoever owns the run goes on."""
        remote = RemoteDirectory(self.url, "PATH")
        with tempfile.TemporaryDirectory(prefix="weft-run-") as place:
            folder = Path(place) / (self.name or "run")
            names = whole_names(remote.names())[0]
            download(remote, [name for name in names if not name.endswith(".safetensors")], folder)
            try:
                yield folder
            except StorageError as error:
                raise error.at((error.where or "").replace(str(folder), self.url)) from None

    def upload(self, path: Path) -> str:
        """Puts a file directly below the URL; returns its own URL."""
        remote = RemoteDirectory(self.url, "PATH")
        remote.upload(path, path.name)
        return f"{remote.url}/{path.name}"

    def _own(self, remote: RemoteDirectory, copy: LocalCopy, resume: bool, tell: Callable[[str], None]) -> Lease:
        """Owns the URL, with a local copy that is as new as what lies there."""
        self._refuse(remote, copy, newest_term(remote), resume)
        lease = Lease.claim(remote, copy.path, tell=tell)
        try:
            # Nobody can change it any more; what was seen before may have changed until then.
            self._refuse(remote, copy, lease.owner.term - 1, resume)
            if not resume:
                copy.empty()
            elif not copy.is_up_to_date(lease.owner.term - 1):
                copy.fetch(remote)
            copy.own(lease.owner.term)
        except BaseException:
            lease.withdraw()
            raise
        return lease

    def _refuse(self, remote: RemoteDirectory, copy: LocalCopy, term: int, resume: bool) -> None:
        """StorageError if there is no run to resume, or one where none is expected; `term`: that of its last owner."""
        holds_run = copy.holds_run if copy.is_up_to_date(term) else remote.read(self.mark) is not None
        if resume and not holds_run:
            hint = "Leave out --resume to start one."
            raise StorageError(f"there is no {self.content} to resume.", where=self.url, hint=hint)
        if holds_run and not resume:
            hint = "Use --resume to go on with it, or another --out."
            raise StorageError(f"already holds a {self.content}.", where=self.url, hint=hint)

    def _drain(self, mirror: Mirror, copy: LocalCopy) -> None:
        try:
            mirror.drain()
        except LeaseLostError:
            raise
        except StorageError as error:
            hint = f"All is in {copy.path}; --resume on this machine goes on with that, and uploads it."
            raise error.at(error.where, hint) from None
