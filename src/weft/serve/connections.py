"""Connections that wait for a client no longer than a request or an answer can take.

A client may open connections and send nothing, or a byte now and then, or never read its answer. Each holds a file
descriptor, and once they run out, no other client is served. So a request must come at a least speed, and an answer be
read at it, after some seconds for a start.

A request may be answered before all of it has come: it is too long, or its key is wrong. If its connection were closed
then, the client would get a reset, and might never see the answer. So the answer is ended, and the rest of the request
is read and thrown away, as long as an idle connection may stay.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Callable
from typing import cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

START_S = 30.0
"""Seconds that a client has before its speed counts; a connection without a request is closed after them."""
LEAST_BYTES_PER_S = 1024
"""Least mean speed of a request, and of reading an answer."""
LOOK_S = 5.0


class _AnswerTransport:
    """What answers are written to: it counts their bytes, and has its own way to close the connection."""

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self._transport, self.close = transport, close
        self.num_bytes = 0

    def write(self, data: bytes) -> None:
        self.num_bytes += len(data)
        self._transport.write(data)

    def is_closing(self) -> bool:
        return self._transport.is_closing()


class TimedConnection(HttpToolsProtocol):
    """A connection that is closed when its client takes too long to send a request or to read an answer."""

    _since_s = 0.0
    """Begin of its request, or the last look at which it was not waited for, by the clock of the event loop."""
    _num_bytes = 0
    """Bytes received since then."""
    _taken = 0.0, 0
    """The last look at which the client had taken all bytes that were written, and their number."""
    _has_whole_request = True
    _is_discarding = False
    """True if the connection stays only so that the client can send the rest of its request and read the answer."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._answers = _AnswerTransport(transport, self._close_answered)
        self._restart()
        self._taken = self._since_s, 0
        self.loop.call_later(LOOK_S, self._look)

    def data_received(self, data: bytes) -> None:
        self._num_bytes += len(data)
        if not self._is_discarding:
            super().data_received(data)

    def on_message_begin(self) -> None:
        self._restart()
        self._has_whole_request = False
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if self.cycle is not None:
            self.cycle.transport = cast("asyncio.Transport", self._answers)

    def on_message_complete(self) -> None:
        self._has_whole_request = True
        super().on_message_complete()

    def _close_answered(self) -> None:
        """Closes the connection after an answer, at once only if the client has nothing more to send."""
        if self._has_whole_request or self.transport.is_closing():
            self.transport.close()
            return
        self._is_discarding = True
        self.transport.write_eof()

    def _restart(self) -> None:
        self._since_s, self._num_bytes = self.loop.time(), 0

    def _look(self) -> None:
        """Closes the connection if its client is too slow; else looks again later."""
        if self._reads_too_slowly():
            self.transport.abort()
            return
        if self.transport.is_closing():
            if not self.transport.get_write_buffer_size():
                return
        elif not self._waits_for_client():
            self._restart()
        elif self.loop.time() - self._since_s > START_S + self._num_bytes / LEAST_BYTES_PER_S:
            self.transport.close()
            return
        self.loop.call_later(LOOK_S, self._look)

    def _waits_for_client(self) -> bool:
        if self.flow.read_paused:
            # What has come is not processed yet.
            return False
        if self.cycle is None or self.cycle.response_complete:
            # Between two requests uvicorn's own timer runs.
            return self.timeout_keep_alive_task is None
        return bool(self.cycle.more_body)

    def _reads_too_slowly(self) -> bool:
        num_waiting = self.transport.get_write_buffer_size()
        num_taken = self._answers.num_bytes - num_waiting
        if not num_waiting:
            self._taken = self.loop.time(), num_taken
            return False
        since_s, before = self._taken
        return self.loop.time() - since_s > START_S + (num_taken - before) / LEAST_BYTES_PER_S


def allow_many_connections() -> None:
    """Raises this process's limit of open files, often 1,024, as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
