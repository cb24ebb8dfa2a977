"""Where the replicas of a run are to be, and what opens them; no torch, so that ranks start before it is imported."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from weft.errors import ConfigError
from weft.gpu_choice import VISIBLE, choose_gpus, number_or_auto, visible_gpus
from weft.parallel.replicas.joined_ranks import JoinedRanks
from weft.parallel.replicas.messages import RankOrder
from weft.parallel.replicas.rank_group import RankGroup
from weft.parallel.replicas.rank_link import Ranks
from weft.parallel.replicas.rank_listener import KEY_VARIABLE, address_of
from weft.parallel.replicas.rank_pool import RankPool
from weft.spec import BackboneSpec, JobSpec, RunSpec

if TYPE_CHECKING:
    from weft.parallel.stages.load_stages import StageLayout


@dataclass(frozen=True)
class ReplicaHosts:
    """Where the replicas of a run are."""

    number: int
    open_ranks: Callable[[RankOrder], Ranks]
    """Makes what starts, or lets in, and hears the ranks."""
    manner: str = "each in a process of its own"
    """How they are there, for whoever reads along."""
    invitation: str = ""
    """How somebody else has to start them."""

    def start(self, order: RankOrder) -> RankGroup:
        """Starts the ranks, which load while the controller does other things."""
        return RankGroup(self.open_ranks(order), self.number)


def local_hosts(replicas: str | None, devices: str | None, backbone: BackboneSpec) -> ReplicaHosts | None:
    """On this machine; None where one replica in the controller's own process is all that is asked for."""
    variables = rank_variables(replicas, devices, backbone)
    if len(variables) == 1 and devices is None:
        return None
    return ReplicaHosts(len(variables), lambda order: RankPool(order, variables))


def layout_places(divided: Sequence[StageLayout | None], gpus: Sequence[str | None]) -> ReplicaHosts:
    """On this machine, each divided as it says; `gpus`: the one that the process of a whole replica sees."""
    variables = [{} if gpu is None else {VISIBLE: gpu} for gpu in gpus]
    return ReplicaHosts(len(divided), lambda order: RankPool(replace(order, layouts=divided), variables))


def joined_hosts(listen: str, replicas: str | None) -> ReplicaHosts:
    """Wherever somebody starts a `weft rank` that connects to this address."""
    number = None if replicas is None else number_or_auto(replicas, "--replicas", least=1)
    if number is None:
        raise ConfigError("needs --replicas with the number of ranks that will join.", where="--listen")
    address = address_of(listen, "--listen")
    if isinstance(address, str):
        raise ConfigError(f"got {listen!r}; accepted is HOST:PORT.", where="--listen")
    key = os.environ.get(KEY_VARIABLE)
    # Other machines know this one by its name, where all its addresses are listened on.
    host = socket.getfqdn() if address[0] in ("0.0.0.0", "::") else address[0]
    command = f"weft rank --connect {host}:{address[1]}"
    if key is None:
        key = secrets.token_hex(16)
        command = f"{KEY_VARIABLE}={key} {command}"
    return ReplicaHosts(
        number,
        lambda order: JoinedRanks(order, address, key),
        manner="on the machines where they were started",
        invitation=f"start {number} of them with: {command}",
    )


def rank_variables(replicas: str | None, devices: str | None, backbone: BackboneSpec) -> list[dict[str, str]]:
    """What the environment of each rank says: which GPU is its own. ConfigError for more than there are."""
    number = None if replicas is None else number_or_auto(replicas, "--replicas", least=1)
    visible = visible_gpus()
    if backbone.device == "cpu" or (backbone.device == "auto" and not visible):
        if devices is not None:
            raise ConfigError("are for GPUs, and this run is on a CPU; use --replicas.", where="--devices")
        return [{} for _ in range(number or 1)]
    chosen = choose_gpus(devices, visible)
    number = number or len(chosen)
    if number > len(chosen):
        found = f"got {number}; there {'is' if len(chosen) == 1 else 'are'} {len(chosen)}"
        raise ConfigError(f"{found} GPU{'' if len(chosen) == 1 else 's'}.", where="--replicas")
    return [{VISIBLE: name} for name in chosen[:number]]


def rank_order(spec: RunSpec, jobs: Sequence[JobSpec], *, is_controlled: bool = False) -> RankOrder:
    """How every rank of a run sets itself up; `jobs` are those to come, or some of each kind.

    `is_controlled`: what they tell may be decided upon before they go on, as in a sweep.
    """
    return RankOrder(
        backbone=spec.backbone,
        capacity=spec.capacity,
        longest=max(job.max_length for job in jobs),
        planner=spec.planner,
        adapters=tuple(job.adapter for job in jobs),
        have_any_order=any(job.gradient_sum == "any_order" for job in jobs),
        max_jobs=spec.max_jobs,
        memory_limit=spec.memory_limit,
        is_controlled=is_controlled,
        tenant_weights=dict(spec.tenant_weights),
    )
