"""One stage's share of jobs: its part of their tensors, their references and starts, and what it refuses.

A job's tensors are divided into the parts of the stages and joined again. Joined they are those of one device, so a
checkpoint does not depend on how many stages wrote it. Flat buffers follow the order of the layers: a stage's is a
range of the whole buffer. Optimizer states of single modules are on the stage that has the module; counters are on all
stages. Of tied rows the first stage's are joined. A tensor that only one stage holds is not divided.

All stages of a replica have to agree on which references are known, without messages: all process microbatches in the
same order, and values of a job that has left are dropped before the first microbatch of the next program, because
stages learn at different times that it has left.

A job that starts by EVA runs its first samples from stage to stage, and each stage observes its own modules. Jobs get
their seats while programs run, which use the channels between the stages. So the coordinator carries what crosses a
border (`staged_jobs.py`); it also learns from all stages when they know enough.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from weft.adapters.adapter import Adapter
from weft.engine.execute.eva import LinearInputs, passes, set_initial_directions
from weft.engine.execute.optimizers.optimizer import PREFIX
from weft.engine.execute.protocol import NewJob
from weft.engine.execute.references import JobReference, ReferenceCache
from weft.engine.inference.attach import adapter_on, own_part
from weft.errors import ConfigError
from weft.kernels.device import CPU
from weft.methods.configs import CONFIGS
from weft.methods.registry import has_kernels
from weft.model.backbone import Backbone
from weft.model.objective_loss import ReferenceRows
from weft.parallel.stages.gradient import JobShare
from weft.spec import AdapterSpec, JobSpec

Tensors = dict[str, torch.Tensor]


def without_tied(tensors: Mapping[str, torch.Tensor], share: JobShare) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if _owner(name)[0] not in share.tied}


def join_state(parts: Sequence[Mapping[str, torch.Tensor]]) -> Tensors:
    """Tensors of a whole job from those of its stages, in order."""
    found: dict[str, list[torch.Tensor]] = {}
    for part in parts:
        for name, tensor in part.items():
            found.setdefault(name, []).append(tensor)
    return {name: torch.cat(own) if own[0].ndim and len(own) > 1 else own[0] for name, own in found.items()}


def cut_state(tensors: Mapping[str, torch.Tensor], shares: Sequence[JobShare]) -> list[Tensors]:
    parts: list[Tensors] = [{} for _ in shares]
    for name, tensor in tensors.items():
        group, module = _owner(name)
        holders = [index for index, share in enumerate(shares) if _holds(share, group, module)]
        if module or not tensor.ndim or len(holders) == 1:
            pieces = [tensor] * len(holders)
        else:
            runs = tensor.split([shares[index].run_of(group) for index in holders])
            pieces = [tensor if group in shares[index].tied else run for index, run in zip(holders, runs, strict=True)]
        for index, piece in zip(holders, pieces, strict=True):
            parts[index][name] = piece
    return parts


def _owner(name: str) -> tuple[str, str]:
    """Group of a tensor, or empty for all groups; and its module, if it belongs to one."""
    if not name.startswith(PREFIX):
        return name.partition("_")[2], ""
    group, *module, _ = name.removeprefix(PREFIX).split(".")
    return group, ".".join(module)


def _holds(share: JobShare, group: str, module: str) -> bool:
    if module:
        # A part of an adapter is a module and a group of the same name.
        return module in share.modules or (module.partition(".")[0] == group and group in share.sizes)
    return group in share.sizes if group else bool(share.sizes)


WHOLE_STATES = ("adamw_8bit",)
"""Optimizers whose states are blocks of numbers, which a border between two stages may divide."""


def refuse_divided(spec: JobSpec, replica_sizes: Sequence[int]) -> None:
    """ConfigError for settings of a job that need its adapter undivided, where a replica has several stages."""
    if spec.optim in WHOLE_STATES and max(replica_sizes) > 1:
        found = f"{spec.optim} keeps blocks of numbers, which a border between two stages may cut"
        raise ConfigError(f"{found}; use adamw, or a layout whose replicas have one stage each.", where="optim")


def refuse_indivisible(spec: JobSpec) -> None:
    """ConfigError for settings of a job that need every layer undivided."""
    _refuse_indivisible_method(spec.adapter, "adapter.method")
    if spec.adapter.eva is not None:
        found = "eva looks at whole inputs, of which devices that share layers have parts; use another start."
        raise ConfigError(found, where="adapter.init_lora_weights")
    if spec.gradient_sum == "any_order":
        raise ConfigError("any_order is not supported with tensor:N; use in_order.", where="gradient_sum")


def refuse_method(adapter: AdapterSpec, backbone: Backbone, where: str) -> None:
    if backbone.lane(adapter):
        refuse_without_kernels(adapter, where)
    if backbone.devices is not None:
        _refuse_indivisible_method(adapter, where)


def refuse_without_kernels(adapter: AdapterSpec, where: str) -> None:
    """ConfigError for an adapter without kernels, where a backbone in parts needs them."""
    if has_kernels(adapter):
        return
    what, way = f"{adapter.method} with these settings", "use kernels reference"
    if adapter.trains_rows:
        what = "an adapter with rows of tokens"
    elif has_kernels(replace(adapter, lora_dropout=0.0)):
        what, way = f"{adapter.method} with lora_dropout", "leave lora_dropout out, or use kernels reference"
    raise ConfigError(f"{what} has no kernels, and a layout runs one path; {way}.", where=where)


def _refuse_indivisible_method(adapter: AdapterSpec, where: str) -> None:
    reason = adapter.config.undivided
    if reason is not None:
        known = ", ".join(sorted(name for name, config in CONFIGS.items() if config.undivided is None))
        raise ConfigError(f"{adapter.method} {reason}; with tensor:N use {known}.", where=where)


def refuse_unlike(shares: Sequence[JobShare]) -> None:
    """ConfigError where tensors shared by all modules would depend on where the model is divided."""
    found = "share matrices that are as wide as the widest of them, which is not on every stage"
    shapes = [{name: x.shape for name, x in share.shared.items()} for share in shares if share.modules]
    if any(own != shapes[0] for own in shapes):
        what = f"its modules {found}; adapt all layers alike, or use one device."
        raise ConfigError(what, where="adapter.target_modules")
    compared = [share.compared for share in shares if share.compared is not None]
    if any(own != compared[0] for own in compared):
        what = f"the modules of the adapter that it compares with {found}; use one device."
        raise ConfigError(what, where="objective")


class StageReferences:
    """References of jobs, whether they have a share of the stage or not."""

    def __init__(self, backbone: Backbone) -> None:
        self._backbone = backbone
        self._known = ReferenceCache(backbone, kept_only=True)
        self._of_jobs: dict[str, JobReference] = {}
        self._left_behind: list[set[ReferenceRows]] = []
        """Values kept for jobs that have left since the last program."""

    def add(self, job: NewJob) -> tuple[int, Mapping[str, torch.Size] | None]:
        """Makes a job's reference, if it has one: its numbers here, and the shapes of the tensors that all its modules
        share, None without any; ConfigError if it does not fit a backbone in parts."""
        data, adapter = job.batches.data, job.reference
        if not data.reads_reference:
            return 0, None
        self._of_jobs[job.spec.name] = JobReference(self._known, data, adapter)
        if adapter is None:
            return 0, None
        where = "reference" if data.distillation is None else "teacher"
        refuse_method(adapter.spec, self._backbone, where)
        own = own_part(self._backbone, adapter)
        if own is None:
            return 0, None
        # Only a check; it is made again when it takes its slot.
        made = adapter_on(self._backbone, own)
        return made.num_parameters, {name: tensor.shape for name, tensor in made.shared.items()}

    def of(self, job: str) -> JobReference | None:
        return self._of_jobs.get(job)

    def drop(self, job: str) -> None:
        self._of_jobs.pop(job, None)

    def leave(self, job: str) -> None:
        """Called before a job leaves; its values stay until the next program."""
        if job in self._of_jobs:
            self._left_behind.append(self._of_jobs[job].forget())

    def pop_released_rows(self) -> list[set[ReferenceRows]]:
        """Values of jobs that have left; to be dropped before the first microbatch of a program."""
        found, self._left_behind = self._left_behind, []
        return found

    def forget(self) -> None:
        """Drops all values after a failure: other stages may be further, or not."""
        for reference in self._of_jobs.values():
            reference.forget()
        self._left_behind.clear()
        self._known.forget()


@dataclass(frozen=True)
class StagePassResult:
    left_TD: torch.Tensor | None
    is_enough: bool


class StageStart:
    def __init__(self, backbone: Backbone, job: NewJob, adapter: Adapter | None) -> None:
        eva = job.spec.adapter.eva
        assert eva is not None and backbone.part is not None
        ranks = {} if adapter is None else {path: job.spec.adapter.rank_for(path) for path in adapter.modules}
        self._backbone, self._adapter = backbone, adapter
        self._is_last = backbone.part.is_last
        self._inputs = LinearInputs(backbone, ranks, eva, job.spec.seed)
        self._passes = passes(job.batches.samples_from(0))

    def run_pass(self, entering_TD: torch.Tensor | None) -> StagePassResult | None:
        """Runs the next pass; None if there are no more samples."""
        samples = next(self._passes, None)
        if samples is None:
            return None
        left_TD = self._inputs.run(samples, None if entering_TD is None else entering_TD.to(self._backbone.device))
        return StagePassResult(None if self._is_last else left_TD.to(CPU), self._inputs.are_enough)

    def give(self) -> None:
        if self._adapter is not None:
            set_initial_directions(self._adapter, self._inputs.directions())
