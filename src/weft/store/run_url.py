"""A run at a URL: it is trained in a local copy, and changes are uploaded in the background.

Training never waits for the store. While the store is unreachable the copy holds what is not uploaded, and at the end
the last changes must arrive. A run whose process was killed is resumed from its copy on the same machine, and from the
URL on another one.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from weft.errors import StorageError
from weft.store.atomic import add_guard
from weft.store.mirror import LocalCopy, Mirror, download, whole_names
from weft.store.remote_files import Lease, LeaseLostError, RemoteDirectory, newest_term


@dataclass(frozen=True)
class RunUrl:
    url: str
    content: str = "run"
    """What the URL holds, as error messages call it: a run or a sweep."""
    mark: str = "run.json"
    """File whose presence at the URL shows that a run is stored there."""
    option: str = "--out"
    """The option, argument or setting with the URL, for errors."""

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        return self.url.rstrip("/").rpartition("/")[2]

    @contextlib.contextmanager
    def open_for_training(self, cache: Path, *, resume: bool, notify: Callable[[str], None]) -> Iterator[Path]:
        """Yields the local directory of the run, and owns the URL until the block ends, with all changes uploaded.
        StorageError if another process owns it, if it does not hold what `resume` expects, or if the last changes could
        not be uploaded. `cache`: folder of local copies. `notify` is called with notes for the user."""
        remote = RemoteDirectory(self.url, self.option)
        copy = LocalCopy(cache, remote.url, self.mark)
        is_saved = False
        try:
            lease = self._acquire(remote, copy, resume, notify)
            mirror = Mirror(copy, remote, lease)
            unguard = add_guard(copy.path, mirror.check)
            lease.keep()
            mirror.start(notify)
            try:
                yield copy.path
            except KeyboardInterrupt:
                # A second request to stop: the copy keeps what is not uploaded.
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
    def open_for_reading(self) -> Iterator[Path]:
        """Yields a local directory with all files but tensors, to be read; the owner of the run goes on."""
        remote = RemoteDirectory(self.url, self.option)
        with tempfile.TemporaryDirectory(prefix="weft-run-") as parent:
            folder = Path(parent) / (self.name or "run")
            names = whole_names(remote.names())[0]
            download(remote, [name for name in names if not name.endswith(".safetensors")], folder)
            try:
                yield folder
            except StorageError as error:
                raise error.at((error.where or "").replace(str(folder), self.url)) from None

    def upload(self, path: Path) -> str:
        remote = RemoteDirectory(self.url, self.option)
        remote.upload(path, path.name)
        return f"{remote.url}/{path.name}"

    def _acquire(self, remote: RemoteDirectory, copy: LocalCopy, resume: bool, notify: Callable[[str], None]) -> Lease:
        """Becomes the owner of the URL, with a local copy that is as new as the files there."""
        self._refuse(remote, copy, newest_term(remote), resume)
        lease = Lease.claim(remote, copy.path, notify=notify)
        try:
            # No other process can change it now; what was read before may have changed until then.
            self._refuse(remote, copy, lease.owner.term - 1, resume)
            if not resume:
                copy.empty()
            elif not copy.is_up_to_date(lease.owner.term - 1):
                copy.fetch(remote)
            copy.take_ownership(lease.owner.term)
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
