"""Named places where a test can make the program fail, and that cost nothing otherwise.

Code that must survive a crash calls `point("file.rename")` before and after each durable operation. Nothing happens
unless a plan is armed; then the N-th call fails as planned. Failing at N = 1, 2, ... until a run passes visits
every moment a crash can hit. Text such as `kill@17` or `enospc@3:file.write` describes a plan.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import threading
from dataclasses import dataclass

from weft.errors import ConfigError

ACTIONS = ("kill", "raise", "stop", "enospc")
_PLAN_TEXT = re.compile(r"(?P<action>[a-z]+)@(?P<at>[0-9]{1,9})(:(?P<name>[a-z_.]+))?")


@dataclass(frozen=True)
class FaultPlan:
    action: str
    """kill: SIGKILL to this process; stop: SIGSTOP; raise: OSError EIO; enospc: OSError ENOSPC."""
    at: int
    """The hit, counted from 1, at which it happens. It happens once."""
    name: str | None = None
    """Point whose hits count. Default: hits of all points."""

    def __post_init__(self) -> None:
        if self.action not in ACTIONS:
            raise ConfigError(f"{self.action!r} is not a fault; accepted are {', '.join(ACTIONS)}.")
        if self.at < 1:
            raise ConfigError(f"a fault happens at hit 1 or later, got {self.at}.")


_lock = threading.Lock()
_plan: FaultPlan | None = None
_hits = 0


def arm(plan: FaultPlan) -> None:
    """Starts counting hits from zero, to fail as planned."""
    global _plan, _hits
    with _lock:
        _plan, _hits = plan, 0


def disarm() -> None:
    global _plan
    with _lock:
        _plan = None


def hits() -> int:
    return _hits


def point(name: str) -> None:
    """Marks a point where a crash is interesting; a no-op unless a plan is armed."""
    global _hits
    if _plan is None:
        return
    with _lock:
        plan = _plan
        if plan is None or plan.name not in (None, name):
            return
        _hits += 1
        due = _hits == plan.at
    if due:
        _fail(plan.action, name)


def parse(text: str) -> FaultPlan:
    """The plan written as `action@hit` or `action@hit:point`."""
    match = _PLAN_TEXT.fullmatch(text)
    if match is None:
        raise ConfigError(f"{text!r} is not a fault plan; write action@hit or action@hit:point, e.g. kill@17.")
    return FaultPlan(match["action"], int(match["at"]), match["name"])


def _fail(action: str, name: str) -> None:
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        code = errno.ENOSPC if action == "enospc" else errno.EIO
        raise OSError(code, f"{os.strerror(code)} (planned fault at {name})")
