"""Replicas as actors of a Ray cluster; `weft.parallel.ray.train` is for programs that use Ray themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weft.parallel.ray.api import train

__all__ = ["train"]


def __getattr__(name: str) -> Any:
    # An actor's process imports this package before it sets torch's number of threads.
    if name not in __all__:
        raise AttributeError(f"module 'weft.parallel.ray' has no attribute {name!r}")
    from weft.parallel.ray.api import train

    return train
