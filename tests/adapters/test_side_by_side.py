"""Two passes that take turns: in which order they run, what they find, and what becomes of one that fails."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from thread_devices import ThreadDevices, on_devices

from weft.adapters.devices import SideBySide
from weft.adapters.routing import Routing
from weft.kernels.device import CPU


def beside(devices: ThreadDevices, *passes: Callable[[], None], routing: Routing | None = None) -> None:
    SideBySide(devices, routing or Routing(), CPU).run(passes)


def sums(devices: ThreadDevices, log: list[str], name: str, count: int) -> Callable[[], None]:
    """A pass that adds up so often, and logs what it does between."""

    def run() -> None:
        for number in range(count):
            log.append(f"{name}{number}")
            total = devices.add_up(torch.tensor([float(ord(name) * (number + 1))]))
            assert total.item() == devices.count * ord(name) * (number + 1)
        log.append(f"{name} over")

    return run


def test_passes_when_they_add_up_then_take_turns_at_every_sum_the_same_on_all_devices():
    """One hands over as soon as its sum is under way, and waits for it when its turn comes again."""

    def run(devices: ThreadDevices) -> tuple[list[str], list[tuple[str, int]]]:
        log: list[str] = []
        beside(devices, sums(devices, log, "a", 2), sums(devices, log, "b", 2))
        return log, devices.events

    (log, events), other = on_devices(2, run)
    assert (log, events) == other
    assert log == ["a0", "b0", "a1", "b1", "a over", "b over"]
    assert [what for what, _ in events] == ["start", "start", "wait", "start", "wait", "start", "wait", "wait"]
    assert [one for _, one in events] == [0, 1, 0, 0, 1, 1, 0, 1]


@pytest.mark.parametrize("counts", [(1, 4), (4, 1), (0, 2), (2, 0)])
def test_pass_when_the_other_is_over_then_goes_on_alone(counts):
    def run(devices: ThreadDevices) -> list[str]:
        log: list[str] = []
        beside(devices, sums(devices, log, "a", counts[0]), sums(devices, log, "b", counts[1]))
        return log

    first, second = on_devices(2, run)
    assert first == second
    for name, count in zip("ab", counts, strict=True):
        own = [line for line in first if line[0] == name]
        assert own == [*(f"{name}{number}" for number in range(count)), f"{name} over"]


def test_pass_when_the_other_wrote_the_routing_table_then_finds_its_own_again():
    def run(devices: ThreadDevices) -> list[int | None]:
        routing, found = Routing(), []

        def one(row_tile: int) -> Callable[[], None]:
            def pass_by() -> None:
                routing.row_tile = row_tile
                for _ in range(3):
                    devices.add_up(torch.zeros(1))
                    found.append(routing.row_tile)

            return pass_by

        beside(devices, one(1), one(2), routing=routing)
        return found

    assert on_devices(2, run) == [[1, 2, 1, 2, 1, 2]] * 2


class PassFailedError(Exception):
    pass


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("num_before", [0, 2])
def test_pass_when_it_fails_then_the_other_is_woken_and_its_error_is_raised(failing, num_before):
    """Neither runs any more, and the next two passes run as ever."""

    def run(devices: ThreadDevices) -> tuple[list[str], list[str]]:
        log: list[str] = []

        def fail() -> None:
            sums(devices, log, "x", num_before)()
            raise PassFailedError

        passes = [sums(devices, log, "a", 5), sums(devices, log, "a", 5)]
        passes[failing] = fail
        both = SideBySide(devices, Routing(), CPU)
        with pytest.raises(PassFailedError):
            both.run(passes)
        assert "a over" not in log and devices.turns is None
        after: list[str] = []
        both.run([sums(devices, after, "c", 1), sums(devices, after, "d", 1)])
        return log, after

    for _, after in on_devices(1, run):
        assert after == ["c0", "d0", "c over", "d over"]


def test_passes_when_another_device_is_gone_then_neither_waits_for_it_for_ever():
    found: list[str] = []

    def run(devices: ThreadDevices) -> None:
        if devices.index:
            raise PassFailedError
        with pytest.raises(threading.BrokenBarrierError):
            beside(devices, sums(devices, found, "a", 2), sums(devices, found, "b", 2))

    with pytest.raises(PassFailedError):
        on_devices(2, run)
    assert found == ["a0", "b0"]
