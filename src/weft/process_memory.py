"""Memory of this machine and of this process, as Linux counts it; None where there is no /proc.

Measured is the resident size: every page of the process in RAM, with libraries and memory-mapped files, and also what
was freed but not given back.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

_PROC = Path("/proc")
_GROUP = Path("/sys/fs/cgroup")
_FORGET_PEAK = "5"


def memory_bytes() -> int:
    """Memory of this machine, or of the container that the process is in."""
    size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):
        return min(size, int((_GROUP / "memory.max").read_text()))
    return size


def resident_bytes() -> int | None:
    return _kib(_PROC / "self/status", "VmRSS")


def peak_resident_bytes() -> int | None:
    """Most bytes since `reset_peak_resident`, or since the process started where the kernel does not reset them."""
    return _kib(_PROC / "self/status", "VmHWM")


def reset_peak_resident() -> None:
    with suppress(OSError):
        (_PROC / "self/clear_refs").write_text(_FORGET_PEAK)


def available_bytes() -> int | None:
    """Bytes that processes can still take without swapping, within the limit of this process's container."""
    found = _kib(_PROC / "meminfo", "MemAvailable")
    with suppress(OSError, ValueError):
        # "max" is no number: there is no limit.
        left = int((_GROUP / "memory.max").read_text()) - int((_GROUP / "memory.current").read_text())
        # Cached pages of files count as taken, and are given up when processes need them.
        cached = re.findall(r"^(?:active|inactive)_file (\d+)$", (_GROUP / "memory.stat").read_text(), re.MULTILINE)
        left = max(0, left + sum(map(int, cached)))
        return left if found is None else min(found, left)
    return found


def _kib(file: Path, name: str) -> int | None:
    with suppress(OSError):
        found = re.search(rf"^{name}:\s+(\d+) kB$", file.read_text(), re.MULTILINE)
        return None if found is None else int(found[1]) * 1024
    return None
