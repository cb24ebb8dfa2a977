"""What `weft plan deploy` plans with: the machines, jobs and backbone of a cluster file and a jobs file."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from weft.errors import ConfigError, PlanError
from weft.wording import size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from weft.plan.cost.analytic import BackboneSetup
    from weft.plan.cost.profile import Profile
    from weft.plan.cost.shape import ModelShape
    from weft.plan.deploy import ReplicaKind
    from weft.plan.deploy.kinds import GpuPool
    from weft.plan.deploy.workload import DeployJob
    from weft.plan.layout import ReplicaLayout
    from weft.spec import RunSpec
    from weft.spec.cluster import ClusterSpec, MachineSpec

GIB, GB = 2**30, 1e9


@dataclass(frozen=True)
class PlannedRun:
    """Which jobs a cluster is planned for, and the backbone they train on."""

    base_model: str
    quantize: str
    recompute: str
    jobs_file: Path | None
    """None: jobs are known by their lengths only."""

    @classmethod
    def of(cls, spec: ClusterSpec, path: Path, jobs_file: Path | None) -> PlannedRun:
        """What a cluster file says, and for the rest the jobs file: that of `--jobs`, or the one it names."""
        if jobs_file is None and spec.jobs_file is not None:
            jobs_file = path.parent / spec.jobs_file
        if jobs_file is not None:
            from weft.spec import load_run

            run = load_run(jobs_file)
            base_model, quantize, recompute = run.base_model, run.quantize, run.recompute
        elif not spec.jobs:
            raise ConfigError(
                "there are no jobs to plan for; name a jobs file by --jobs, or write jobs.", where=f"{path}: jobs"
            )
        elif spec.base_model is None:
            raise ConfigError("is missing; jobs without a jobs file do not say it.", where=f"{path}: base_model")
        else:
            base_model, quantize, recompute = spec.base_model, "none", "none"
        return cls(spec.base_model or base_model, spec.quantize or quantize, spec.recompute or recompute, jobs_file)

    def to_execute(self, spec: ClusterSpec, path: Path) -> tuple[Path, RunSpec]:
        """The jobs file and its run; refuses what could not be trained from here as it is planned."""
        from weft.kernels.device import is_cpu
        from weft.model.load import choose_device
        from weft.spec import load_run

        if self.jobs_file is None:
            found = "jobs are known by their lengths only; name a jobs file by --jobs, or as jobs_file."
            raise ConfigError(found, where=f"--execute: {path}")
        run = load_run(self.jobs_file)
        for name in ("base_model", "quantize", "recompute"):
            planned, own = getattr(self, name), getattr(run, name)
            if planned != own:
                found = f"is {own} there and {planned} in {path}; leave it out of the latter."
                raise ConfigError(found, where=f"{self.jobs_file}: {name}")
        on_cpu = is_cpu(choose_device(run.backbone))
        for place, machine in enumerate(spec.machines):
            if (machine.gpu == "cpu") != on_cpu:
                here = "CPU" if on_cpu else "GPU"
                found = f"plans for {machine.gpu}, and the run would be on a {here}; name what is here."
                raise ConfigError(found, where=f"{path}: machines.{place}.gpu")
        num = sum(machine.count for machine in spec.machines)
        if num > 1:
            found = f"has {num} machines; the replicas of one run are processes of this machine, so name one."
            raise ConfigError(found, where=f"{path}: machines")
        return self.jobs_file, run

    def setup(self, ranks: tuple[int, ...]) -> BackboneSetup:
        """The backbone with adapters of these ranks."""
        from weft.plan.cost.analytic import BackboneSetup

        return BackboneSetup(_shape(self.base_model), ranks, self.quantize, self.recompute)

    def jobs(self, spec: ClusterSpec) -> tuple[list[DeployJob], tuple[int, ...]]:
        """The jobs and the ranks of their adapters."""
        from weft.plan.deploy.workload import DeployJob, LengthSpread

        if self.jobs_file is not None:
            return _read_jobs(self.jobs_file)
        jobs = [
            DeployJob(job.name, job.global_batch_size, LengthSpread(**vars(job.lengths)), job.sums == "free")
            for job in spec.jobs
        ]
        return jobs, tuple(job.r for job in spec.jobs)


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
    from weft.plan.cost.hardware import find_hardware
    from weft.plan.deploy.kinds import GpuPool

    table = find_hardware(machine.gpu)
    network = table.network_rate * machine.gpus if machine.network_gb_s is None else machine.network_gb_s * GB
    hardware = replace(
        table,
        memory_bytes=table.memory_bytes if machine.memory_gib is None else int(machine.memory_gib * GIB),
        link_rate=table.link_rate if machine.link_gb_s is None else machine.link_gb_s * GB,
    )
    return GpuPool(name, hardware, machine.gpus, machine.count, network)


def _read_jobs(path: Path) -> tuple[list[DeployJob], tuple[int, ...]]:
    """The jobs of a jobs file, with the lengths of their own samples."""
    from weft.data.load import load_job_data
    from weft.methods.registry import cost_ranks
    from weft.model.source import load_tokenizer
    from weft.plan.deploy.workload import DeployJob, KnownLengths, batch_samples
    from weft.spec import load_run

    run = load_run(path)
    tokenizer = load_tokenizer(run.base_model)
    jobs = []
    for job in run.jobs:
        data = load_job_data(job, tokenizer, path.parent).train
        lengths = tuple(int(n) for n in data.samples.lengths)
        size = batch_samples(job.batch_size, data.num_groups, len(lengths))
        jobs.append(DeployJob(job.name, size, KnownLengths(lengths), job.sums == "free"))
    return jobs, tuple(cost_ranks(job.adapter).widest for job in run.jobs)


def _shape(base_model: str) -> ModelShape:
    """The sizes of a published shape, or of a model whose configuration is there."""
    from weft.model.load import load_config
    from weft.model.source import find_source
    from weft.plan.cost.published_shapes import EMBEDDED, SHAPES
    from weft.plan.cost.shape import ModelShape

    if base_model in SHAPES and base_model != EMBEDDED:
        return ModelShape.from_config(SHAPES[base_model].config().to_dict(), base_model)
    return ModelShape.from_config(load_config(find_source(base_model)), base_model)


def measured_kind(known: Profile, setup: BackboneSetup, pools: Sequence[GpuPool], path: Path | None) -> str:
    """The kind of GPU that a profile is of, which must be in the cluster."""
    from weft.cli.plan import check_profile
    from weft.plan.cost.hardware import find_hardware

    check_profile(known, setup.shape, setup.quantize, setup.recompute, path)
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
    from weft.plan.deploy.kinds import kinds_on

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
    from weft.plan.deploy.kinds import MIN_TOKENS, layouts_on, replica_cost

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
    from weft.plan.deploy.kinds import replica_cost

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
