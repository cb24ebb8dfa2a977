"""Opens engines on replicas in stages, after everything is refused that cannot be cut."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from weft.engine.engine import Engine
from weft.engine.execute.memory import (
    COMPILING,
    USUAL_JOBS,
    USUAL_RANK,
    USUAL_STATE_BYTES,
    ExpectedJobs,
    usual_capacity,
)
from weft.engine.execute.protocol import Executor, Replica, ReplicaFacts
from weft.engine.recorder import environment_difference
from weft.errors import ConfigError, JobError, ModelError, counted
from weft.model.divided import why_not_divisible
from weft.model.model_part import ModelPart
from weft.model.resolve import ResolvedModel
from weft.model.source import load_tokenizer
from weft.parallel.stages.shares import refuse_divided, refuse_indivisible, refuse_without_kernels
from weft.parallel.stages.stage_pool import StageHosts, StageProcesses
from weft.parallel.stages.staged import StagedExecutor
from weft.parallel.stages.transport import find_gpus
from weft.plan.choose_layout import split_model
from weft.plan.cost.analytic import AnalyticCost, BackboneSetup
from weft.plan.cost.divided import GatherCost
from weft.plan.cost.hardware import DEVICES
from weft.plan.cost.memory import MemoryModel
from weft.plan.cost.shape import ModelShape, capacities, choose_capacity
from weft.plan.families import final_norm, why_one_piece
from weft.plan.layout import AUTO, DispatchRule, copies
from weft.plan.level import PlannedReplicas
from weft.plan.pipeline.build import PipelinePlanner, Schedule
from weft.plan.planner import Planner
from weft.plan.simulate.choose import FastestSpread, pipeline_planner
from weft.plan.spread import SpreadPlanner
from weft.spec import AdapterSpec, JobSpec, RunSpec
from weft.spec.run import Capacity
from weft.store.wall_clock import Activity, WallClock

WHERE = "--layout"
ANY_GPU = "a100-40"
"""Stand-in for a GPU that the table lacks: plans are only compared with each other."""
UNTRIED = "no layout has been run on several GPUs yet: compare an adapter with one device's."


@dataclass(frozen=True)
class StageLayout:
    replica_sizes: tuple[int, ...]
    schedule: Schedule | None = None
    shards: tuple[int, ...] = ()
    """Numbers of consecutive replicas that share one copy of the frozen weights; empty: none do."""
    tensor: tuple[int, ...] = ()
    """Numbers of devices that share every layer of each replica; empty: none do."""
    gpus: str | None = None
    """Numbers of GPUs, one for each device; None: the first ones."""
    planned: PlannedReplicas | None = None
    """Prediction by which the replicas were chosen; None: there was none."""
    dispatch: DispatchRule = DispatchRule.BALANCED
    is_joined: bool = False
    """True if its processes join from any machine, each with the device that it sees."""
    num_lessened: int = 0
    """Number of times that its stages have run out of memory; they take less each time."""

    @property
    def num_devices(self) -> int:
        return sum(size * degree for size, degree in zip(self.replica_sizes, self.degrees, strict=True))

    @property
    def degrees(self) -> tuple[int, ...]:
        return self.tensor or (1,) * len(self.replica_sizes)


def load_stages(
    model: ResolvedModel,
    layout: StageLayout,
    memory_limit: float | str | None = None,
    expected: ExpectedJobs | None = None,
    hosts: StageHosts | None = None,
) -> StagedExecutor:
    """Replicas whose stages are processes of this machine, or of `hosts`; `memory_limit`: of each GPU. Kernels that the
    expected jobs need are compiled meanwhile, once for all stages here: a part of a model has those of the whole."""
    replicas = [find_parts(model, *each) for each in zip(layout.replica_sizes, layout.degrees, strict=True)]
    tokenizer = load_tokenizer(model.source)
    gpus = () if layout.is_joined else find_gpus(model, layout.num_devices, layout.gpus)
    ahead = None if expected is None or layout.is_joined else expected.compile_ahead(model, layout.degrees[0])
    processes = StageProcesses(
        model.spec,
        *replicas,
        shards=layout.shards,
        tensor=layout.tensor,
        gpus=gpus,
        memory_limit=memory_limit,
        hosts=hosts,
    )
    if layout.is_joined:
        try:
            _check_alike(processes.call_all("facts"))
        except ConfigError:
            processes.close()
            raise
    return StagedExecutor(processes, tokenizer, shards=layout.shards, ahead=ahead)


def _check_alike(stages: Sequence[ReplicaFacts]) -> None:
    """ConfigError for machines with other files or devices than the first stage's."""
    here = stages[0]
    for index, facts in enumerate(stages):
        there, where = facts.environment, f"stage {index}"
        difference = environment_difference(here.environment, there, here.base_model, "stage 0", where)
        if difference is not None:
            raise difference


