"""Clients send the requests of a plan at its times, and time every answer."""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Iterator

import pytest

from benchmarks.service.clients import Plan, Query, follow, read_plan, write_plan


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers after a while, in two parts."""

    protocol_version = "HTTP/1.1"
    wait_s = 0.0
    status = 200
    received: list[tuple[float, str, str, bytes]]

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.received.append((time.perf_counter(), self.path, self.headers["authorization"], body))
        time.sleep(self.wait_s)
        answer = json.dumps({"path": self.path, "long": "x" * 300_000}).encode()
        self.send_response(self.status)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer[:1000])
        self.wfile.flush()
        self.wfile.write(answer[1000:])

    do_POST = do_GET

    def log_message(self, format: str, *arguments: object) -> None:
        pass


class Server(http.server.ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """A client that has seen enough hangs up."""


@pytest.fixture
def server() -> Iterator[tuple[int, type[Handler]]]:
    kind = type("Fresh", (Handler,), {"received": []})
    with Server(("127.0.0.1", 0), kind) as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.01,))
        thread.start()
        yield made.server_port, kind
        made.shutdown()
        thread.join()


def test_clients_when_polling_then_each_query_is_sent_in_turn_once_per_interval(server):
    port, handler = server
    handler.wait_s = 0.03
    queries = (Query("one", "/one", "key"), Query("all", "/all", "key"))
    plan = read_plan(write_plan(Plan(port, (queries, queries[::-1]), every_s=0.2, for_s=0.75)))
    answers = follow(plan)
    assert {kind: len(times) for kind, times in answers.milliseconds.items()} == {"one": 4, "all": 4}
    assert all(ms >= 30 for times in answers.milliseconds.values() for ms in times)
    times = sorted(at for at, path, key, _ in handler.received if path == "/one" and key == "Bearer key")
    assert len(times) == 4 and times[-1] - times[0] >= 0.45
    assert answers.bodies == []


def test_clients_when_submitting_then_send_every_body_once_and_keep_the_answers(server):
    port, handler = server
    queries = tuple(Query("submit", f"/{number}", "key", json.dumps({"number": number})) for number in range(5))
    answers = follow(Plan(port, (queries[:3], queries[3:])))
    assert sorted(answer["path"] for answer in answers.bodies) == [f"/{number}" for number in range(5)]
    assert sorted(json.loads(body)["number"] for *_, body in handler.received) == list(range(5))
    assert len(answers.milliseconds["submit"]) == 5


def test_clients_when_an_answer_is_an_error_then_end_with_it(server):
    port, handler = server
    handler.status = 503
    with pytest.raises(SystemExit, match=r"/one was answered with HTTP/1\.1 503"):
        follow(Plan(port, ((Query("one", "/one", "key"),),)))
