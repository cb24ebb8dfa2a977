"""Sweeps: a search space expanded into jobs that train together, judged and stopped early, the best one kept.

The package itself can be called: `weft.sweep("sweep.yaml", trials=16)` is `weft.sweep.api.sweep`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.sweep.api import SweepResult


class _Callable(ModuleType):
    """A package is an attribute of its parent, so the function of the same name has to be the package."""

    def __call__(self, *args: Any, **keywords: Any) -> SweepResult:
        """See `weft.sweep.api.sweep`."""
        from weft.sweep.api import sweep

        return sweep(*args, **keywords)


sys.modules[__name__].__class__ = _Callable
