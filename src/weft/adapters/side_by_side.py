"""Two passes of one device that take turns: one computes while what the other has to wait for is added up.

Each pass is a thread, and only the one whose turn it is runs; on a GPU both launch on one stream. It hands over where
it has started a sum over the devices, and waits for that sum when its turn comes again. So the order of all operations
follows from the two passes alone: it is the same every time and on every device, and each pass computes what it would
compute alone. Passes must not write to the same things; what a pass finds in the routing table, it finds again after
each turn of the other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

import torch

from weft.adapters.devices import Devices
from weft.adapters.routing import Routing
from weft.kernels.device import as_here, join_thread


class OtherPassFailedError(Exception):
    """The pass beside this one came to no good end, so this one is not run to its end either."""


class Turns:
    """Whose turn it is of two passes; the first begins."""

    def __init__(self, routing: Routing) -> None:
        self.pass_number = 0
        """Of the pass whose turn it is."""
        self._routing = routing
        self._changed = threading.Condition()
        self._is_one_over = self._has_one_failed = False

    def hand_over(self) -> None:
        """Lets the other pass run until it hands over too; nothing happens once it is over."""
        if self._is_one_over:
            return
        own, put_back = self.pass_number, self._routing.kept()
        self._give_to(1 - own)
        self.await_turn(own)
        put_back()

    def await_turn(self, number: int) -> None:
        """Until it is this pass's turn; OtherPassFailedError where the other has failed."""
        with self._changed:
            self._changed.wait_for(lambda: self.pass_number == number)
        if self._has_one_failed:
            raise OtherPassFailedError("the pass beside this one has failed")

    def end(self, *, has_failed: bool) -> None:
        """The pass whose turn it is has nothing more to do."""
        self._is_one_over, self._has_one_failed = True, has_failed or self._has_one_failed
        self._give_to(1 - self.pass_number)

    def _give_to(self, number: int) -> None:
        with self._changed:
            self.pass_number = number
            self._changed.notify_all()


class SideBySide:
    """Runs two passes on one of several devices that share every layer; all of them run the same two."""

    def __init__(self, devices: Devices, routing: Routing, device: torch.device) -> None:
        """`device`: the one of them that is here."""
        self._devices, self._routing, self._device = devices, routing, device
        # It stays: threads of torch that belong to a thread are started with it. As many as here: products may depend
        # on how many there are.
        self._thread = ThreadPoolExecutor(1, "weft-second-pass", _join, (torch.get_num_threads(), device))

    def run(self, passes: Sequence[Callable[[], None]]) -> None:
        """Runs two passes to their end; raises what one of them raised, once neither runs any more."""
        first, second = passes
        turns = self._devices.turns = Turns(self._routing)
        beside = self._thread.submit(_run_there, as_here(self._device), turns, second)
        try:
            _run(turns, 0, first)
        except OtherPassFailedError:
            beside.result()
            raise
        finally:
            beside.exception()
            self._devices.turns = None
        beside.result()


def _join(num_threads: int, device: torch.device) -> None:
    torch.set_num_threads(num_threads)
    join_thread(device)


def _run_there(place: AbstractContextManager[object], turns: Turns, run: Callable[[], None]) -> None:
    with place:
        _run(turns, 1, run)


def _run(turns: Turns, number: int, run: Callable[[], None]) -> None:
    turns.await_turn(number)
    try:
        run()
    except BaseException:
        turns.end(has_failed=True)
        raise
    turns.end(has_failed=False)
