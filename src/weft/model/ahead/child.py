"""Run as a program: compiles what a run will launch into Triton's cache, on several cores, and never touches a GPU.

It is told by its standard input, in one line, what the run is, and by its argument which file to leave when everything
is compiled. It says `ready` when what the first steps need is there, and ends when nobody holds its input open any
more. One process rehearses; its forks, which need import nothing again, share the kernels out among themselves.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from weft.kernels.recorded import RecordedLaunch, build_driver, compile_launch
from weft.model.ahead.rehearsal import rehearse
from weft.model.ahead.request import READY, KernelRequest

MOST_WORKERS = 12
"""More would wait for each other's longest kernel."""
SLOWEST = ("_product_grad", "_grad_keys", "_product", "_grad_a", "_grad_queries", "_grad_b", "_attend")
"""Kernels that take longest to compile, some ten times as long as others: they go first, so that nobody waits for one
that was begun last."""
NICENESS = 10
"""Who loads the weights goes first."""
_NUMBER = struct.Struct("<i")
_STDIN, _STDOUT = 0, 1
_PR_SET_PDEATHSIG = 1
"""Of Linux; Triton runs nowhere else."""


def main() -> None:
    """Rehearses and compiles."""
    os.nice(NICENESS)
    line = sys.stdin.readline()
    if not line:
        return
    first, later = (sorted(part, key=_rank) for part in rehearse(KernelRequest.from_json(line)))
    cores = len(os.sched_getaffinity(0))
    if _compile_all([*first, *later], len(first), min(MOST_WORKERS, max(1, cores - 1))):
        Path(sys.argv[1]).touch()


def _rank(launch: RecordedLaunch) -> int:
    """A kernel's place in the queue."""
    name = launch.kernel.__name__
    return SLOWEST.index(name) if name in SLOWEST else len(SLOWEST)


def _compile_all(launches: Sequence[RecordedLaunch], num_first: int, num_workers: int) -> bool:
    """Compiles everything in the given order; whether all of it could be."""
    queue, put = os.pipe()
    finished, tell = os.pipe()
    # Small enough for a pipe to hold, so nobody has to feed it.
    os.write(put, b"".join(_NUMBER.pack(place) for place in range(len(launches))))
    os.close(put)
    parent = os.getpid()
    for _ in range(num_workers):
        if os.fork() == 0:
            _end_with(parent)
            _work(launches, queue, tell)
    os.close(tell)
    build_driver()
    done: set[int] = set()
    while not _is_orphaned(finished):
        told = os.read(finished, _NUMBER.size)
        if not told:
            break
        place = _NUMBER.unpack(told)[0]
        done.add(place)
        if place < num_first and done.issuperset(range(num_first)):
            os.write(_STDOUT, READY)
    return len(done) == len(launches)


def _end_with(parent: int) -> None:
    """This process ends when its parent does."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _work(launches: Sequence[RecordedLaunch], queue: int, tell: int) -> NoReturn:
    """Takes kernels from the queue until it is empty; never returns."""
    while number := os.read(queue, _NUMBER.size):
        try:
            compile_launch(launches[_NUMBER.unpack(number)[0]])
        except BaseException:  # the run compiles it itself, and has more to say
            continue
        os.write(tell, number)
    os._exit(0)


def _is_orphaned(finished: int) -> bool:
    """Waits for news of a kernel; whether instead whoever asked is gone."""
    ready, _, _ = select.select([_STDIN, finished], [], [])
    return _STDIN in ready


if __name__ == "__main__":
    main()
