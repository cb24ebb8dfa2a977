"""A run that is ended from outside is saved: Ctrl-C, a plain kill, and a terminal that is closed."""

from __future__ import annotations

import io
import os
import signal

import pytest
from rich.console import Console

from weft.cli.watch import StopRequest, stop_signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_stop_when_a_signal_comes_then_it_is_requested_once_and_the_handler_goes_again(number):
    before = signal.signal(number, signal.SIG_DFL)
    try:
        request = StopRequest(Console(file=io.StringIO()))
        with stop_signals(request):
            assert not request.is_set
            os.kill(os.getpid(), number)
            assert request.is_set
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)


def test_stop_when_the_run_was_started_to_outlive_its_terminal_then_goes_on():
    """nohup ignores the signal before the program starts."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        request = StopRequest(Console(file=io.StringIO()))
        with stop_signals(request):
            os.kill(os.getpid(), signal.SIGHUP)
        assert not request.is_set
    finally:
        signal.signal(signal.SIGHUP, before)


def test_stop_when_the_signal_comes_while_a_line_is_written_then_it_is_requested_all_the_same():
    """Python does not allow a write to a stream within a write to it."""

    class Busy(io.StringIO):
        def flush(self) -> None:
            raise RuntimeError("reentrant call inside <_io.BufferedWriter name='<stdout>'>")

    request = StopRequest(Console(file=Busy()))
    request(signal.SIGINT, None)
    assert request.is_set
