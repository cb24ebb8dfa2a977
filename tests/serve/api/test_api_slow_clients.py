"""Clients that send nothing, or next to nothing, do not keep their connections."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from service_home import Home

from weft.serve.api import app
from weft.serve.api.app import listen, make_server

POST = (
    b"POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=b\r\nContent-Length: 90000\r\n"
)


@pytest.fixture
def connect(home: Home, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bytes], socket.socket]]:
    """Opens a connection and sends the beginning of a request, to a service without much patience."""
    monkeypatch.setattr(app, "START_S", 0.2)
    monkeypatch.setattr(app, "LOOK_S", 0.05)
    with listen("127.0.0.1", 0) as sock:
        server = make_server(home.app)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
        thread.start()
        opened: list[socket.socket] = []

        def begin(data: bytes) -> socket.socket:
            opened.append(socket.create_connection(sock.getsockname(), timeout=60))
            opened[-1].sendall(data)
            return opened[-1]

        yield begin
        for one in opened:
            one.close()
        server.should_exit = True
        thread.join()


def trickle(connection: socket.socket, *, is_begun: bool) -> None:
    """A byte now and then, if `is_begun`, until the other end is gone."""
    connection.settimeout(0.05)
    while True:
        try:
            connection.sendall(b"x" * is_begun)
            if not connection.recv(1000):
                return
        except TimeoutError:
            time.sleep(0.02)
        except OSError:
            return


@pytest.mark.parametrize(
    "begun",
    [
        b"",
        b"GET /healthz HTTP/1.1\r\nHost: x\r\nX-",
        POST,
        POST + b"\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\nGET /",
    ],
    ids=["nothing", "headers", "more headers", "body", "second request"],
)
def test_connection_when_its_client_is_slow_then_it_is_closed(connect: Callable[[bytes], socket.socket], begun: bytes):
    trickle(connect(begun), is_begun=bool(begun))


def test_connection_when_its_request_comes_steadily_or_is_long_in_the_making_then_it_stays(
    connect: Callable[[bytes], socket.socket], home: Home, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(app, "LEAST_BYTES_PER_S", 10)
    body = json.dumps({"model": "tiny", "training_file": "file-none"}).encode()
    head = f"Host: x\r\nAuthorization: Bearer {home.keys['acme']}\r\nContent-Type: application/json\r\n"
    connection = connect(f"POST /v1/fine_tuning/jobs HTTP/1.1\r\n{head}Content-Length: {len(body)}\r\n\r\n".encode())
    for part in range(0, len(body), 6):
        time.sleep(0.04)
        connection.sendall(body[part : part + 6])
    assert b"file_not_found" in connection.recv(10_000)
