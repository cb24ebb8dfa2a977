"""The kinds of replicas that a pool of alike GPUs can hold, with their time and memory by the cost models.

How many tokens a layout holds follows from the memory model: what is left of the fullest stage beside weights, adapters
and working space, with as many chunks under way as its place in the pipeline asks for. Chunks are no larger than what
fills a GPU or holds the longest sample. Replicas take at most two machines, or twice the GPUs that hold the longest
sample. Tensor parallelism goes over the links within a machine, or over the network where it needs more GPUs than a
machine has.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from weft.plan.bucket import GRAIN
from weft.plan.cost.analytic import AnalyticCost, BackboneSetup
from weft.plan.cost.hardware import Hardware
from weft.plan.cost.profile import Profile
from weft.plan.cost.profiled import ProfiledCost
from weft.plan.cost.rows import GPU_CAPACITY
from weft.plan.cost.shape import ModelShape
from weft.plan.deploy.candidates import possible_layouts
from weft.plan.deploy.price import chunk_s, fit_replica
from weft.plan.deploy.types import ReplicaKind
from weft.plan.layout import ReplicaLayout

MIN_TOKENS = 512
"""A layout that holds less is left out."""


@dataclass(frozen=True)
class GpuPool:
    """Alike machines."""

    name: str
    hardware: Hardware
    """Its link is that between GPUs of one machine."""
    gpus_per_machine: int
    num_machines: int
    network_rate: float
    """Bytes per second that a machine sends to another, all its cards together."""

    @property
    def num_gpus(self) -> int:
        """GPUs of all its machines."""
        return self.gpus_per_machine * self.num_machines


def kinds_on(
    pool: GpuPool, setup: BackboneSetup, longest: int, *, profile: Profile | None = None, is_packed: bool = True
) -> list[ReplicaKind]:
    """Every layout that fits, small ones first; a profile of one GPU replaces what the hardware table says of it."""
    largest = max(GPU_CAPACITY, -(-longest // GRAIN) * GRAIN)
    found: list[ReplicaKind] = []
    enough = pool.num_gpus
    for layout in layouts_on(pool, setup.shape):
        if layout.num_devices > 2 * max(enough, pool.gpus_per_machine):
            break
        cost = replica_cost(pool, setup, layout)
        most = min(most_tokens(cost, setup.ranks), largest)
        if most < MIN_TOKENS:
            continue
        scale = 1.0
        if profile is not None:
            alone = replace(cost, tensor_parallel=1)
            measured = ProfiledCost(profile, layout.stages, cost.rank, cost.num_jobs)
            flat = ReplicaLayout(stages=layout.stages)
            scale = chunk_s(measured, flat, 1, most) / chunk_s(alone, flat, 1, most)
        model = fit_replica(cost, layout, setup.shape.num_layers, most, scale=scale, is_packed=is_packed)
        found.append(ReplicaKind(model, pool.name))
        if most >= longest:
            enough = min(enough, layout.num_devices)
    return found


def layouts_on(pool: GpuPool, shape: ModelShape) -> list[ReplicaLayout]:
    """All layouts of a backbone on a pool, whether they fit or not, small ones first."""
    return possible_layouts(pool.num_gpus, pool.gpus_per_machine, shape.num_layers, shape.num_heads)


def replica_cost(pool: GpuPool, setup: BackboneSetup, layout: ReplicaLayout) -> AnalyticCost:
    """The cost model of a layout, over the links that its tensor parallelism crosses."""
    is_within = layout.tensor <= pool.gpus_per_machine
    rate = pool.hardware.link_rate if is_within else min(pool.hardware.link_rate, pool.network_rate)
    return setup.cost(replace(pool.hardware, link_rate=rate), layout.stages, layout.tensor)


def most_tokens(cost: AnalyticCost, ranks: tuple[int, ...]) -> int:
    """Tokens of the largest chunk that fits on every stage; 0 if the weights alone do not."""
    memory, last = cost.memory, cost.num_stages - 1
    return min(
        memory.most_rows(cost.hardware.memory_bytes, ranks, GRAIN, stage, num_held=cost.num_stages - stage)
        for stage in {0, last}
    )