def stage_cost(model: ResolvedModel, num_stages: int, row_tile: int, tensor: int = 1) -> AnalyticCost:
    """Cost model of stages on this machine: enough to compare plans."""
    split = split_model(model.shape, num_stages)
    hardware = model.hardware or DEVICES[ANY_GPU]
    return BackboneSetup(model.shape).cost(hardware, num_stages, tensor, row_tile=row_tile, split=split)


def why_no_pairs(model: ResolvedModel, planner: str, layout: StageLayout) -> str | None:
    """Reason why no two microbatches run side by side on devices that share every layer; None if they may."""
    if len(layout.replica_sizes) > 1:
        return "pairs are for one replica."
    if layout.schedule is not None:
        return "the requested schedule has no pairs."
    if planner in ("greedy", "lorafusion"):
        return f"the {planner} planner makes no pairs."
    is_plain = model.spec.kernels == "reference" or model.spec.dtype == "float32"
    if is_plain and not model.is_cpu:
        # On one GPU, autograd runs backward through one graph at a time.
        return "on GPUs pairs are for the fused kernels."
    return None


def layout_notes(spec: RunSpec, model: ResolvedModel, layout: StageLayout) -> tuple[str, ...]:
    untried = () if model.is_cpu else (UNTRIED,)
    if layout.tensor:
        degrees = " and ".join(f"tensor:{degree}" for degree in sorted({*layout.tensor} - {1}))
        again = "the same again with it" + ", if nothing interrupts it" * (len({*layout.tensor}) > 1)
        found = f"{degrees} splits sums, so bits belong to this layout"
        return (f"{found}: {again}, and about {_rounding(model)} from one device's", *untried)
    gathering = [note for cost in _gather_costs(model, layout) for note in cost.notes()]
    return (*untried, *gathering, *_grouping_notes(spec, layout))


def pair_notes(spec: RunSpec, model: ResolvedModel, layout: StageLayout) -> tuple[str, ...]:
    """Notes why devices that share every layer run no pairs; empty where that is decided later."""
    alone = why_no_pairs(model, spec.planner, layout) if layout.tensor else None
    return () if alone is None else (f"every microbatch runs alone: {alone}",)


def _rounding(model: ResolvedModel) -> str:
    if model.spec.quantize == "fp8":
        return "a rounding to 8-bit floats"
    return "1e-5" if model.dtype == torch.float32 else "a rounding to bfloat16"


def _gather_costs(model: ResolvedModel, layout: StageLayout) -> list[GatherCost]:
    """Costs of gathering shared weights, one for each number of replicas and of stages that a shared copy has; empty if
    the table lacks the device."""
    sizes = layout.replica_sizes
    kinds = {(len(own), sizes[own.start]): None for own in copies(len(sizes), layout.shards) if len(own) > 1}
    if model.hardware is None:
        return []
    found = []
    for shards, num_stages in kinds:
        memory = MemoryModel(
            model.shape,
            model.spec.quantize,
            activation_bytes=model.dtype.itemsize,
            shards=shards,
            num_stages=num_stages,
            split=stage_cost(model, num_stages, row_tile=1).split,
        )
        found.append(GatherCost(memory, model.hardware))
    return found


