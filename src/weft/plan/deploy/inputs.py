"""What a deployment is planned from: the machines of a cluster file, and the kinds of replicas that they can hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from weft.errors import ConfigError, PlanError
from weft.plan.cost.analytic import BackboneSetup
from weft.plan.cost.hardware import find_hardware
from weft.plan.cost.profile import Profile
from weft.plan.cost.profiled import check_profile
from weft.plan.deploy.kinds import MIN_TOKENS, GpuPool, kinds_on, layouts_on, replica_cost
from weft.plan.deploy.types import ReplicaKind
from weft.plan.deploy.workload import DeployJob
from weft.plan.layout import ReplicaLayout
from weft.spec.cluster import ClusterSpec, MachineSpec
from weft.wording import size

GIB, GB = 2**30, 1e9


def read_pools(spec: ClusterSpec, path: Path) -> list[GpuPool]:
    """The machines with their rates; machines of one kind are told apart by their place."""
    names = [machine.gpu for machine in spec.machines]
    pools = []
    for place, machine in enumerate(spec.machines):
        name = machine.gpu if names.count(machine.gpu) == 1 else f"{machine.gpu} ({place + 1})"
        try:
            pools.append(_pool(machine, name))
        except ConfigError as error:
            raise error.at(f"{path}: machines.{place}.gpu") from None
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
    """The kind of GPU that a profile is of, which must be in the cluster."""
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
    is_executed: bool = False,
) -> list[ReplicaKind]:
    """Every kind of replica, or those that can be trained; refuses what fits nowhere, with the arithmetic."""
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
        # Products are not divided over GPUs yet.
        if not is_executed or kind.layout.tensor == 1
    ]
    if not found:
        raise PlanError(_why_no_room(setup, max(pools, key=_bytes_of)), where=f"{path}: base_model {setup.shape.name}")
    largest = max(found, key=lambda kind: kind.model.most_tokens)
    if longest.lengths.longest > largest.model.most_tokens:
        pool = next(pool for pool in pools if pool.name == largest.pool)
        raise PlanError(_why_too_long(setup, pool, largest, longest), where=f"{path}: job {longest.name}")
    return found


def _bytes_of(pool: GpuPool) -> int:
    return pool.num_gpus * pool.hardware.memory_bytes


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


def told_source(spec: ClusterSpec, measured: Sequence[str]) -> str:
    """Where the seconds come from, in words."""
    links = " and ".join(dict.fromkeys(machine.links for machine in spec.machines))
    times = "".join(f"a profile of {name} and " for name in measured) + "the hardware table"
    return f"from {times}, links {links}"
