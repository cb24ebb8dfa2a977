"""Finds the room for the replicas of a run on a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.errors import ConfigError
from weft.parallel.ray.connect import LOCAL, connect
from weft.parallel.ray.resources import ReplicaRequest, replica_request
from weft.parallel.replicas.messages import RankOrder
from weft.parallel.replicas.places import ReplicaHosts
from weft.parallel.replicas.rank_link import Ranks
from weft.spec import BackboneSpec
from weft.wording import counted

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup


def find_hosts(
    address: str,
    number: int | None,
    backbone: BackboneSpec,
    *,
    gpu_type: str | None = None,
    group: PlacementGroup | None = None,
) -> ReplicaHosts:
    """Connects to a cluster and says where the replicas of a run are on it; ConfigError for more than there are.

    `number` is None for a replica on every GPU, or on every node if there is no GPU. `group` is room of the caller's
    own, with a bundle for each replica.
    """
    connection = connect(address, num_cpus=number if address == LOCAL else None)
    try:
        if group is not None:
            request = _request_within(group, number)
        else:
            request = replica_request(connection.nodes, number, device=backbone.device, gpu_type=gpu_type)
    except ConfigError:
        connection.close()
        raise

    def open_ranks(order: RankOrder) -> Ranks:
        from weft.parallel.ray.ray_ranks import RayRanks

        return RayRanks(order, request, connection, group)

    # Ray shows every rank its own GPU.
    return ReplicaHosts(
        request.number, open_ranks, f"actors on a Ray cluster of {counted(len(connection.nodes), 'node')}"
    )


def _request_within(group: PlacementGroup, number: int | None) -> ReplicaRequest:
    """A replica in each bundle of a placement group, or in its first ones."""
    bundles = group.bundle_specs
    number = len(bundles) if number is None else number
    if number > len(bundles):
        raise ConfigError(f"got {number}; the placement group has {len(bundles)} bundles.", where="replicas")
    if any(bundle != bundles[0] for bundle in bundles[:number]):
        raise ConfigError(f"its bundles differ: {bundles}; replicas take alike ones.", where="placement_group")
    return ReplicaRequest(number, bundles[0])
