"""Many clients of a service in one cheap process: kept-alive connections, plain HTTP, a clock around every request.

They share the machine with what they measure, so they must take next to nothing: sockets and one `select`, and requests
that are made beforehand. Run as a module, it reads a plan from standard input and prints what it measured:

    with `every_s`   every connection requests its paths in turn, one request in that time, until `for_s` is over
    without          every connection requests each of its paths once, as fast as they are answered

It prints the milliseconds of every request by path; any answer but a 200 ends the process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import heapq
import json
import selectors
import socket
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Query:
    """One request."""

    kind: str
    """What it is counted as."""
    path: str
    key: str
    body: str | None = None
    """JSON to post; without it the request is a GET."""

    def as_bytes(self) -> bytes:
        """The whole request."""
        data = b"" if self.body is None else self.body.encode()
        head = f"{'GET' if self.body is None else 'POST'} {self.path} HTTP/1.1\r\nhost: localhost\r\n"
        head += f"authorization: Bearer {self.key}\r\ncontent-type: application/json\r\n"
        return f"{head}content-length: {len(data)}\r\n\r\n".encode() + data


@dataclass(frozen=True)
class Plan:
    """What the clients do."""

    port: int
    connections: tuple[tuple[Query, ...], ...]
    """The requests of each."""
    every_s: float | None = None
    """Time between two requests of a connection; None is as fast as they are answered, each once."""
    for_s: float = 0.0


@dataclass(frozen=True)
class Answers:
    """What the clients measured."""

    milliseconds: dict[str, list[float]]
    bodies: list[Any]
    """Of requests that posted something."""
    cpu_s: float = 0.0
    """Processor time the clients took themselves."""


class Connection:
    """One kept-alive connection; its requests come round and round."""

    def __init__(self, port: int, queries: tuple[Query, ...]) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._queries, self._requests = queries, [query.as_bytes() for query in queries]
        self.num_sent = 0
        self._began = 0.0
        self._parts: list[bytes] = []
        self._missing: int | None = None

    @property
    def current(self) -> Query:
        """What the last request was."""
        return self._queries[(self.num_sent - 1) % len(self._queries)]

    def send(self) -> None:
        """Sends the next request."""
        request = self._requests[self.num_sent % len(self._requests)]
        self.num_sent += 1
        self._parts, self._missing = [], None
        self._began = time.perf_counter()
        self.socket.sendall(request)

    def receive(self) -> float | None:
        """Takes what has come: the milliseconds of the request once its answer is whole, else None."""
        data = self.socket.recv(1 << 18)
        if not data:
            sys.exit(f"{self.current.path} was not answered: the connection was closed")
        self._parts.append(data)
        if self._missing is None:
            head, end, body = b"".join(self._parts).partition(b"\r\n\r\n")
            if not end:
                return None
            self._parts = [body]
            self._missing = _length(head) - len(body)
            if b" 200 " not in head[:16]:
                sys.exit(f"{self.current.path} was answered with {head.decode()[:200]} {body.decode()[:500]}")
        else:
            self._missing -= len(data)
        return (time.perf_counter() - self._began) * 1000 if self._missing == 0 else None

    @property
    def body(self) -> bytes:
        """Of the last answer."""
        return b"".join(self._parts)


def follow(plan: Plan) -> Answers:
    """Carries out the plan."""
    answers = Answers(defaultdict(list), [])
    connections = [Connection(plan.port, queries) for queries in plan.connections]
    started = time.perf_counter()
    until = started + plan.for_s
    every_s = plan.every_s or 0.0
    # When each sends its next request; spread evenly, so that they do not all come at once.
    due = [(started + every_s * position / len(connections), position) for position in range(len(connections))]
    num_waiting = 0
    with contextlib.ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        for position, connection in enumerate(connections):
            selector.register(stack.enter_context(connection.socket), selectors.EVENT_READ, position)
        while due or num_waiting:
            at = time.perf_counter()
            while due and due[0][0] <= at:
                connections[heapq.heappop(due)[1]].send()
                num_waiting += 1
            for ready, _ in selector.select(max(0.0, due[0][0] - at) if due else None):
                connection = connections[ready.data]
                took = connection.receive()
                if took is None:
                    continue
                num_waiting -= 1
                answers.milliseconds[connection.current.kind].append(took)
                if connection.current.body is not None:
                    answers.bodies.append(json.loads(connection.body))
                again = started + every_s * (ready.data / len(connections) + connection.num_sent)
                if again < until if plan.every_s else connection.num_sent < len(plan.connections[ready.data]):
                    heapq.heappush(due, (again, ready.data))
    return answers


def _length(head: bytes) -> int:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line[15:])
    sys.exit(f"an answer has no content-length: {head.decode()[:200]}")


def read_plan(text: str) -> Plan:
    """A plan as `write_plan` wrote it."""
    found: Mapping[str, Any] = json.loads(text)
    connections = tuple(tuple(Query(**query) for query in queries) for queries in found["connections"])
    return Plan(**{**found, "connections": connections})


def write_plan(plan: Plan) -> str:
    """A plan as JSON."""
    return json.dumps(dataclasses.asdict(plan))


def main() -> None:
    """Reads a plan and prints the answers."""
    began = time.process_time()
    answers = follow(read_plan(sys.stdin.read()))
    print(json.dumps({**vars(answers), "cpu_s": time.process_time() - began}))


if __name__ == "__main__":
    main()
