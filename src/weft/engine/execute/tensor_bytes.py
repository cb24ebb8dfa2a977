"""Counts the bytes of tensors alive on a CPU, where no allocator keeps an account.

Every storage that an operation returns is counted from then until it is freed, once, however many tensors look at it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from weft.kernels.device import is_cpu


class TensorBytes(TorchDispatchMode):
    """Counts the bytes of the storages that are made while it is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.peak = 0
        """Most at once since the last `reset_peak`."""
        self._counted: dict[int, int] = {}

    def reset_peak(self) -> None:
        """Starts a new account of the peak."""
        self.peak = self.live

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in (result,) if isinstance(result, torch.Tensor) else tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        if key in self._counted or not is_cpu(storage.device):
            return
        self._counted[key] = storage.nbytes()
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.live -= self._counted.pop(key)


def stored_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes behind tensors, shared storage once."""
    found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.device.type != "meta"}
    return sum(found.values())
