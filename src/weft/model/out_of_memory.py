"""What a GPU out of memory and a failed one look like: torch has errors of its own, others have only words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_WORDS = ("error: out of memory", "error [cuda]: out of memory", "status_alloc_failed")
"""Of the CUDA runtime and driver (graphs, pinned memory), of Triton as it loads a kernel, of cuBLAS and cuDNN."""
_FAULTS = ("CUDA error", "CUDA driver error", "Triton Error [CUDA]", "CUBLAS_STATUS_", "CUDNN_STATUS_")
"""What a failed GPU is called by torch, Triton, cuBLAS and cuDNN."""


def is_device_fault(error: RuntimeError) -> bool:
    """Whether an error says that the GPU itself has failed; every later call on it fails too, whoever makes it."""
    return isinstance(error, torch.AcceleratorError) or any(word in str(error) for word in _FAULTS)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, or hides one that does: a failed capture tells of the capture."""
    return any(_is_memory_message(cause) for cause in (error, error.__context__))


@contextmanager
def memory_errors() -> Iterator[None]:
    """Whoever runs out of memory inside, torch.OutOfMemoryError says so."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or not is_out_of_memory(error):
            raise
        raise torch.OutOfMemoryError(str(error)) from error


def _is_memory_message(error: BaseException | None) -> bool:
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in _WORDS)
