"""A cluster that does not answer is named in a sentence, soon, and before anything else happens."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from weft.errors import ConfigError
from weft.parallel.ray import connect as connecting
from weft.parallel.ray.connect import connect


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The port of a server that never answers."""
    monkeypatch.setattr(connecting, "ANSWER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def website() -> Iterator[int]:
    """The port of a server that speaks something else."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            sock, _ = server.accept()
            with sock:
                sock.recv(100)
                sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        yield server.getsockname()[1]
        thread.join()


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_connect_when_nothing_listens_then_reports_it(scheme):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"{scheme}127.0.0.1:{server.getsockname()[1]}"
    with pytest.raises(ConfigError) as refused:
        connect(address)
    assert str(refused.value) == f"--cluster {address}: no Ray cluster answers there (Connection refused)."


def test_connect_when_what_listens_is_no_cluster_then_reports_it(website):
    with pytest.raises(ConfigError, match=rf"--cluster 127\.0\.0\.1:{website}: what answers there is no Ray cluster\."):
        connect(f"127.0.0.1:{website}")


def test_connect_when_what_listens_never_answers_then_does_not_wait_for_ever(silent):
    with pytest.raises(ConfigError, match="what answers there is no Ray cluster"):
        connect(f"ray://127.0.0.1:{silent}")


@pytest.mark.parametrize("address", ["nonsense", "", "ray://", "host:port", ":6379"])
def test_connect_when_the_address_is_none_then_names_which_are_accepted(address):
    with pytest.raises(ConfigError) as refused:
        connect(address)
    accepted = "accepted are local, auto, ray://HOST:PORT and HOST:PORT"
    assert str(refused.value) == f"--cluster: got {address!r}; {accepted}."


def test_connect_when_a_client_is_turned_away_then_reports_it_and_what_may_help(monkeypatch):
    ray = connecting.need_ray()

    def refuse(**_: object) -> None:
        raise ConnectionError("Initialization failure from server:\nTraceback")

    monkeypatch.setattr(ray, "init", refuse)
    monkeypatch.setattr(connecting, "_check_answer", lambda address, where: None)
    with pytest.raises(ConfigError) as refused:
        connect("ray://head:1")
    message = "no Ray cluster can be used there (Initialization failure from server)"
    assert str(refused.value) == f"--cluster ray://head:1: {message}. If it wants tokens, set RAY_AUTH_MODE=token."


def test_connect_when_a_client_server_starts_no_process_then_reports_where_the_reason_is(monkeypatch):
    """With gRPC's handlers of forks that process dies now and then, and its server takes half a minute to report it."""
    ray = connecting.need_ray()

    def refuse(**_: object) -> None:
        raise ConnectionAbortedError("Initialization failure from server:\nStarting Ray client server failed. See …")

    monkeypatch.setattr(ray, "init", refuse)
    monkeypatch.setattr(connecting, "_check_answer", lambda address, where: None)
    with pytest.raises(ConfigError, match=r"can start no process .* GRPC_ENABLE_FORK_SUPPORT=0 there may help"):
        connect("ray://head:1")


def test_connect_when_nothing_runs_here_then_auto_reports_it(monkeypatch, tmp_path):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    ray = connecting.need_ray()

    def nothing(**_: object) -> None:
        raise ConnectionError("Could not find any running Ray instance.")

    monkeypatch.setattr(ray, "init", nothing)
    with pytest.raises(ConfigError, match=r"--cluster auto: none runs on this machine, and RAY_ADDRESS names none\."):
        connect("auto")
