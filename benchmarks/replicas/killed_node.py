"""A Ray cluster of two nodes on this machine, one of which can be lost."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from weft.parallel.ray.connect import AUTO, need_ray
from weft.parallel.ray.load import find_places
from weft.parallel.replicas.messages import RankOrder
from weft.parallel.replicas.rank_link import Ranks
from weft.spec import BackboneSpec

NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
"""Room for one replica: each has a node of its own."""


def has_ray() -> bool:
    """Whether Ray is installed."""
    return importlib.util.find_spec("ray") is not None


class NodeCluster:
    """Two nodes, each made of processes of its own."""

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster
        self._spare = cluster.add_node(**NODE)

    @classmethod
    @contextmanager
    def opened(cls) -> Iterator[NodeCluster]:
        """A cluster that this process is connected to, and that goes afterwards."""
        ray = need_ray()
        from ray.cluster_utils import Cluster

        cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
        try:
            nodes = cls(cluster)
            ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR", configure_logging=False)
            yield nodes
        finally:
            ray.shutdown()
            cluster.shutdown()

    def open_ranks(self, order: RankOrder) -> Ranks:
        """Two ranks as actors."""
        return find_places(AUTO, 2, BackboneSpec(base_model="tiny", device="cpu")).open_ranks(order)

    def lose_one(self) -> None:
        """Kills all processes of the node that this process is not on."""
        self._cluster.remove_node(self._spare, allow_graceful=False)
