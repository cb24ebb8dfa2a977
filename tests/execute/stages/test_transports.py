"""Processes get what others send in its order, without names on it, and gather layers."""

from __future__ import annotations

import datetime
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from weft.backbone.shards.peers import TorchHostPeers, TorchPeers
from weft.execute.stages.host_transport import HostTransport
from weft.execute.stages.transport import Channel, LocalTransport, Route, TorchTransport

CPU = torch.device("cpu")
LONGEST = datetime.timedelta(seconds=60)
ROUTES = [
    Route(Channel.VERDICT, 1, 0),
    Route(Channel.VERDICT, 0, 1),
    Route(Channel.ACTIVATION, 0, 1),
    Route(Channel.PART, 1, 0),
]


def talk(stage: int, store: str, kind: type[TorchTransport], peers_kind: type[TorchPeers], told: Any) -> None:
    """One of two processes; says what it has received."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=stage, world_size=2, timeout=LONGEST)
    transport = kind(stage, CPU, LONGEST)
    # One of them names the routes backwards: the order in which they are opened is that of the routes.
    transport.open(ROUTES[:: 1 if stage else -1])
    found: list[list[float]] = []
    for channel in (Channel.VERDICT, Channel.ACTIVATION if stage == 0 else Channel.PART):
        for number in range(3):
            transport.send(
                torch.full((2, 3), 10.0 * channel + number + 100 * stage, dtype=torch.bfloat16), 1 - stage, channel
            )
    for channel in (Channel.PART if stage == 0 else Channel.ACTIVATION, Channel.VERDICT):
        received = [transport.receive((2, 3), torch.bfloat16, 1 - stage, channel) for _ in range(3)]
        found.append([float(tensor.mean()) for tensor in received])
    transport.finish()
    peers = peers_kind(stage, 2, CPU)
    whole = torch.arange(8, dtype=torch.uint8)
    into = torch.zeros(8, dtype=torch.uint8)
    peers.gather(0, peers.keep(0, whole), into).wait()
    told.put((stage, found, into.tolist(), peers.most(5 - stage)))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("kind", "peers"), [(TorchTransport, TorchPeers), (HostTransport, TorchHostPeers)], ids=["as it is", "by the host"]
)
def test_messages_when_two_processes_talk_then_come_in_their_order_by_channel(kind, peers, tmp_path: Path):
    """In both directions at once, and what is received first need not have been sent first."""
    context = multiprocessing.get_context("spawn")
    told = context.Queue()
    given = [(stage, str(tmp_path / "store"), kind, peers, told) for stage in range(2)]
    processes = [context.Process(target=talk, args=own) for own in given]
    for process in processes:
        process.start()
    found = {stage: what for stage, *what in (told.get(timeout=120) for _ in processes)}
    for process in processes:
        process.join()
    assert found[0] == [[[120, 121, 122], [130, 131, 132]], list(range(8)), 5]
    assert found[1] == [[[0, 1, 2], [30, 31, 32]], list(range(8)), 5]


def test_route_when_no_group_would_have_it_then_stages_of_one_process_notice():
    """What is tried in one process runs in several."""
    with pytest.raises(AssertionError):
        LocalTransport(0, None).open([Route(Channel.ACTIVATION, 1, 0)])  # type: ignore[arg-type]
