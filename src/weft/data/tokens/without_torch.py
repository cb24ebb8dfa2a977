"""Keeps torch out of a process that only tokenises.

transformers imports it with a tokenizer if it is installed: two thirds of the time until the first token, and most of
the memory. Tokenising works without it.
"""

from __future__ import annotations

import os
import sys
from typing import Any


def do_without_torch() -> None:
    """Makes torch count as not installed in this process; for programs that are started for data alone."""
    modules: dict[str, Any] = sys.modules
    modules.setdefault("torch", None)
    # transformers would advise to install it.
    os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"
