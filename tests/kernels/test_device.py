"""One file queries the device: it reports what torch knows of a GPU, and a CPU needs no special case."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import weft
from weft.kernels import device

GPU = torch.device("cuda", 1)


def test_source_when_searched_then_only_one_file_queries_torch_about_gpus():
    """A new kind of device is taught in one file."""
    root = Path(weft.__file__).parent
    querying = [str(path.relative_to(root)) for path in root.rglob("*.py") if "torch.cuda" in path.read_text("utf-8")]
    assert querying == ["kernels/device.py"]


def test_memory_when_the_device_is_a_cpu_then_nothing_is_held_and_nothing_waits():
    device.synchronise(device.CPU)
    device.empty_cache(device.CPU)
    device.reset_peak(device.CPU)
    assert device.peak_bytes(device.CPU) == device.peak_reserved_bytes(device.CPU) == 0
    assert device.timing_event(device.CPU) is None


@pytest.mark.parametrize("there", [False, True])
def test_default_when_torch_sees_a_gpu_then_is_the_first_by_its_drivers_name(monkeypatch, there):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda which: f"GPU {which.index}")
    assert device.device_name(device.default_device()) == ("GPU 0" if there else "cpu")
    assert [device.device_name(found) for found in device.gpus()] == (["GPU 0", "GPU 1"] if there else [])


def test_limit_when_no_gpu_is_named_then_is_the_current_ones(monkeypatch):
    """torch takes an index or nothing, and no device without an index."""
    given: list[object] = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *share: given.append(share))
    for one in (torch.device("cuda"), GPU):
        device.limit_memory(one, 0.5)
    assert given == [(0.5, None), (0.5, 1)]


def test_rehearsed_when_the_meta_device_stands_for_a_gpu_then_it_answers_as_that_and_does_no_work():
    """Kernels are chosen as on the GPU, by a process that has none; afterwards the meta device is nothing again."""
    meta = torch.device("meta")
    gpu = device.GpuKind("NVIDIA H200", (9, 0), 132, 2**37)
    with device.as_gpu(gpu):
        assert device.is_gpu(meta) and not device.has_streams(meta)
        assert device.gpu_kind(meta) == gpu
        assert not device.is_gpu(device.CPU)
    assert not device.is_gpu(meta)
    assert device.device_name(meta) == "meta"
