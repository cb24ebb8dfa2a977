"""What a run takes of a cluster follows from the nodes that are there."""

from __future__ import annotations

from typing import Any

import pytest

from weft.errors import ConfigError
from weft.parallel.ray.connect import ReplicaRequest, alive_nodes, replica_request


def node(cpus: float = 4, gpus: float = 0, kind: str | None = None, alive: bool = True) -> dict[str, Any]:
    """A node as `ray.nodes` describes it."""
    resources = {"CPU": cpus, "memory": 1e9} | ({"GPU": gpus} if gpus else {})
    resources |= {f"accelerator_type:{kind}": 1.0} if kind else {}
    return {"Alive": alive, "NodeManagerAddress": "10.0.0.1", "Resources": resources}


def request(*found: dict[str, Any], number: int | None = None, **settings: Any) -> ReplicaRequest:
    return replica_request(alive_nodes(found), number, **{"device": "auto", "gpu_type": None, **settings})


def test_request_when_auto_then_is_one_replica_on_every_gpu_of_those_alive():
    found = request(node(gpus=4, kind="H100"), node(), node(gpus=2, kind="H100"), node(gpus=8, alive=False))
    assert found == ReplicaRequest(6, {"GPU": 1, "CPU": 1, "accelerator_type:H100": 0.001})


def test_request_when_there_is_no_gpu_then_auto_is_one_replica_on_every_node():
    assert request(node(), node(), node(cpus=0)) == ReplicaRequest(2, {"CPU": 1})
    assert request(node(), node(), number=7) == ReplicaRequest(7, {"CPU": 1})


def test_request_when_the_run_is_on_cpus_then_takes_no_gpu():
    assert request(node(gpus=2), number=3, device="cpu") == ReplicaRequest(3, {"CPU": 1})


def test_request_when_a_type_is_chosen_then_counts_and_takes_only_that():
    found = request(node(gpus=4, kind="A100"), node(gpus=2, kind="H100"), gpu_type="H100")
    assert found == ReplicaRequest(2, {"GPU": 1, "CPU": 1, "accelerator_type:H100": 0.001})


@pytest.mark.parametrize(
    ("nodes", "settings", "sentence"),
    [
        ([node(gpus=1)], {"number": 2}, "--replicas: got 2; the cluster has 1 GPU."),
        ([node(cpus=2)], {"number": 3}, "--replicas: got 3; the cluster has 2 CPUs."),
        ([node(cpus=0)], {}, "--replicas: got auto; the cluster has 0 CPUs."),
        ([node()], {"device": "cuda"}, "device: got 'cuda', and the cluster has no GPU."),
        ([node()], {"gpu_type": "H100"}, "--gpu-type: got 'H100', and this run is on CPUs."),
        (
            [node(gpus=4, kind="A100"), node(gpus=2, kind="H100")],
            {"number": 1},
            "--cluster: has GPUs of several types, 4 A100, 2 H100; replicas of one run are on alike GPUs. "
            "Choose one by --gpu-type.",
        ),
        (
            [node(gpus=4, kind="A100"), node(gpus=2)],
            {},
            "--cluster: has GPUs of several types, 4 A100 and 2 of an unknown type; replicas of one run are on alike "
            "GPUs. Choose one by --gpu-type.",
        ),
        (
            [node(gpus=4, kind="A100")],
            {"gpu_type": "A10O"},
            "--gpu-type: got 'A10O'; the cluster has 4 A100. Did you mean A100?",
        ),
        (
            [node(gpus=4, kind="A100"), node(gpus=2, kind="H100")],
            {"gpu_type": "H100", "number": 3},
            "--replicas: got 3; the cluster has 2 H100 GPUs.",
        ),
    ],
)
def test_request_when_the_cluster_cannot_do_it_then_one_sentence_names_what_there_is(nodes, settings, sentence):
    with pytest.raises(ConfigError) as refused:
        request(*nodes, **settings)
    assert str(refused.value) == sentence
