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

The norm and the sum of a gradient that lies on several stages have the bits of one device, which sums over the flat
buffer of each group from beginning to end. So the stages' parts of a gradient are sent to one stage and joined to that
buffer; sums of parts would depend on where the model is divided.

Rows of tokens at both ends of a model are on the first stage and, *tied*, on the last. Each end has its part of their
gradient; both step by the sum, so they stay equal.

Where a job's samples are on several replicas, sums are exact integers, added by one device for all. A device's part is
a head (whether its losses are finite, the bounds of its sums), the words of its sums in the order of its buffers, and
on the adding stage's own replica the rest of the gradient. Parts of each replica are joined to whole buffers, so
replicas need not be divided alike: no order and no assignment of samples changes a bit.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from weft.adapters.adapter import Adapter
from weft.adapters.devices import Devices
from weft.engine.execute.eva import LinearInputs, passes, set_initial_directions
from weft.engine.execute.optimizers.optimizer import PREFIX, VECTOR, PartOfStep
from weft.engine.execute.protocol import NewJob
from weft.engine.execute.references import JobReference, ReferenceCache
from weft.engine.execute.weights import JobWeights
from weft.engine.inference.attach import adapter_on, own_part
from weft.errors import ConfigError
from weft.kernels.device import CPU
from weft.kernels.fixed_point import SumWords, total_of_ends
from weft.methods.configs import CONFIGS
from weft.methods.registry import has_kernels
from weft.model.backbone import Backbone
from weft.model.objective_loss import ReferenceRows
from weft.spec import AdapterSpec, JobSpec
from weft.store.peft_files import PARTS

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


def join_team(parts: Sequence[Tensors]) -> Tensors:
    """Tensors of a stage from those of the devices that share its layers, the first of which has all but some moments
    that are divided over them."""
    found = dict(parts[0])
    for name in parts[0].keys() & (parts[-1].keys() if len(parts) > 1 else {}):
        found[name] = torch.cat([part[name] for part in parts])
    return found


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
        """Drops all values after a failure, because other stages may have computed more of them."""
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


@dataclass(frozen=True)
class JobShare:
    sizes: Mapping[str, int]
    trained: tuple[str, ...]
    modules: tuple[str, ...]
    target_names: tuple[str, ...]
    """Names of all adapted modules of the whole model, as in PEFT's target_modules."""
    shared: Mapping[str, torch.Tensor]
    summed: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Number of values in each tensor that is summed by itself, by trained group, for order-independent sums."""
    num_compared: int = 0
    compared: Mapping[str, torch.Size] | None = None
    """Shapes of the frozen tensors that all modules of the reference adapter read; None if it has no module here."""
    tied: tuple[str, ...] = ()
    """Groups of tied rows that the first stage has as well."""

    @property
    def num_trained(self) -> int:
        return sum(self.sizes[group] for group in self.trained)

    def run_of(self, group: str) -> int:
        """Number of values that this share adds to the whole adapter's buffer of a group."""
        return 0 if group in self.tied else self.sizes.get(group, 0)


@dataclass(frozen=True)
class GradientNorm:
    """Norm of a job's whole gradient, on the device; the host does not wait for it."""

    norm: torch.Tensor
    is_finite: torch.Tensor
    """Number above 0 if all losses are finite."""

    @property
    def message(self) -> torch.Tensor:
        return torch.stack([self.norm, self.is_finite])


def gradient_part(weights: JobWeights | None, is_finite: torch.Tensor) -> torch.Tensor:
    """A stage's part of a job's gradient, after a number above 0 if the losses known to the stage are finite."""
    grads = [] if weights is None else [group.grad for group in weights.adapter.groups.values()]
    return torch.cat([is_finite.view(1), *grads])


def part_size(share: JobShare) -> int:
    return 1 + share.num_trained


def part_of_step(norm: torch.Tensor, shares: Sequence[JobShare], stage: int) -> PartOfStep:
    num_by_vectors = {}
    for group in shares[stage].trained:
        sizes = [share.run_of(group) for share in shares]
        start, total = 0 if group in shares[stage].tied else sum(sizes[:stage]), sum(sizes)
        num_by_vectors[group] = max(total - total % VECTOR - start, 0)
    return PartOfStep(norm, num_by_vectors)


def combine_gradient_norm(
    parts: Sequence[torch.Tensor], shares: Sequence[JobShare], norm_of: Callable[[list[torch.Tensor]], torch.Tensor]
) -> tuple[GradientNorm, dict[str, torch.Tensor]]:
    """The norm of a gradient and its tied groups, from all stages' parts in order. `norm_of`: of its groups."""
    pieces: dict[str, list[torch.Tensor]] = {}
    for part, share in zip(parts, shares, strict=True):
        own = by_group(part[1:], share)
        for group in share.trained:
            if group in share.tied:
                pieces[group] = [pieces[group][0] + own[group]]
            else:
                pieces.setdefault(group, []).append(own[group])
    whole = {group: torch.cat(pieces[group]) for group in in_order(pieces)}
    tied = {group: whole[group] for share in shares for group in share.tied}
    return GradientNorm(norm_of(list(whole.values())), torch.stack([part[0] for part in parts]).min()), tied


def by_group(flat: torch.Tensor, share: JobShare) -> dict[str, torch.Tensor]:
    return dict(zip(share.trained, flat.split([share.sizes[group] for group in share.trained]), strict=True))


