"""Loads replicas in stages, after everything is refused that cannot be cut."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from weft.engine.execute.memory import ExpectedJobs
from weft.errors import ConfigError, ModelError
from weft.kernels.device import device_name, is_cpu
from weft.model.load import choose_device, load_config
from weft.model.model_part import ModelPart, num_layers
from weft.model.source import find_source, load_tokenizer
from weft.model.tensor_parallel import why_undivided
from weft.parallel.stages.refusals import refuse_cut, refuse_undivided, refuse_without_kernels
from weft.parallel.stages.stage_devices import find_gpus
from weft.parallel.stages.stage_pool import StageProcesses
from weft.parallel.stages.staged import StagedExecutor
from weft.plan.cost.analytic import AnalyticCost, BackboneSetup
from weft.plan.cost.gather import GatherCost
from weft.plan.cost.hardware import DEVICES, Hardware, find_hardware
from weft.plan.cost.memory import MemoryModel
from weft.plan.cost.shape import ModelShape
from weft.plan.families.registry import FAMILIES
from weft.plan.homes import PlannedReplicas
from weft.plan.layout import copies
from weft.plan.pipeline.build import Schedule
from weft.plan.pipeline.split import split_layers
from weft.spec import BackboneSpec, JobSpec, RunSpec
from weft.wording import counted

WHERE = "--layout"
ANY_GPU = "a100-40"
"""What one is taken for that the table does not have: plans are compared with each other, not with a clock."""


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
    spec: BackboneSpec,
    layout: StageLayout,
    memory_limit: float | str | None = None,
    expected: ExpectedJobs | None = None,
) -> StagedExecutor:
    """Replicas whose stages are processes of this machine; `memory_limit`: what each may take of its GPU.

    The kernels that the expected jobs need are compiled meanwhile, once for all stages: a part of a model has those of
    the whole.
    """
    replicas = [find_parts(spec, size, layout.tensor) for size in layout.replica_sizes]
    tokenizer = load_tokenizer(spec.base_model)
    gpus = find_gpus(spec, layout.num_devices, layout.gpus)
    ahead = None if expected is None else expected.compile_ahead(spec, layout.tensor)
    processes = StageProcesses(
        spec,
        *replicas,
        shards=layout.shards,
        tensor=layout.tensor,
        gpus=gpus,
        memory_limit=memory_limit,
    )
    return StagedExecutor(processes, tokenizer, shards=layout.shards, ahead=ahead)


def stage_cost(spec: BackboneSpec, num_stages: int, row_tile: int, tensor: int = 1) -> AnalyticCost:
    """What stages on this machine are taken to cost: enough to tell one plan from another."""
    parts, config = find_parts(spec, num_stages), load_config(find_source(spec.base_model))
    split = tuple(part.end - part.first for part in parts)
    setup, hardware = BackboneSetup(ModelShape.from_config(config)), _hardware(spec) or DEVICES[ANY_GPU]
    return setup.cost(hardware, num_stages, tensor, row_tile=row_tile, split=split)


def why_no_pairs(
    backbone: BackboneSpec, planner: str, layout: StageLayout, elsewhere: Hardware | None = None
) -> str | None:
    """Why no two microbatches of devices that share every layer run side by side; None if they may.

    `planner`: that of the run, by its name; `elsewhere`: as in `check_layout`.
    """
    if len(layout.replica_sizes) > 1:
        return "pairs are for one replica."
    if layout.schedule is not None:
        return "the schedule that was asked for knows no pairs."
    if planner == "greedy":
        return "the greedy planner knows no pairs."
    is_plain = backbone.kernels == "reference" or backbone.dtype == "float32"
    if is_plain and not _is_on_cpu(backbone, elsewhere):
        # Of one GPU, autograd goes back through one graph at a time.
        return "on GPUs pairs are for the fused kernels."
    return None


def untried_notes(spec: BackboneSpec, elsewhere: Hardware | None = None) -> tuple[str, ...]:
    """What whoever has a layout trained on GPUs should know."""
    if _is_on_cpu(spec, elsewhere):
        return ()
    return ("nobody has seen a layout train on several GPUs yet: compare an adapter with one device's.",)


def rounding_note(spec: BackboneSpec, elsewhere: Hardware | None = None) -> str:
    """How far devices that share layers are from one device, whose sums are not split."""
    if spec.quantize == "fp8":
        return "a rounding to 8-bit floats"
    is_wide = spec.dtype == "float32" or (spec.dtype == "auto" and _is_on_cpu(spec, elsewhere))
    return "1e-5" if is_wide else "a rounding to bfloat16"


def _is_on_cpu(spec: BackboneSpec, elsewhere: Hardware | None) -> bool:
    """Whether devices are CPUs: those of another kind if such are named, else those of this machine."""
    return is_cpu(choose_device(spec)) if elsewhere is None else elsewhere.name == "cpu"


def _hardware(spec: BackboneSpec) -> Hardware | None:
    """What the table says of the device that a backbone is for; None if it says nothing."""
    with suppress(ConfigError):
        return find_hardware(device_name(choose_device(spec)))
    return None


def gather_costs(spec: BackboneSpec, layout: StageLayout, elsewhere: Hardware | None = None) -> list[GatherCost]:
    """What gathering the weights takes devices that share them, for each kind of copy; empty if nobody knows them."""
    hardware, sizes = elsewhere or _hardware(spec), layout.replica_sizes
    kinds = {(len(own), sizes[own.start]): None for own in copies(len(sizes), layout.shards) if len(own) > 1}
    if hardware is None:
        return []
    bytes_each = {"float32": 4, "bfloat16": 2}.get(spec.dtype, hardware.activation_bytes)
    found = []
    for shards, num_stages in kinds:
        cost = stage_cost(spec, num_stages, row_tile=1)
        memory = MemoryModel(cost.shape, spec.quantize, activation_bytes=bytes_each, shards=shards)
        found.append(GatherCost(replace(memory, num_stages=num_stages, split=cost.split), hardware))
    return found


def check_layout(spec: RunSpec, layout: StageLayout, elsewhere: Hardware | None = None) -> None:
    """Raises what keeps a run from being trained by such replicas, as far as that is known before anything is read.

    `elsewhere`: what it is planned for, if not the devices of this machine.
    """
    for size in layout.replica_sizes:
        find_parts(spec.backbone, size, layout.tensor)
    if elsewhere is None:
        find_gpus(spec.backbone, layout.num_devices, layout.gpus)
    source = find_source(spec.backbone.base_model)
    if layout.shards and source.gguf_file is not None:
        raise ConfigError("a GGUF file is read as a whole; shards are for models in safetensors files.", where=WHERE)
    for place, job in enumerate(spec.jobs):
        try:
            check_job(spec.backbone, job, layout, elsewhere)
        except ConfigError as error:
            raise error.at(f"jobs.{place}.{error.where}") from None


def check_job(backbone: BackboneSpec, job: JobSpec, layout: StageLayout, elsewhere: Hardware | None = None) -> None:
    """ConfigError for settings of a job that keep it from being trained by such replicas."""
    refuse_cut(job, layout.replica_sizes)
    # What auto will mean on a GPU is only sure once the weights are there; who wants no kernels can say so.
    is_auto = backbone.kernels == "auto" and not _is_on_cpu(backbone, elsewhere)
    if is_auto or backbone.kernels == "fused":
        refuse_without_kernels(job.adapter, "adapter.method")
    if layout.tensor > 1:
        refuse_undivided(job)


def find_parts(spec: BackboneSpec, num_stages: int, tensor: int = 1) -> list[ModelPart]:
    """Which layers each stage gets; raises what stands in the way, before any weight is read."""
    if spec.kernels != "fused" and (spec.recompute != "none" or spec.offload):
        raise ConfigError("recompute and offload are for the fused kernels; set kernels=fused too.", where=WHERE)
    config = load_config(find_source(spec.base_model))
    count = num_layers(config)
    if count is None:
        known = ", ".join(FAMILIES)
        raise ModelError(
            f"is a {config['model_type']} model; stages are for those of {known}.",
            where=f"base_model {spec.base_model}",
        )
    if num_stages > count:
        raise ConfigError(
            f"got {num_stages} stages; the model has {counted(count, 'layer')}, so use 1 to {count}.", where=WHERE
        )
    if tensor > 1:
        _refuse_tensor(spec, config, tensor)
    return cut_layers(config, count, num_stages)


def _refuse_tensor(spec: BackboneSpec, config: dict[str, Any], count: int) -> None:
    """ModelError if so many devices cannot share the layers of a backbone."""
    why = why_undivided(config, count, spec.quantize)
    if why is not None:
        raise ModelError(f"{why}.", where=f"base_model {spec.base_model}")


def cut_layers(config: dict[str, Any], count: int, num_stages: int) -> list[ModelPart]:
    """Runs of layers that take about as long as each other; the last one has the output head besides."""
    shape = ModelShape.from_config(config)
    weights = [float(shape.layer_weights)] * count
    weights[-1] += shape.head_weights
    parts, first = [], 0
    for size in split_layers(weights, num_stages):
        parts.append(ModelPart(first, first + size, count))
        first += size
    return parts
