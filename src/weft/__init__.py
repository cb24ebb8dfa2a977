"""Weft trains many LoRA adapters at once on one frozen language model.

import weft

engine = weft.Engine("tiny")
engine.submit(weft.Job(name="support", train_data="support.jsonl", max_steps=100))
for event in engine.events():
    print(event)
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

# Before torch is imported: threads that wait by spinning slow each other down tenfold as soon as anything else runs on
# the machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

if TYPE_CHECKING:
    from weft.engine.engine import Engine as Engine
    from weft.errors import WeftError as WeftError
    from weft.spec import AdapterSpec as Adapter
    from weft.spec import JobSpec as Job
    from weft.sweep.api import sweep as sweep

__version__ = "0.1.0"
__all__ = ["Adapter", "Engine", "Job", "WeftError", "__version__", "sweep"]

_HOMES = {
    "Adapter": ("weft.spec", "AdapterSpec"),
    "Engine": ("weft.engine.engine", "Engine"),
    "Job": ("weft.spec", "JobSpec"),
    "WeftError": ("weft.errors", "WeftError"),
}


def __getattr__(name: str) -> Any:
    # torch is imported with the engine, so that `import weft` and the planners stay quick.
    if name not in _HOMES and name != "sweep":
        raise AttributeError(f"module 'weft' has no attribute {name!r}")
    import importlib

    if name == "sweep":
        # The package is callable: importing it makes it this module's attribute, whoever does so first.
        return importlib.import_module("weft.sweep")
    module, attribute = _HOMES[name]
    return getattr(importlib.import_module(module), attribute)
