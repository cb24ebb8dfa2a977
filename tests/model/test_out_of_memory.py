"""Memory that runs out is recognised, whichever library reports it; and no other error is."""

from __future__ import annotations

import pytest
import torch

from weft.kernels.device import is_out_of_memory, memory_errors
from weft.model.fused import graphs

WORDS = {
    "allocator": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "runtime": torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
    "driver": RuntimeError("CUDA driver error: out of memory"),
    "triton": RuntimeError("Triton Error [CUDA]: out of memory"),
    "cublas": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
}


@pytest.mark.parametrize("error", WORDS.values(), ids=WORDS)
def test_memory_errors_when_any_library_runs_out_then_one_error_has_its_message(error):
    assert is_out_of_memory(error)
    with pytest.raises(torch.OutOfMemoryError) as caught, memory_errors():
        raise error
    assert str(caught.value) == str(error)
    assert caught.value is error or caught.value.__cause__ is error


def test_memory_errors_when_a_capture_hides_what_ended_it_then_it_is_found():
    error = RuntimeError("CUDA error: operation failed due to a previous error during capture")
    assert not is_out_of_memory(error)
    error.__context__ = torch.OutOfMemoryError("no room")
    with pytest.raises(torch.OutOfMemoryError, match="operation failed due to a previous error"), memory_errors():
        raise error


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling cublasGemmEx"),
        RuntimeError("out of resource: shared memory, Required: 300000, Hardware limit: 232448."),
        ValueError("CUDA error: out of memory"),
    ],
)
def test_memory_errors_when_something_else_fails_then_it_stays_what_it_is(error):
    with pytest.raises(type(error)) as caught, memory_errors():
        raise error
    assert caught.value is error and not isinstance(error, torch.OutOfMemoryError)


def test_capture_when_a_kernel_finds_no_room_as_it_is_loaded_then_it_has_run_out_of_memory(monkeypatch):
    """Kernels are loaded in the run before the capture."""

    def no_room(*_: object) -> None:
        raise WORDS["triton"]

    monkeypatch.setattr(graphs, "capture_stream", no_room)
    monkeypatch.setattr(graphs, "Inputs", lambda *_: None)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: None)
    with pytest.raises(torch.OutOfMemoryError, match="Triton Error"):
        graphs.capture(_Anything(), _Anything(), _Anything(), None, _Anything(), None, 0)


class _Anything:
    """Stands in for what is not looked at."""

    def __getattr__(self, name: str) -> _Anything:
        return self

    def __getitem__(self, key: object) -> _Anything:
        return self
