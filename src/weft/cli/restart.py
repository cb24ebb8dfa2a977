"""What runs in several processes of one layout goes on by itself when one of them is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

RESTARTS = 3
"""How often all processes are started again."""
Ended = TypeVar("Ended")


def retry_on_replica_loss(attempt: Callable[[bool], Ended], tell: Callable[[str], None]) -> Ended:
    """Tries again where a stage was lost, from what is saved; `attempt` is told whether it is a later one."""
    from weft.parallel.stages.stage_pool import StageLostError

    for num_left in reversed(range(RESTARTS + 1)):
        try:
            return attempt(num_left < RESTARTS)
        except StageLostError as error:
            if num_left == 0:
                raise
            times = "once more" if num_left == 1 else f"{num_left} times"
            tell(f"{error.where}: {error.message} They start again, at most {times}.")
    raise AssertionError("the last try returns or raises")
