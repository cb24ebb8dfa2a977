"""The program of a starter: it imports what processes need, and forks one whenever it is asked to.

Started as `python -m weft.starter.forking FD`, with a socket on which it is asked, and told by its standard input which
modules to import. A process says on a link of its own that it runs, so it is known even if the starter is lost at that
moment. On the same link the starter is told when its end was seen, and says how it ended; until then its number is
nobody else's. The starter ends when nobody can ask any more.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import socket
import sys
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NamedTuple

from weft.starter.order import ProcessOrder

MOST_FILES = 16
_PR_SET_NAME = 15


class Begun(NamedTuple):
    """A process that was just forked, and what it is to be."""

    order: ProcessOrder
    link: Connection
    files: list[int]


def main() -> None:
    """Imports and forks; in what it forks, runs the program that was asked for."""
    control = socket.socket(fileno=int(sys.argv[1]))
    for module in sys.stdin.read().split():
        importlib.import_module(module)
    if not may_fork():
        sys.exit("a fork of this process would lack its threads, or have its GPU")
    begun = _serve(control)
    if begun is None:
        os._exit(0)
    _become(begun)
    importlib.import_module(begun.order.module).main()


def may_fork() -> bool:
    """Whether a fork of this process can do what it could: other threads would be missing there, and a GPU be lost."""
    # NumPy's and SciPy's products have threads that end when the process forks, and come back when they are needed.
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return len(os.listdir("/proc/self/task")) == 1 and not any(name.startswith("/dev/nvidia") for name in _open_files())


def _open_files() -> list[str]:
    found = []
    for place in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found.append(os.readlink(place))
    return found


def _serve(control: socket.socket) -> Begun | None:
    """Forks for everybody who asks; returns in every process that it has forked, and when nobody can ask any more."""
    links: dict[Connection, int] = {}
    forgotten: set[int] = set()
    is_owned = True
    while is_owned or links:
        for ready in wait([*([control] if is_owned else []), *links]):
            if isinstance(ready, Connection):
                pid = links.pop(ready)
                if not _reap(pid, ready):
                    forgotten.add(pid)
                continue
            files = _asked(control)
            is_owned = files is not None
            if files is not None and (begun := _fork(files, links)) is not None:
                control.close()
                return begun
        forgotten = {pid for pid in forgotten if os.waitpid(pid, os.WNOHANG)[0] == 0}
    return None


def _asked(control: socket.socket) -> list[int] | None:
    """The files of a process that is asked for; None if nobody can ask any more."""
    with suppress(ConnectionError):
        said, files, _, _ = socket.recv_fds(control, 1, MOST_FILES, socket.MSG_CMSG_CLOEXEC)
        return files if said else None
    return None


def _fork(files: list[int], links: dict[Connection, int]) -> Begun | None:
    """Forks a process; there, what it is to be."""
    link = Connection(files[0])
    try:
        order = link.recv()
        pid = os.fork()
    except (EOFError, OSError):  # whoever asked is gone, or no process is to be had
        link.close()
    else:
        if pid == 0:
            for other in links:
                other.close()
            return Begun(order, link, files[1:])
        links[link] = pid
    for file in files[1:]:
        os.close(file)
    return None


def _reap(pid: int, link: Connection) -> bool:
    """Lets go of a process whose end was seen, and says how it ended; False if nobody waits for that any more."""
    with link:
        try:
            link.recv()
        except (EOFError, OSError):
            return False
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with suppress(OSError):
            link.send(code)
    return True


def _become(begun: Begun) -> None:
    """Makes this process one that was started alone, but for what it has imported."""
    order, link, (folder, out, *files) = begun
    os.setsid()
    os.fchdir(folder)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for stream, file in enumerate((nothing, out, out)):
        os.dup2(file, stream)
    for file in (folder, nothing, out):
        os.close(file)
    # What libraries and Python itself have set stays, as it does in a process that was started alone.
    os.environ.pop("PYTHONPATH", None)
    os.environ.update(order.variables)
    ctypes.CDLL(None).prctl(_PR_SET_NAME, order.name.encode(), 0, 0, 0)
    sys.argv = [order.module, *order.arguments, *map(str, files)]
    try:
        link.send(os.getpid())
    except OSError:  # nobody wants it any more
        os._exit(0)
    link.close()


if __name__ == "__main__":
    main()
