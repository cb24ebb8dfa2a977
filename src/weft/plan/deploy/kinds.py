"""The kinds of replicas that a pool of alike GPUs can hold, with their time and memory by the cost models.

The memory model decides how many tokens a layout holds: what the fullest stage has left beside weights, adapters and
working space, for as many chunks in flight as its position in the pipeline needs. Chunks are no larger than what fills
a GPU or holds the longest sample. Replicas take at most two machines, or twice the GPUs that hold the longest sample.
Tensor parallelism uses the links within a machine, or the network where it spans machines.

Layouts considered: a replica fits into a machine or takes whole machines, so that no odd GPUs are left; tensor-parallel
degrees are powers of two, and a layout's GPUs divide those of a machine or are a multiple of them. On one machine of
few GPUs any number is allowed, because another replica can use the rest.

A kind is left out if another with as many GPUs and no more stages is at least as fast for every bucket. Replacing it
makes no plan slower, so the best plan stays. LobRA keeps a kind only if it is the fastest of its size for some bucket;
that relies on all kinds being ordered alike at every length.

Seconds of a replica are fitted from a cost model or from a profile (LobRA's appendix D): the model prices padded
batches of many sizes and lengths, and t(b, s) is fitted to them by `cost/fit.py`; a `ProfiledCost` makes it a fit of
measurements. The slowest stage counts, with the transfers to the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from weft.errors import ConfigError, PlanError, size
from weft.plan.cost.analytic import AnalyticCost, BackboneSetup
from weft.plan.cost.fit import PaddedBatch, fit_padded
from weft.plan.cost.hardware import Hardware, find_hardware
from weft.plan.cost.profile import Profile, ProfiledCost, check_profile
from weft.plan.cost.shape import GPU_CAPACITY, ModelShape
from weft.plan.cost.types import CostModel, slot_seconds
from weft.plan.deploy.buckets import GRAIN, Buckets, ReplicaTime
from weft.plan.deploy.types import DeployJob, ReplicaKind
from weft.plan.layout import ReplicaLayout
from weft.spec.cluster import ClusterSpec, MachineSpec

FEW = 8
"""GPUs of a single machine up to which replicas may have any size; beyond, there are too many layouts."""


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
    """The kinds that no other makes superfluous; of equals the first stays."""
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
    """A replica of the layout with chunks of up to `most_tokens`; `scale` multiplies the seconds of `cost`."""
    passes = num_layers / layout.stages
    batches = []
    for length in [*(length for length in PROBED_LENGTHS if length < most_tokens), most_tokens]:
        most = most_tokens // length
        for num_samples in sorted({1, 2, -(-most // 8), -(-most // 2), most}):
            if num_samples <= most:
                seconds = scale * chunk_s(cost, layout, num_samples, length)
                batches.append(PaddedBatch(num_samples, length, passes, seconds))
    return ReplicaTime(layout, most_tokens, fit_padded(batches), num_layers, is_packed)


def chunk_s(cost: CostModel, layout: ReplicaLayout, size: int, length: int) -> float:
    """Seconds of one padded chunk, forward and backward, on the slowest stage."""
    return slot_seconds(cost, layout.stages, [length] * size)


MIN_TOKENS = 512


@dataclass(frozen=True)
class GpuPool:
    name: str
    hardware: Hardware
    """Rates of one GPU; the link is that between GPUs of one machine."""
    gpus_per_machine: int
    num_machines: int
    network_rate: float
    """Bytes per second from one machine to another, over all its cards."""

    @property
    def num_gpus(self) -> int:
        return self.gpus_per_machine * self.num_machines


def kinds_on(
    pool: GpuPool, setup: BackboneSetup, longest: int, *, profile: Profile | None = None, is_packed: bool = True
) -> list[ReplicaKind]:
    """Every layout that fits, small ones first; a profile of one GPU replaces the hardware table."""
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
    """All layouts on a pool, whether they fit or not, small ones first."""
    return possible_layouts(pool.num_gpus, pool.gpus_per_machine, shape.num_layers, shape.num_heads)


def replica_cost(pool: GpuPool, setup: BackboneSetup, layout: ReplicaLayout) -> AnalyticCost:
    """The cost model of a layout, over the links that its tensor parallelism uses."""
    is_within = layout.tensor <= pool.gpus_per_machine
    rate = pool.hardware.link_rate if is_within else min(pool.hardware.link_rate, pool.network_rate)
    return setup.cost(replace(pool.hardware, link_rate=rate), layout.stages, layout.tensor)


def most_tokens(cost: AnalyticCost, ranks: tuple[int, ...]) -> int:
    """Tokens of the largest chunk that fits on every stage; 0 if the weights alone do not fit."""
    memory, last = cost.memory, cost.num_stages - 1
    return min(
        memory.most_rows(cost.hardware.memory_bytes, ranks, GRAIN, stage, num_held=cost.num_stages - stage)
        for stage in {0, last}
    )


GIB, GB = 2**30, 1e9


def read_pools(spec: ClusterSpec, path: Path) -> list[GpuPool]:
    """The machines with their rates; several entries of one GPU are numbered."""
    names = [machine.gpu for machine in spec.machines]
    pools = []
    for index, machine in enumerate(spec.machines):
        name = machine.gpu if names.count(machine.gpu) == 1 else f"{machine.gpu} ({index + 1})"
        try:
            pools.append(_pool(machine, name))
        except ConfigError as error:
            raise error.at(f"{path}: machines.{index}.gpu") from None
    return pools


def _pool(machine: MachineSpec, name: str) -> GpuPool:
    table = find_hardware(machine.gpu)
    network = table.network_rate * machine.gpus if machine.network_gb_s is None else machine.network_gb_s * GB
    hardware = replace(
        table,
        memory_bytes=table.memory_bytes if machine.memory_gib is None else int(machine.memory_gib * GIB),
        link_rate=table.link_rate if machine.link_gb_s is None else machine.link_gb_s * GB,
    )
    return GpuPool(name, hardware, machine.gpus, machine.count, network)


def measured_kind(known: Profile, setup: BackboneSetup, pools: Sequence[GpuPool], path: Path | None) -> str:
    """The GPU that a profile is of, which must be in the cluster."""
    check_profile(known, setup.shape, setup.quantize, setup.recompute, f"--profile {path}")
    kind = find_hardware(known.setup.device).name
    if kind not in {pool.hardware.name for pool in pools}:
        names = ", ".join(dict.fromkeys(pool.hardware.name for pool in pools))
        raise ConfigError(f"is of {known.setup.device}; the cluster has {names}.", where=f"--profile {path}")
    return kind


def replica_kinds(
    mode: str,
    setup: BackboneSetup,
    pools: Sequence[GpuPool],
    jobs: Sequence[DeployJob],
    profiles: Mapping[str, Profile],
    path: Path,
    *,
    may_share: Callable[[int], bool] = lambda _: True,
) -> list[ReplicaKind]:
    """Every kind of replica; refuses jobs that fit nowhere, with the arithmetic. `may_share`: whether so many devices
    may share every layer."""
    longest = max(jobs, key=lambda job: job.lengths.longest)
    found = [
        kind
        for pool in pools
        for kind in kinds_on(
            pool,
            setup,
            longest.lengths.longest,
            profile=profiles.get(pool.hardware.name),
            is_packed=mode == "packed",
        )
        if kind.layout.tensor == 1 or may_share(kind.layout.tensor)
    ]
    if not found:
        raise PlanError(
            _why_no_room(setup, max(pools, key=lambda pool: pool.num_gpus * pool.hardware.memory_bytes)),
            where=f"{path}: base_model {setup.shape.name}",
        )
    largest = max(found, key=lambda kind: kind.model.most_tokens)
    if longest.lengths.longest > largest.model.most_tokens:
        pool = next(pool for pool in pools if pool.name == largest.pool)
        raise PlanError(_why_too_long(setup, pool, largest, longest), where=f"{path}: job {longest.name}")
    return found


def _why_no_room(setup: BackboneSetup, pool: GpuPool) -> str:
    def needs(layout: ReplicaLayout) -> int:
        memory = replica_cost(pool, setup, layout).memory
        return max(
            memory.total_bytes(MIN_TOKENS, setup.ranks, stage=stage, num_held=layout.stages - stage)
            for stage in {0, layout.stages - 1}
        )

    best = min(layouts_on(pool, setup.shape), key=needs)
    weights = replica_cost(pool, setup, best).memory.weight_bytes()
    return (
        f"fits on no layout of {pool.num_gpus} {pool.name}: with {best} each GPU needs {size(needs(best))} "
        f"({size(weights)} of weights, the rest for adapters and a chunk of {MIN_TOKENS} tokens) "
        f"and has {size(pool.hardware.memory_bytes)}; use more or larger GPUs, or quantize."
    )


def _why_too_long(setup: BackboneSetup, pool: GpuPool, largest: ReplicaKind, job: DeployJob) -> str:
    memory = replica_cost(pool, setup, largest.layout).memory
    held = largest.layout.stages
    fixed = memory.total_bytes(0, setup.ranks, num_held=held)
    token = (memory.total_bytes(1024, setup.ranks, num_held=held) - fixed) / 1024
    return (
        f"its longest sample has {job.lengths.longest:,} tokens; the largest replica, {largest.layout} on {pool.name}, "
        f"holds {largest.model.most_tokens:,}: of {size(pool.hardware.memory_bytes)} a GPU {size(fixed)} "
        f"are taken, and a token takes {token / 2**20:,.2f} MiB; cut the samples, or use more GPUs or recompute."
    )


def time_source(spec: ClusterSpec, measured: Sequence[str]) -> str:
    """The origin of the seconds, as a phrase."""
    links = " and ".join(dict.fromkeys(machine.links for machine in spec.machines))
    times = "".join(f"a profile of {name} and " for name in measured) + "the hardware table"
    return f"from {times}, links {links}"
