"""Programs that run in threads of this process: the same code at once, without the seconds a new Python imports."""

from __future__ import annotations

import importlib
import multiprocessing
import threading
from collections.abc import Mapping


class ThreadProgram:
    """A stand-in for `processes.ChildProgram`; what is sent is pickled all the same."""

    def __init__(self, module: str, variables: Mapping[str, str] | None = None) -> None:
        self.connection, theirs = multiprocessing.Pipe()
        main = importlib.import_module(module).main
        threading.Thread(target=main, args=(theirs,), daemon=True).start()

    def close(self) -> None:
        self.connection.close()
