"""Connections that wait for a client no longer than a request can take.

A client may open connections and send nothing, or a byte now and then. Each holds a file descriptor, and once they run
out, no other client is served. So the bytes of a request must come at a least speed, after some seconds for a start.
"""

from __future__ import annotations

import asyncio
import resource

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

START_S = 30.0
"""Seconds that a client has before its speed counts; a connection without a request is closed after them."""
LEAST_BYTES_PER_S = 1024
"""Least mean speed of a request."""
LOOK_S = 5.0


class TimedConnection(HttpToolsProtocol):
    """A connection that is closed when its client takes too long to send a request."""

    _since_s = 0.0
    """Begin of its request, or the last look at which it was not waited for, by the clock of the event loop."""
    _num_bytes = 0
    """Bytes received since then."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._restart()
        self.loop.call_later(LOOK_S, self._look)

    def data_received(self, data: bytes) -> None:
        self._num_bytes += len(data)
        super().data_received(data)

    def on_message_begin(self) -> None:
        self._restart()
        super().on_message_begin()

    def _restart(self) -> None:
        self._since_s, self._num_bytes = self.loop.time(), 0

    def _look(self) -> None:
        """Closes the connection if its client is too slow; else looks again later."""
        if self.transport.is_closing():
            return
        if not self._waits_for_client():
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


def allow_many_connections() -> None:
    """Raises this process's limit of open files, often 1,024, as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
