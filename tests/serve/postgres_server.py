"""A PostgreSQL server of the machine's own binaries, started by the tests that want one, on a socket in a directory."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def find_binaries() -> Path | None:
    """The directory with initdb and pg_ctl, if there is one."""
    initdb = shutil.which("initdb")
    folders = [Path(initdb).resolve().parent] if initdb else []
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((f for f in folders if (f / "initdb").exists() and (f / "pg_ctl").exists()), None)


POSTGRES = ["postgresql"] if find_binaries() or os.environ.get("CI") else []
"""Parameters of tests that need PostgreSQL: without it they are skipped, but fail where tests must be complete."""


class Server:
    """A running server; it can be stopped and started again."""

    def __init__(self, binaries: Path, directory: Path) -> None:
        self._binaries, self._data, self._socket = binaries, directory / "data", directory / "socket"
        # PostgreSQL refuses to run as root.
        self._as: dict[str, Any] = {}
        if os.geteuid() == 0:
            user = next(u for u in ("postgres", "nobody") if _is_user(u))
            self._as = {"user": user}
            shutil.chown(directory, user)
        self._run("initdb", "-D", str(self._data), "-U", "weft", "-A", "trust", "--no-sync", "-E", "UTF8")
        self._socket.mkdir()
        self._socket.chmod(0o777)
        self.url = f"postgresql://weft@/postgres?host={self._socket}"

    def start(self) -> None:
        options = f"-k {self._socket} -c listen_addresses='' -c max_connections=200 -c fsync=off"
        self._run("pg_ctl", "-D", str(self._data), "-o", options, "-l", str(self._data / "log"), "-w", "start")

    def stop(self, mode: str = "immediate") -> None:
        self._run("pg_ctl", "-D", str(self._data), "-m", mode, "-w", "stop")

    def _run(self, program: str, *arguments: str) -> None:
        command = [str(self._binaries / program), *arguments]
        done = subprocess.run(
            command, cwd="/", check=False, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, **self._as
        )
        assert done.returncode == 0, done.stderr


@contextmanager
def running_postgres() -> Iterator[Server]:
    """A fresh server, gone again at the end."""
    binaries = find_binaries()
    assert binaries is not None, "PostgreSQL is not installed: found no initdb with pg_ctl"
    directory = Path(tempfile.mkdtemp(prefix="weft-pg-"))
    directory.chmod(0o755)
    server = Server(binaries, directory)
    server.start()
    try:
        yield server
    finally:
        server.stop()
        shutil.rmtree(directory)


def _is_user(name: str) -> bool:
    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True
