"""What a process is to be, and how it is started where nobody has imported anything for it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ProcessOrder:
    """A program for a process with a session of its own: Ctrl-C is for whoever started it."""

    module: str
    """Its `main` is run, as `python -m` does."""
    arguments: tuple[str, ...]
    """What `main` finds in `sys.argv` behind the program; the numbers of its open files follow."""
    variables: Mapping[str, str]
    """Its whole environment."""
    name: str
    """What lists of processes call it; Linux keeps 15 letters of it."""

    def start_alone(self, out: int, files: Sequence[int]) -> subprocess.Popen[bytes]:
        """Starts it by itself; it prints into `out`, and has `files` open."""
        return subprocess.Popen(
            [sys.executable, "-m", self.module, *self.arguments, *map(str, files)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            pass_fds=files,
            env=self.variables,
            start_new_session=True,
        )