def _grouping_notes(spec: RunSpec, layout: StageLayout) -> tuple[str, ...]:
    sizes = layout.replica_sizes
    if len(sizes) == 1 or max(sizes) == 1 or len(spec.jobs) == 1 or spec.planner == "greedy":
        return ()
    if not any(job.gradient_sum == "any_order" for job in spec.jobs):
        return ()
    return ("each replica packs its jobs together: groups are not tried with gradient_sum any_order",)


def check_layout(spec: RunSpec, model: ResolvedModel, layout: StageLayout) -> None:
    """Raises what prevents a run on such replicas, as far as is known before any weight is read."""
    sizes = layout.replica_sizes
    if spec.planner == "lorafusion" and len(sizes) > 1:
        text = "lorafusion plans one device or one replica in stages; leave it out where replicas share a plan."
        raise ConfigError(text, where="planner")
    exchanges = any(job.gradient_sum == "any_order" for job in spec.jobs)
    if max(sizes) > 1 or layout.tensor or layout.shards or exchanges:
        for size, degree in zip(sizes, layout.degrees, strict=True):
            find_parts(model, size, degree)
    if model.elsewhere is None and not layout.is_joined:
        find_gpus(model, layout.num_devices, layout.gpus)
    if layout.shards and model.source.gguf_file is not None:
        raise ConfigError("a GGUF file is read as a whole; shards are for models in safetensors files.", where=WHERE)
    for index, job in enumerate(spec.jobs):
        try:
            check_job(model, job, layout)
        except ConfigError as error:
            raise error.at(f"jobs.{index}.{error.where}") from None


def check_job(model: ResolvedModel, job: JobSpec, layout: StageLayout) -> None:
    """Raises ConfigError for a setting of the job that replicas of this layout cannot train."""
    refuse_divided(job, layout.replica_sizes)
    # On a GPU auto is only decided once the weights are loaded; kernels: reference avoids the check.
    is_auto = model.spec.kernels == "auto" and not model.is_cpu
    if is_auto or model.spec.kernels == "fused":
        refuse_without_kernels(job.adapter, "adapter.method")
    if layout.tensor:
        refuse_indivisible(job)


def find_parts(model: ResolvedModel, num_stages: int, tensor: int = 1) -> list[ModelPart]:
    """Layers of each stage; ConfigError or ModelError if the model cannot be divided into so many."""
    spec = model.spec
    if spec.kernels != "fused" and (spec.recompute != "none" or spec.offload):
        raise ConfigError("recompute and offload are for the fused kernels; set kernels=fused too.", where=WHERE)
    if final_norm(model.config) is None:
        raise ModelError(f"{why_one_piece(model.config)}.", where=model.where)
    count = model.shape.num_layers
    if num_stages > count:
        raise ConfigError(
            f"got {num_stages} stages; the model has {counted(count, 'layer')}, so use 1 to {count}.", where=WHERE
        )
    if tensor > 1:
        why = why_not_divisible(model.config, tensor, spec.quantize)
        if why is not None:
            raise ModelError(f"{why}.", where=model.where)
    return cut_layers(model.shape, num_stages)


def cut_layers(shape: ModelShape, num_stages: int) -> list[ModelPart]:
    """Parts of consecutive layers that take about the same time; the last one includes the output head."""
    parts, first = [], 0
    for size in split_model(shape, num_stages):
        parts.append(ModelPart(first, first + size, shape.num_layers))
        first += size
    return parts


RunT = TypeVar("RunT", bound=RunSpec)


