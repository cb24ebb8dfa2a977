"""The kinds of replicas that a pool of alike GPUs can hold, with their time and memory by the cost models.

How many tokens a layout holds follows from the memory model: what is left of the fullest stage beside weights, adapters
and working space, with as many chunks under way as its place in the pipeline asks for. Chunks are no larger than what
fills a GPU or holds the longest sample. Replicas take at most two machines, or twice the GPUs that hold the longest
sample. Tensor parallelism goes over the links within a machine, or over the network where it needs more GPUs than a
machine has.

Layouts worth planning with: a replica fits into a machine or takes whole machines, so that replicas leave no odd GPUs;
tensor-parallel degrees are powers of two, and a layout's GPUs divide those of a machine or are a multiple of them. On a
single machine of few GPUs any number will do, because what one replica leaves another can take.

A kind is left out if another of as many GPUs and of no more stages is at least as fast for every bucket. Putting the
other one in its place makes no plan slower, so that the best plan stays. LobRA's own rule keeps a kind only if it is
the fastest of its size for some bucket; it relies on all kinds being ordered alike at every length.

Seconds of a replica are fitted from a cost model or from a profile (LobRA's appendix D). The cost model is asked for
padded batches of many sizes and lengths, and t(b, s) is fitted to the answers by `cost/padded.py`; a `ProfiledCost`
makes it a fit of what was measured. The slowest stage counts, with the transfers to the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from weft.plan.bucket import GRAIN, Buckets
from weft.plan.cost.analytic import AnalyticCost, BackboneSetup
from weft.plan.cost.hardware import Hardware
from weft.plan.cost.padded import PaddedBatch, fit_padded
from weft.plan.cost.profile import Profile
from weft.plan.cost.profiled import ProfiledCost
from weft.plan.cost.rows import GPU_CAPACITY
from weft.plan.cost.shape import ModelShape
from weft.plan.cost.types import CostModel, slot_seconds
from weft.plan.deploy.types import ReplicaKind
from weft.plan.dispatch import ReplicaTime
from weft.plan.layout import ReplicaLayout

FEW = 8
"""GPUs of a single machine up to which replicas may be of any size; beyond it there would be too many layouts."""


def possible_layouts(num_gpus: int, gpus_per_machine: int, num_layers: int, num_heads: int) -> list[ReplicaLayout]:
    """All layouts of a backbone on a cluster of alike machines, small ones first."""
    found = []
    is_small = num_gpus == gpus_per_machine <= FEW
    tensor = 1
    while tensor <= min(num_gpus, num_heads):
        for stages in range(1, min(num_layers, num_gpus // tensor) + 1):
            size = tensor * stages
            if is_small or gpus_per_machine % size == 0 or size % gpus_per_machine == 0:
                found.append(ReplicaLayout(tensor=tensor, stages=stages))
        tensor *= 2
    return sorted(found, key=lambda layout: (layout.num_devices, layout.tensor))


def without_dominated(kinds: Sequence[ReplicaKind], buckets: Buckets) -> list[ReplicaKind]:
    """The kinds that no other makes superfluous, in their order; of equals the first stays."""
    rates = [kind.model.costs(buckets).sample_s_R for kind in kinds]

    def beats(one: int, other: int) -> bool:
        a, b = kinds[one], kinds[other]
        is_alike = (a.pool, a.num_gpus) == (b.pool, b.num_gpus) and a.layout.stages <= b.layout.stages
        if not (is_alike and bool(np.all(rates[one] <= rates[other]))):
            return False
        is_equal = a.layout.stages == b.layout.stages and bool(np.all(rates[one] == rates[other]))
        return not is_equal or one < other

    chosen = [i for i in range(len(kinds)) if not any(beats(j, i) for j in range(len(kinds)) if j != i)]
    return [kinds[i] for i in chosen if np.isfinite(rates[i]).any()]


PROBED_LENGTHS = (64, 256, 1024, 4096, 16_384, 65_536)


def fit_replica(
    cost: CostModel,
    layout: ReplicaLayout,
    num_layers: int,
    most_tokens: int,
    *,
    scale: float = 1.0,
    is_packed: bool = False,
) -> ReplicaTime:
    """A replica of a layout that `cost` describes, with chunks of up to so many tokens; seconds count `scale` times."""
    passes = num_layers / layout.stages
    batches = []
    for length in [*(length for length in PROBED_LENGTHS if length < most_tokens), most_tokens]:
        most = most_tokens // length
        for size in sorted({1, 2, -(-most // 8), -(-most // 2), most}):
            if size <= most:
                batches.append(PaddedBatch(size, length, passes, scale * chunk_s(cost, layout, size, length)))
    return ReplicaTime(layout, most_tokens, fit_padded(batches), num_layers, is_packed)


def chunk_s(cost: CostModel, layout: ReplicaLayout, size: int, length: int) -> float:
    """Forward and backward of one padded chunk on the slowest stage."""
    return slot_seconds(cost, layout.stages, [length] * size)


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
