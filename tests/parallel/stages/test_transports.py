"""Processes get what others send in its order, without names on it, and gather layers."""

from __future__ import annotations

import datetime
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from covering import slow

from benchmarks.pipeline.in_process import LocalTransport
from weft import processes
from weft.model.shards import TorchHostPeers, TorchPeers
from weft.parallel.stages.transport import (
    Channel,
    HostDevices,
    HostTransport,
    Route,
    Teams,
    TorchDevices,
    TorchTransport,
    join_devices,
    tensor_devices,
)

CPU = torch.device("cpu")
LONGEST = datetime.timedelta(seconds=60)
ROUTES = [
    Route(Channel.NORM, 1, 0),
    Route(Channel.NORM, 0, 1),
    Route(Channel.ACTIVATION, 0, 1),
    Route(Channel.PART, 1, 0),
]


def talk(stage: int, store: str, is_by_host: bool, results: Any) -> None:
    """One of two processes; returns what it has received."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=stage, world_size=2, timeout=LONGEST)
    transport = (HostTransport if is_by_host else TorchTransport)(stage, CPU, LONGEST, Teams((1, 1)))
    # One of them names the routes backwards: the order in which they are opened is that of the routes.
    transport.open(ROUTES[:: 1 if stage else -1])
    found: list[list[float]] = []
    for channel in (Channel.NORM, Channel.ACTIVATION if stage == 0 else Channel.PART):
        for number in range(3):
            transport.send(
                torch.full((2, 3), 10.0 * channel + number + 100 * stage, dtype=torch.bfloat16), 1 - stage, channel
            )
    for channel in (Channel.PART if stage == 0 else Channel.ACTIVATION, Channel.NORM):
        received = [transport.receive((2, 3), torch.bfloat16, 1 - stage, channel) for _ in range(3)]
        found.append([float(tensor.mean()) for tensor in received])
    transport.finish()
    peers = (TorchHostPeers if is_by_host else TorchPeers)(stage, 2, CPU)
    whole = torch.arange(8, dtype=torch.uint8)
    into = torch.zeros(8, dtype=torch.uint8)
    peers.gather(0, peers.keep(0, whole), into).wait()
    devices = HostDevices(stage, 2, CPU) if is_by_host else TorchDevices(stage, 2)
    devices.groups = join_devices(0, Teams((2,)), LONGEST)
    parts = torch.full((3, 2), 1.0 + stage, dtype=torch.bfloat16).t()
    later = devices.start(10 * parts, 1)
    added = devices.add_up(parts)
    # A row for each of them, of which it gets its own from both.
    swapped = devices.start_swap(torch.tensor([[10.0], [20.0]]) + stage, 0)
    sums = [added.tolist(), *([each.tolist() for each in wait()] for wait in (later, swapped))]
    results.put((stage, found, into.tolist(), peers.most(5 - stage), *sums))
    dist.destroy_process_group()


@pytest.mark.parametrize("is_by_host", [slow(False, id="as it is"), pytest.param(True, id="by the host")])
def test_messages_when_two_processes_talk_then_come_in_their_order_by_channel(is_by_host, tmp_path: Path):
    """In both directions at once, and what is received first need not have been sent first; sums of all devices."""
    processes.prepare()
    context = multiprocessing.get_context("forkserver")
    results = context.Queue()
    given = [(stage, str(tmp_path / "store"), is_by_host, results) for stage in range(2)]
    both = [context.Process(target=talk, args=own) for own in given]
    for process in both:
        process.start()
    found = {stage: what for stage, *what in (results.get(timeout=120) for _ in both)}
    for process in both:
        process.join()
    sums = [[[3.0] * 3] * 2, [[[10.0] * 3] * 2, [[20.0] * 3] * 2]]
    assert found[0] == [[[120, 121, 122], [130, 131, 132]], list(range(8)), 5, *sums, [[10.0], [11.0]]]
    assert found[1] == [[[0, 1, 2], [30, 31, 32]], list(range(8)), 5, *sums, [[20.0], [21.0]]]


@pytest.mark.parametrize(
    ("device", "backend", "kind", "is_recorded"),
    [("cpu", "gloo", TorchDevices, False), ("cuda", "gloo", HostDevices, False), ("cuda", "nccl", TorchDevices, True)],
)
def test_devices_when_they_share_layers_then_graphs_hold_what_nccl_adds_up(device, backend, kind, is_recorded):
    found = tensor_devices(1, 2, torch.device(device), backend)
    assert type(found) is kind
    assert (found.index, found.count, found.can_be_recorded) == (1, 2, is_recorded)


def test_route_when_no_group_would_have_it_then_stages_of_one_process_notice():
    """What is tried in one process runs in several."""
    with pytest.raises(AssertionError):
        LocalTransport(0, None).open([Route(Channel.ACTIVATION, 1, 0)])  # type: ignore[arg-type]