def in_order(groups: Iterable[str]) -> list[str]:
    """Groups of several stages in the order of one device's adapter: its parts are last."""
    return sorted(dict.fromkeys(groups), key=lambda group: PARTS.index(group) if group in PARTS else -1)


LOW_BITS = 62
"""Bits of a sum's units in the first of two words."""
Receive = Callable[[Sequence[int], torch.dtype], Generator[None, None, torch.Tensor]]
"""Function that waits for the next tensor from one device."""


@dataclass(frozen=True)
class SpreadPart:
    """One device's part of the gradient of a job on several replicas."""

    is_finite: bool
    sums: Mapping[str, SumWords]
    penalties: Mapping[str, torch.Tensor] | None
    """Terms added to the sums of all, by group, if any; every replica would add the same."""

    @staticmethod
    def of(weights: JobWeights | None, devices: Devices | None = None, *, is_finite: bool) -> SpreadPart:
        if weights is None:
            return SpreadPart(is_finite, {}, None)
        return SpreadPart(is_finite, weights.adapter.any_order_sums(devices), weights.adapter.penalties())

    def messages(self, device: torch.device) -> list[torch.Tensor]:
        """Tensors that carry this part to the root stage, all on the stage's device."""
        units = [units for own in self.sums.values() for units in own.units]
        has_coarse = any(own.coarse_P is not None for own in self.sums.values())
        low = [each & (2**LOW_BITS - 1) for each in units]
        head = [self.is_finite, has_coarse, self.penalties is not None, *low, *(each >> LOW_BITS for each in units)]
        found = [torch.tensor(head, dtype=torch.int64, device=device)]
        if self.sums:
            words = SumWords.joined(list(self.sums.values()))
            # Copies: the sums continue while these are sent.
            found += [words.fine_P] if words.coarse_P is None else [words.fine_P, words.coarse_P]
        if self.penalties is not None:
            found.append(torch.cat(list(self.penalties.values())))
        return found


def receive_part(receive: Receive, share: JobShare) -> Generator[None, None, SpreadPart]:
    num_sums = sum(len(sizes) for sizes in share.summed.values())
    head = (yield from receive((3 + 2 * num_sums,), torch.int64)).tolist()
    is_finite, has_coarse, has_penalties = (bool(flag) for flag in head[:3])
    low, high = head[3 : 3 + num_sums], head[3 + num_sums :]
    units = iter([each + (more << LOW_BITS) for each, more in zip(low, high, strict=True)])
    sums: dict[str, SumWords] = {}
    if share.summed:
        lengths = {group: sum(sizes) for group, sizes in share.summed.items()}
        fine = _words((yield from receive((sum(lengths.values()),), torch.int64)), lengths)
        coarse: Mapping[str, torch.Tensor] = {}
        if has_coarse:
            coarse = _words((yield from receive((sum(lengths.values()),), torch.int64)), lengths)
        for group, sizes in share.summed.items():
            sums[group] = SumWords(fine[group], coarse.get(group), sizes, tuple(next(units) for _ in sizes))
    penalties = None
    if has_penalties:
        penalties = by_group((yield from receive((share.num_trained,), torch.float32)), share)
    return SpreadPart(is_finite, sums, penalties)


def combine_spread_sums(
    replicas: Sequence[tuple[Sequence[SpreadPart], Sequence[JobShare]]],
    norm_of: Callable[[list[torch.Tensor]], torch.Tensor],
) -> tuple[GradientNorm, dict[str, torch.Tensor]]:
    """The norm of a gradient and the gradient by group, from the parts of all replicas that have some. The first is the
    root stage's own; `norm_of` computes the norm of the groups."""
    first, shares = replicas[0]
    gradient: dict[str, torch.Tensor] = {}
    for group in in_order(group for share in shares for group in share.trained):
        whole = [SumWords.joined([part.sums[group] for part in parts if group in part.sums]) for parts, _ in replicas]
        gradient[group] = total_of_ends(whole, sum(share.run_of(group) for share in shares))
        own = [
            part.penalties[group]
            for part, share in zip(first, shares, strict=True)
            if part.penalties is not None and share.run_of(group)
        ]
        if own:
            gradient[group] += torch.cat(own)
    is_finite = all(part.is_finite for parts, _ in replicas for part in parts)
    norm = norm_of(list(gradient.values()))
    return GradientNorm(norm, torch.tensor(float(is_finite), device=norm.device)), gradient


def slices(gradient: Mapping[str, torch.Tensor], shares: Sequence[JobShare]) -> list[torch.Tensor]:
    """The part of a whole gradient for each device of a replica, in the order of its buffers."""
    cut = {
        group: whole.split([share.run_of(group) if group in share.trained else 0 for share in shares])
        for group, whole in gradient.items()
    }
    nothing = next(iter(gradient.values()))[:0]
    found = []
    for index, share in enumerate(shares):
        own = [gradient[group] if group in share.tied else cut[group][index] for group in share.trained]
        found.append(torch.cat([nothing, *own]))
    return found


def _words(flat: torch.Tensor, lengths: Mapping[str, int]) -> dict[str, torch.Tensor]:
    return dict(zip(lengths, flat.split([*lengths.values()]), strict=True))
