"""/v1/workers: an operator sees the machines, drains a worker and sends it away."""

from __future__ import annotations

from migrated import audited
from service_home import Home

from weft.serve.db.workers import put_worker


def put(home: Home, worker: str) -> None:
    info = {"device_name": "NVIDIA H200", "memory_bytes": 7, "memory_total_bytes": 9, "max_length": 8192}
    with home.database.begin() as tx:
        put_worker(tx, worker, base_model="tiny", address="http://x", token="secret", info=info, machine="loom-1")


def test_workers_when_listed_and_drained_then_their_state_follows_and_the_audit_knows(home: Home):
    for worker in ("worker-aaaaaa", "worker-bbbbbb"):
        put(home, worker)
    (first, _) = home.call("GET", "/v1/workers").json()["data"]
    assert (first["id"], first["machine"], first["device"], first["state"]) == (
        "worker-aaaaaa", "loom-1", "NVIDIA H200", "alive"
    )  # fmt: skip
    assert "secret" not in str(first) and "http://x" not in str(first)

    def steer(target: str, wish: str) -> list[str]:
        return [row["state"] for row in home.call("POST", f"/v1/workers/{target}/{wish}").json()["data"]]

    assert steer("loom-1", "drain") == ["drained", "drained"]
    assert steer("worker-aaaaaa", "undrain") == ["alive"]
    assert steer("bbbbbb", "remove") == ["leaving"]
    with home.database.read() as tx:
        noted = [(row["action"], row["object"]) for row in audited(tx, "acme")]
    assert ("worker.drain", "loom-1") in noted and ("worker.remove", "bbbbbb") in noted


def test_worker_when_there_is_none_of_that_name_then_404_names_those_there_are(home: Home):
    put(home, "worker-aaaaaa")
    answer = home.call("POST", "/v1/workers/loom-7/drain")
    assert answer.status_code == 404
    message = answer.json()["error"]["message"]
    assert message == "there is no worker or machine 'loom-7'; there are loom-1, worker-aaaaaa."
