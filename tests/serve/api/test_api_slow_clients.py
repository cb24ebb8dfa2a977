"""Clients that send nothing, or read nothing, do not keep their connections; those that send too much get an answer."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import uvicorn
from service_home import Home, chat_lines

from weft.serve import connections
from weft.serve.api.app import listen, make_server

POST = (
    b"POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=b\r\nContent-Length: 90000\r\n"
)


@pytest.fixture
def sock() -> Iterator[socket.socket]:
    with listen("127.0.0.1", 0) as opened:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        yield opened


@pytest.fixture
def server(home: Home, sock: socket.socket, monkeypatch: pytest.MonkeyPatch) -> Iterator[uvicorn.Server]:
    """A service without much patience."""
    monkeypatch.setattr(connections, "START_S", 0.2)
    monkeypatch.setattr(connections, "LOOK_S", 0.05)
    running = make_server(home.app)
    thread = threading.Thread(target=running.run, kwargs={"sockets": [sock]})
    thread.start()
    yield running
    running.should_exit = True
    thread.join()


@pytest.fixture
def connect(server: uvicorn.Server, sock: socket.socket) -> Iterator[Callable[[bytes], socket.socket]]:
    """Opens a connection and sends the beginning of a request."""
    with contextlib.ExitStack() as opened:

        def begin(data: bytes) -> socket.socket:
            connection = opened.enter_context(socket.socket())
            connection.settimeout(60)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(sock.getsockname())
            connection.sendall(data)
            return connection

        yield begin


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
    monkeypatch.setattr(connections, "LEAST_BYTES_PER_S", 10)
    body = json.dumps({"model": "tiny", "training_file": "file-none"}).encode()
    head = f"Host: x\r\nAuthorization: Bearer {home.keys['acme']}\r\nContent-Type: application/json\r\n"
    connection = connect(f"POST /v1/fine_tuning/jobs HTTP/1.1\r\n{head}Content-Length: {len(body)}\r\n\r\n".encode())
    for part in range(0, len(body), 6):
        time.sleep(0.04)
        connection.sendall(body[part : part + 6])
    assert b"file_not_found" in connection.recv(10_000)


def read_all(connection: socket.socket, pause_s: float = 0.0) -> bytes:
    received = b""
    while piece := connection.recv(8192):
        received += piece
        time.sleep(pause_s)
    return received


@pytest.mark.parametrize("path", ["/v1/fine_tuning/jobs", "/v1/nothing"])
def test_request_when_it_is_answered_before_its_end_and_closes_then_the_answer_arrives(
    connect: Callable[[bytes], socket.socket], home: Home, path: str
):
    size = 32 * 2**20
    head = (
        f"Host: x\r\nAuthorization: Bearer {home.keys['acme']}\r\nConnection: close\r\nContent-Length: {size}\r\n\r\n"
    )
    connection = connect(f"POST {path} HTTP/1.1\r\n{head}".encode())
    for _ in range(size // 2**20):
        connection.sendall(bytes(2**20))
    assert (b" 413 " if "jobs" in path else b" 404 ") in read_all(connection)


def request_file(connect: Callable[[bytes], socket.socket], home: Home) -> socket.socket:
    """Requests more bytes than the buffers of both sides hold."""
    file = home.upload(data=chat_lines(1000))
    head = f"Host: x\r\nAuthorization: Bearer {home.keys['acme']}\r\nConnection: close\r\n\r\n"
    return connect(f"GET /v1/files/{file}/content HTTP/1.1\r\n{head}".encode())


def test_answer_when_its_client_does_not_read_it_then_the_connection_is_closed(
    connect: Callable[[bytes], socket.socket], home: Home, server: uvicorn.Server, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(connections, "LEAST_BYTES_PER_S", 10**6)
    assert request_file(connect, home).recv(100)
    deadline = time.monotonic() + 60
    while server.server_state.connections:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_answer_when_its_client_reads_slowly_but_steadily_then_all_of_it_arrives(
    connect: Callable[[bytes], socket.socket], home: Home
):
    assert read_all(request_file(connect, home), pause_s=0.05).endswith(chat_lines(1000))
