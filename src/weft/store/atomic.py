"""Files and directories appear whole or not at all, even if the process is killed.

A file is written beside its final path under a temporary name, synced, renamed, and the directory synced. A directory
is filled the same way. Replacing a directory sets the old one aside first; if the process dies between the two renames,
`remove_leftovers` puts the old one back. Every durable operation has a fault point before and after it. The guards of a
directory are called last, right before the rename.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from weft.errors import StorageError
from weft.store import faults

_lock = threading.Lock()
_guards: list[tuple[Path, Callable[[], None]]] = []


def add_guard(root: Path, check: Callable[[], None]) -> Callable[[], None]:
    """Calls `check` from now on before a change below `root`; returns a function that removes the guard."""
    entry = (root.absolute(), check)
    with _lock:
        _guards.append(entry)

    def remove() -> None:
        with _lock:
            if entry in _guards:
                _guards.remove(entry)

    return remove


def check_guards(path: Path) -> None:
    if not _guards:
        return
    with _lock:
        known = list(_guards)
    absolute = path.absolute()
    for entry in known:
        root, check = entry
        if not absolute.is_relative_to(root):
            continue
        try:
            check()
        except StorageError:
            with _lock:
                if entry in _guards:
                    raise
            # The guard was removed while it was called, so its error does not concern this write.


TEMP_PREFIX = ".tmp-weft-"
_ASIDE_PREFIX = TEMP_PREFIX + "aside-"

_REASONS = {
    errno.ENOSPC: "the disk is full.",
    errno.EDQUOT: "the disk quota is used up.",
    errno.EFBIG: "the file would be larger than the file size limit allows.",
    errno.EACCES: "is not writable: permission denied.",
    errno.EPERM: "is not writable: operation not permitted.",
    errno.EROFS: "is not writable: the file system is read-only.",
    errno.ENOTDIR: "a file is in the way where a directory is needed.",
    errno.EEXIST: "a file is in the way where a directory is needed.",
    errno.EISDIR: "a directory is in the way where a file is needed.",
    errno.ENOENT: "there is no such directory.",
    errno.ENAMETOOLONG: "the name is too long.",
    errno.EMFILE: "too many files are open.",
    errno.EIO: "the disk reported an input/output error.",
}


def storage_error(error: OSError, where: Path) -> StorageError:
    """The meaning of an operating system error for the owner of the directory."""
    reason = _REASONS.get(error.errno or 0, f"cannot be written ({error.strerror or error}).")
    return StorageError(reason, where=str(where))


@contextlib.contextmanager
def storage_errors(where: Path) -> Iterator[None]:
    """Turns operating system errors inside the block into one sentence about `where`."""
    try:
        yield
    except OSError as error:
        raise storage_error(error, where) from error


def append_line(path: Path, line: bytes, point: str, *, sync: bool = False) -> None:
    """Appends a whole line or nothing; it survives the death of the process, and with `sync` that of the machine."""
    with storage_errors(path), open(path, "ab", buffering=0) as file:
        before = os.fstat(file.fileno()).st_size
        try:
            check_guards(path)
            faults.point(point)
            if file.write(line) != len(line):
                # The disk filled up inside the line; the rest would fail, so fail now.
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            faults.point(point)
            if sync:
                os.fsync(file.fileno())
        except BaseException:
            os.ftruncate(file.fileno(), before)
            raise
        if sync:
            faults.point(point)


def write_file(path: Path, data: bytes | str, *, durable: bool = True) -> None:
    """The file holds `data` durably once this returns; if it fails, it is the old file or the new one, never a mix.
    Without `durable` it does not wait for the disk: the file survives the death of the process, but that of the machine
    may leave the old file or an empty one."""
    temp = _temporary(path)
    with storage_errors(path):
        try:
            write_unsynced(temp, data)
            if durable:
                _durable("file.fsync", sync, temp)
            check_guards(path)
            _durable("file.rename", os.replace, temp, path)
        except BaseException:
            _remove_quietly(temp)
            raise
        if durable:
            _durable("dir.fsync", sync, path.parent)


def write_unsynced(path: Path, *data: bytes | str | memoryview) -> None:
    """Writes a new file, piece by piece, to be synced later, such as by the end of `staged_directory`."""
    pieces = [memoryview(piece.encode() if isinstance(piece, str) else piece) for piece in data]
    half, written = sum(len(piece) for piece in pieces) // 2, 0
    faults.point("file.write")
    with open(path, "xb", buffering=0) as file:
        for piece in pieces:
            middle = half - written
            if 0 <= middle < len(piece):
                _write_all(file.fileno(), piece[:middle])
                faults.point("file.write")
            _write_all(file.fileno(), piece[middle:] if 0 <= middle < len(piece) else piece)
            written += len(piece)
    faults.point("file.write")


@contextlib.contextmanager
def staged_directory(final: Path) -> Iterator[Path]:
    """Yields an empty directory that becomes `final`, whole and synced, when the block ends without an error. An
    existing `final` is replaced. After an error it is the old or the new one, and nothing else is left."""
    temp = _temporary(final)
    with storage_errors(final):
        temp.mkdir()
        try:
            yield temp
            for file in sorted(temp.rglob("*")):
                _durable("file.fsync", sync, file)
            _durable("dir.fsync", sync, temp)
            check_guards(final)
            aside = _rename_over(temp, final)
        except BaseException:
            _remove_quietly(temp)
            raise
        try:
            _durable("dir.fsync", sync, final.parent)
            if aside is not None:
                _durable("dir.remove", _remove, aside)
        except BaseException:
            if aside is not None:
                _remove_quietly(aside)
            raise


def remove_directory(path: Path) -> None:
    """Removes the directory at once: a crash leaves a temporary name, never half of the directory."""
    temp = _temporary(path)
    with storage_errors(path):
        check_guards(path)
        try:
            _durable("dir.rename", os.rename, path, temp)
            _durable("dir.remove", _remove, temp)
            _durable("dir.fsync", sync, path.parent)
        except BaseException:
            _remove_quietly(temp)
            raise


def make_directory(path: Path) -> None:
    """Creates the directory durably; its parent must exist."""
    with storage_errors(path):
        if not path.is_dir():
            _durable("dir.make", path.mkdir)
            _durable("dir.fsync", sync, path.parent)


def make_directories(path: Path, undo: contextlib.ExitStack) -> None:
    """Creates the directory and its parents; `undo` removes those that are made now, if they are empty by then."""
    with storage_errors(path):
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing):
        undo.callback(forget, folder.rmdir)
        make_directory(folder)


def forget(remove: Callable[[], object]) -> None:
    with contextlib.suppress(OSError):
        remove()


def remove_leftovers(directory: Path) -> None:
    """Undoes what a crash left unfinished directly inside a directory; nothing else may be writing there."""
    with storage_errors(directory):
        leftovers = [entry for entry in sorted(directory.iterdir()) if entry.name.startswith(TEMP_PREFIX)]
        for entry in leftovers:
            final = directory / entry.name.removeprefix(_ASIDE_PREFIX)
            if entry.name.startswith(_ASIDE_PREFIX) and not final.exists():
                _durable("dir.rename", os.rename, entry, final)
            else:
                _durable("dir.remove", _remove, entry)
        if leftovers:
            _durable("dir.fsync", sync, directory)


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _rename_over(temp: Path, final: Path) -> Path | None:
    if not final.exists():
        _durable("dir.rename", os.rename, temp, final)
        return None
    if not final.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(final))
    aside = final.with_name(_ASIDE_PREFIX + final.name)
    try:
        _durable("dir.rename", os.rename, final, aside)
        _durable("dir.rename", os.rename, temp, final)
    except BaseException:
        if final.exists():
            _remove_quietly(aside)
        else:
            os.rename(aside, final)
        raise
    return aside


def _durable(name: str, operation: Callable[..., object], *arguments: object) -> None:
    faults.point(name)
    operation(*arguments)
    faults.point(name)


def _temporary(path: Path) -> Path:
    return path.with_name(TEMP_PREFIX + secrets.token_hex(8))


def _remove(path: Path) -> None:
    if not path.is_dir() or path.is_symlink():
        path.unlink()
        return
    for entry in sorted(path.iterdir()):
        _remove(entry)
        faults.point("dir.remove")
    path.rmdir()


def _remove_quietly(path: Path) -> None:
    with contextlib.suppress(OSError):
        _remove(path)


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
