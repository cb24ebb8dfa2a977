"""Runs the app on a socket until a signal asks it to stop, then finishes the requests it has begun and returns."""

from __future__ import annotations

import logging
import signal
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn
from fastapi import FastAPI

from weft.errors import ConfigError
from weft.serve.api.observe import log_json

LOG = logging.getLogger("weft.serve")
GRACE_S = 8
"""How many seconds requests in flight have once the process is asked to stop."""


class _Server(uvicorn.Server):
    """A server that tells the app and the caller when it is about to stop, so that streams end and workers drain."""

    def __init__(self, config: uvicorn.Config, app: FastAPI, on_stop: Callable[[], None]) -> None:
        super().__init__(config)
        self._api, self._on_stop = app, on_stop
        self._signal = ""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Says that it stops and why; a signal handler could be in the middle of another line of the log."""
        LOG.info("stopping", extra={"fields": {"signal": self._signal, "grace_s": GRACE_S}})
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handles a signal that asks the process to stop."""
        self._signal = signal.Signals(sig).name
        self._api.state.service.is_draining = True
        self._on_stop()
        super().handle_exit(sig, frame)


def listen(host: str, port: int) -> socket.socket:
    """Opens a socket that accepts connections at once; port 0 is any free port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise ConfigError(f"{host}:{port} cannot be used ({error.strerror or error}).", where="--port") from None
    sock.listen(2048)
    return sock


def run_app(app: FastAPI, sock: socket.socket, on_stop: Callable[[], None] = lambda: None) -> None:
    """Serves until SIGTERM or SIGINT; returns when the last request is answered or the grace is over."""
    log_json()
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=GRACE_S,
        timeout_keep_alive=65,
        # A client could forge these headers, so they must not reach the log.
        proxy_headers=False,
    )
    server = _Server(config, app, on_stop)
    # uvicorn installs its handlers a little later, and a signal until then must not be lost. It also raises the signal
    # again when it is done.
    before = {number: signal.signal(number, server.handle_exit) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        server.run(sockets=[sock])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
