"""Loads replicas in stages, after everything is refused that cannot be cut."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weft.engine.execute.memory import ExpectedJobs
from weft.errors import ConfigError, ModelError
from weft.model.model_part import ModelPart
from weft.model.resolve import ResolvedModel
from weft.model.source import load_tokenizer
from weft.model.tensor_parallel import why_not_divisible
from weft.parallel.stages.refusals import refuse_divided, refuse_indivisible, refuse_without_kernels
from weft.parallel.stages.stage_devices import find_gpus
from weft.parallel.stages.stage_pool import StageProcesses
from weft.parallel.stages.staged import StagedExecutor
from weft.plan.cost.analytic import AnalyticCost, BackboneSetup
from weft.plan.cost.gather import GatherCost
from weft.plan.cost.hardware import DEVICES
from weft.plan.cost.memory import MemoryModel
from weft.plan.cost.shape import ModelShape
from weft.plan.families.registry import FAMILIES
from weft.plan.homes import PlannedReplicas
from weft.plan.layout import copies
from weft.plan.pipeline.build import Schedule
from weft.plan.pipeline.split import split_model
from weft.spec import JobSpec, RunSpec
from weft.wording import counted

WHERE = "--layout"
ANY_GPU = "a100-40"
"""What one is taken for that the table does not have: plans are compared with each other, not with a clock."""
UNTRIED = "no layout has been run on several GPUs yet: compare an adapter with one device's."


@dataclass(frozen=True)
class StageLayout:
    """How replicas are divided, and how their stages share the work."""

    replica_sizes: tuple[int, ...]
    """Stages of each replica, or of each that shares its frozen weights with others."""
    schedule: Schedule | None = None
    """None: whatever is fastest."""
    shards: tuple[int, ...] = ()
    """How many replicas, one behind the other, share each copy of the frozen weights; empty: none do."""
    tensor: int = 1
    """Devices that share every layer of a stage."""
    gpus: str | None = None
    """Numbers of GPUs, one for each device; None: the first ones."""
    planned: PlannedReplicas | None = None
    """What the plan says of the replicas that they were chosen by; None: there was none."""

    @property
    def num_devices(self) -> int:
        """Of all replicas."""
        return sum(self.replica_sizes) * self.tensor


def load_stages(
    model: ResolvedModel,
    layout: StageLayout,
    memory_limit: float | str | None = None,
    expected: ExpectedJobs | None = None,
) -> StagedExecutor:
    """Replicas whose stages are processes of this machine; `memory_limit`: what each may take of its GPU.

    The kernels that the expected jobs need are compiled meanwhile, once for all stages: a part of a model has those of
    the whole.
    """
    replicas = [find_parts(model, size, layout.tensor) for size in layout.replica_sizes]
    tokenizer = load_tokenizer(model.source)
    gpus = find_gpus(model, layout.num_devices, layout.gpus)
    ahead = None if expected is None else expected.compile_ahead(model, layout.tensor)
    processes = StageProcesses(
        model.spec,
        *replicas,
        shards=layout.shards,
        tensor=layout.tensor,
        gpus=gpus,
        memory_limit=memory_limit,
    )
    return StagedExecutor(processes, tokenizer, shards=layout.shards, ahead=ahead)


def stage_cost(model: ResolvedModel, num_stages: int, row_tile: int, tensor: int = 1) -> AnalyticCost:
    """The cost model of stages on this machine: enough to compare plans."""
    split = split_model(model.shape, num_stages)
    hardware = model.hardware or DEVICES[ANY_GPU]
    return BackboneSetup(model.shape).cost(hardware, num_stages, tensor, row_tile=row_tile, split=split)


def why_no_pairs(model: ResolvedModel, planner: str, layout: StageLayout) -> str | None:
    """Why no two microbatches of devices that share every layer run side by side; None if they may.

    `planner`: that of the run, by its name.
    """
    if len(layout.replica_sizes) > 1:
        return "pairs are for one replica."
    if layout.schedule is not None:
        return "the schedule that was asked for knows no pairs."
    if planner == "greedy":
        return "the greedy planner knows no pairs."
    is_plain = model.spec.kernels == "reference" or model.spec.dtype == "float32"
    if is_plain and not model.is_cpu:
        # Of one GPU, autograd goes back through one graph at a time.
        return "on GPUs pairs are for the fused kernels."
    return None


def layout_notes(spec: RunSpec, model: ResolvedModel, layout: StageLayout) -> tuple[str, ...]:
    """What a user should know of a layout, but for pairs."""
    untried = () if model.is_cpu else (UNTRIED,)
    if layout.tensor > 1:
        found = f"tensor:{layout.tensor} splits sums, so bits belong to this layout"
        return (f"{found}: the same again with it, and about {_rounding(model)} from one device's", *untried)
    gathering = [note for cost in _gather_costs(model, layout) for note in cost.notes()]
    return (*untried, *gathering, *_grouping_notes(spec, layout))


def pair_notes(spec: RunSpec, model: ResolvedModel, layout: StageLayout) -> tuple[str, ...]:
    """Why devices that share every layer run no two microbatches side by side; nothing where that is decided later."""
    alone = why_no_pairs(model, spec.planner, layout) if layout.tensor > 1 else None
    return () if alone is None else (f"every microbatch runs alone: {alone}",)


def _rounding(model: ResolvedModel) -> str:
    """How far devices that share layers are from one device, whose sums are not split."""
    if model.spec.quantize == "fp8":
        return "a rounding to 8-bit floats"
    return "1e-5" if model.dtype == torch.float32 else "a rounding to bfloat16"


def _gather_costs(model: ResolvedModel, layout: StageLayout) -> list[GatherCost]:
    """What gathering takes devices that share weights, for each kind of copy; empty if the table lacks the device."""
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
    """Why jobs are not grouped, where replicas in stages would try it."""
    sizes = layout.replica_sizes
    if len(sizes) == 1 or max(sizes) == 1 or len(spec.jobs) == 1 or spec.planner == "greedy":
        return ()
    if not any(job.gradient_sum == "any_order" for job in spec.jobs):
        return ()
    return ("each replica packs its jobs together: groups are not tried with gradient_sum any_order",)


def check_layout(spec: RunSpec, model: ResolvedModel, layout: StageLayout) -> None:
    """Raises what keeps a run from being trained by such replicas, as far as is known before any weight is read."""
    for size in layout.replica_sizes:
        find_parts(model, size, layout.tensor)
    if model.elsewhere is None:
        find_gpus(model, layout.num_devices, layout.gpus)
    if layout.shards and model.source.gguf_file is not None:
        raise ConfigError("a GGUF file is read as a whole; shards are for models in safetensors files.", where=WHERE)
    for place, job in enumerate(spec.jobs):
        try:
            check_job(model, job, layout)
        except ConfigError as error:
            raise error.at(f"jobs.{place}.{error.where}") from None


def check_job(model: ResolvedModel, job: JobSpec, layout: StageLayout) -> None:
    """ConfigError for settings of a job that keep it from being trained by such replicas."""
    refuse_divided(job, layout.replica_sizes)
    # What auto will mean on a GPU is only sure once the weights are there; who wants no kernels can say so.
    is_auto = model.spec.kernels == "auto" and not model.is_cpu
    if is_auto or model.spec.kernels == "fused":
        refuse_without_kernels(job.adapter, "adapter.method")
    if layout.tensor > 1:
        refuse_indivisible(job)


def find_parts(model: ResolvedModel, num_stages: int, tensor: int = 1) -> list[ModelPart]:
    """Which layers each stage gets; raises what stands in the way, before any weight is read."""
    spec = model.spec
    if spec.kernels != "fused" and (spec.recompute != "none" or spec.offload):
        raise ConfigError("recompute and offload are for the fused kernels; set kernels=fused too.", where=WHERE)
    kind = model.config["model_type"]
    if kind not in FAMILIES:
        raise ModelError(f"is a {kind} model; stages are for those of {', '.join(FAMILIES)}.", where=model.where)
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
    """Runs of layers that take about as long as each other; the last one has the output head besides."""
    parts, first = [], 0
    for size in split_model(shape, num_stages):
        parts.append(ModelPart(first, first + size, shape.num_layers))
        first += size
    return parts