def load_staged(
    spec: RunT,
    model: ResolvedModel,
    jobs: Sequence[JobSpec],
    layout: StageLayout,
    wall: WallClock | None = None,
    hosts: StageHosts | None = None,
) -> tuple[RunT, Engine, tuple[str, ...]]:
    """The engine of a run on replicas whose stages are processes, of this machine or of `hosts`; like `load_engine`."""
    wall = wall or WallClock()
    executor = load_stages(model, layout, spec.memory_limit, ExpectedJobs.of(jobs, spec.max_jobs), hosts)
    planner = stage_planner(model, spec.planner, layout, _row_tile(spec, jobs, executor))
    engine = _engine(spec, jobs, executor, planner, wall)
    notes = (
        *lessened(engine, max(job.max_length for job in jobs), layout.num_lessened),
        *layout_notes(spec, model, layout),
        *pair_notes(spec, model, layout),
        *((COMPILING,) if executor.is_compiling else ()),
    )
    return dataclasses.replace(spec, capacity=engine.limits.capacity), engine, notes


def load_for_service(
    model: ResolvedModel, layout: StageLayout, memory_limit: float | str | None, wanted: Capacity
) -> tuple[StagedExecutor, Planner, int]:
    """Replicas for jobs that are not known yet, their planner, and the tokens of a microbatch."""
    executor = load_stages(model, layout, memory_limit, USUAL_JOBS)
    capacity, *smaller = capacities(wanted, executor.facts.device_kind)
    memory = executor.memory()
    if memory is not None and smaller:
        usual = AdapterSpec(r=USUAL_RANK)
        job_bytes = (model.num_parameters(usual) or 0) * (executor.facts.weight_bytes + USUAL_STATE_BYTES)
        sizes = (capacity, *smaller)
        capacity = usual_capacity(sizes, memory, lambda size: executor.activation_bytes(size, [usual]), job_bytes)
    return executor, stage_planner(model, AUTO, layout, executor.row_tile(capacity)), capacity


def lessened(engine: Engine, longest: int, times: int) -> tuple[str, ...]:
    """Lowers the engine's use of memory `times` times and returns a note about the result; JobError if it cannot be
    lower."""
    found: str | None = ""
    for _ in range(times):
        found = engine.lessen(longest)
    if found is None:
        engine.close()
        hint = "Set recompute: full, quantize the backbone, or divide it over more devices, and go on with --resume."
        raise JobError(
            "its stages have no memory for a single microbatch of the longest sample.", where=WHERE, hint=hint
        )
    return (found,) if found else ()


def _row_tile(spec: RunSpec, jobs: Sequence[JobSpec], replica: Replica) -> int:
    longest = max(job.max_length for job in jobs)
    return replica.row_tile(choose_capacity(spec.capacity, replica.facts.device_kind, longest))


def _engine(spec: RunSpec, jobs: Sequence[JobSpec], executor: Executor, planner: Planner, wall: WallClock) -> Engine:
    wall.add_start(Activity.LOADING)
    return Engine(
        executor,
        capacity=spec.capacity,
        longest=max(job.max_length for job in jobs),
        planner=planner,
        max_jobs=spec.max_jobs,
        tenant_weights=spec.tenant_weights,
        wall=wall,
    )


def stage_planner(model: ResolvedModel, name: str, layout: StageLayout, row_tile: int) -> Planner:
    sizes = layout.replica_sizes
    if layout.schedule is not None:
        return PipelinePlanner(layout.schedule, sizes[0])
    kinds = [*zip(sizes, layout.degrees, strict=True)]
    known = {kind: stage_cost(model, kind[0], row_tile, kind[1]) for kind in kinds}
    costs = tuple(known[kind] for kind in kinds)
    if len(sizes) == 1:
        in_pairs = bool(layout.tensor) and why_no_pairs(model, name, layout) is None
        return pipeline_planner(name, costs[0], in_pairs=in_pairs)
    planner = SpreadPlanner(sizes, costs, layout.planned, layout.shards, layout.dispatch, layout.tensor)
    return planner if max(sizes) == 1 or name == "greedy" else FastestSpread(planner, row_tile)
