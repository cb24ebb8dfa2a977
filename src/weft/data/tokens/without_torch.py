"""Keeps torch out of a process that only tokenises.

transformers imports it beside a tokenizer if it is there, with a thousand modules of its own: two thirds of the time
until the first token, and most of the memory. Without it, it tokenises all the same.
"""

from __future__ import annotations

import os
import sys
from typing import Any


def do_without_torch() -> None:
    """From now on torch counts as not installed in this process; for programs that are started for data alone."""
    modules: dict[str, Any] = sys.modules
    modules.setdefault("torch", None)
    # transformers would advise to install it.
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
