"""Weft trains many adapters at once on one frozen language model.

import weft

engine = weft.Engine("tiny")
engine.submit(weft.Job(name="support", train_data="support.jsonl", max_steps=100))
for event in engine.events():
    print(event)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.engine.engine import Engine
    from weft.engine.events import (
        CheckpointSaved,
        EvalDone,
        EvalSliceDone,
        Event,
        JobCancelled,
        JobEnded,
        JobEvent,
        JobFailed,
        JobPaused,
        JobPreempted,
        JobResumed,
        JobsGrouped,
        JobStarted,
        JobSucceeded,
        JobWaiting,
        JobWarning,
        LayoutDecided,
        MicrobatchDone,
        MicrobatchesPaired,
        StepDone,
    )
    from weft.errors import WeftError
    from weft.job_state import JobState, Reason, ReasonCode
    from weft.spec import AdapterSpec as Adapter
    from weft.spec import JobSpec as Job
    from weft.sweeps.api import sweep

__version__ = "0.1.0"
__all__ = [
    "Adapter",
    "CheckpointSaved",
    "Engine",
    "EvalDone",
    "EvalSliceDone",
    "Event",
    "Job",
    "JobCancelled",
    "JobEnded",
    "JobEvent",
    "JobFailed",
    "JobPaused",
    "JobPreempted",
    "JobResumed",
    "JobStarted",
    "JobState",
    "JobSucceeded",
    "JobWaiting",
    "JobWarning",
    "JobsGrouped",
    "LayoutDecided",
    "MicrobatchDone",
    "MicrobatchesPaired",
    "Reason",
    "ReasonCode",
    "StepDone",
    "WeftError",
    "__version__",
    "sweep",
]
_HOMES = {
    "Adapter": ("weft.spec", "AdapterSpec"),
    "Engine": ("weft.engine.engine", "Engine"),
    "Job": ("weft.spec", "JobSpec"),
    "JobState": ("weft.job_state", "JobState"),
    "Reason": ("weft.job_state", "Reason"),
    "ReasonCode": ("weft.job_state", "ReasonCode"),
    "WeftError": ("weft.errors", "WeftError"),
    "sweep": ("weft.sweeps.api", "sweep"),
}
"""Modules of the public names; names that are not here are events."""


def __getattr__(name: str) -> Any:
    # torch is imported with the engine, so that `import weft` and the planners stay quick.
    if name not in __all__:
        raise AttributeError(f"module 'weft' has no attribute {name!r}")
    module, attribute = _HOMES.get(name, ("weft.engine.events", name))
    return getattr(importlib.import_module(module), attribute)
