"""Memory of the device that a backbone lies on: what a run may take of it, what work holds, what can be given back."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from weft.adapters.devices import Devices
from weft.engine.execute.protocol import MemoryPeak, MemoryTrial, MicrobatchMemory, ReplicaMemory
from weft.errors import ModelError
from weft.kernels.device import (
    allocated_bytes,
    empty_cache,
    free_and_total_bytes,
    is_gpu,
    limit_memory,
    memory_errors,
    memory_share,
    peak_bytes,
    reserved_bytes,
    reset_peak,
    synchronise,
    total_bytes,
)
from weft.model.ahead import compile_ahead
from weft.model.backbone import Backbone
from weft.model.load import load_backbone
from weft.model.model_part import ModelPart
from weft.model.resolve import ResolvedModel, resolve
from weft.model.shards import Peers
from weft.plan.admit import MARGIN, Budget
from weft.plan.cost.shape import capacities
from weft.process_memory import available_bytes, memory_bytes, peak_resident_bytes, reset_peak_resident, resident_bytes
from weft.spec import AdapterSpec, BackboneSpec, JobSpec
from weft.spec.run import Capacity, memory_fraction

USUAL_STATE_BYTES = 8
"""Bytes of AdamW's two moments, per trainable parameter."""
USUAL_RANK = 16
"""Rank of an adapter of all linears that a service makes room for."""
USUAL_TOKENS = 1024
"""Tokens of such a job's global batch: eight short chats."""
COMPILING = "kernels for this GPU are being compiled; the first microbatch waits for them, later runs find them there."


def weight_bytes(backbone: Backbone) -> int:
    return 4 * 2 + backbone.path.copy_bytes


def usable_bytes(device: torch.device) -> int:
    """Bytes of a GPU that this process may take, with those it has taken."""
    free, total = free_and_total_bytes(device)
    return min(free + reserved_bytes(device), int(total * memory_share(device)))


def replica_memory(backbone: Backbone, num_processes: int = 1) -> ReplicaMemory | None:
    """Memory that this process may hold on its device. Of a CPU it is the whole resident size, and an even part of what
    is free with the `num_processes` that share it; None where that is not counted."""
    device = backbone.device
    if is_gpu(device):
        return ReplicaMemory(usable_bytes(device), allocated_bytes(device))
    resident, available = resident_bytes(), available_bytes()
    if resident is None or available is None:
        return None
    at_most = resident + available // num_processes
    return ReplicaMemory(min(at_most, backbone.memory_limit or at_most), resident)


class PeakMeter:
    """The most that a device holds, and the most tokens between forward and backward meanwhile."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._held: dict[int, int] = {}
        self._most_tokens = 0

    def hold(self, microbatch: int, tokens: int) -> None:
        self._held[microbatch] = tokens
        # A copy at once: two threads may run the passes of a pair.
        self._most_tokens = max(self._most_tokens, sum(list(self._held.values())))

    def release(self, microbatch: int) -> None:
        del self._held[microbatch]

    def forget(self) -> None:
        self._held.clear()

    def pop(self) -> MemoryPeak | None:
        """The peak since the last call; None where it is not counted, or if no microbatch was held."""
        peak = peak_bytes(self._device) if is_gpu(self._device) else peak_resident_bytes()
        found = MemoryPeak(peak, self._most_tokens) if peak and self._most_tokens else None
        self._most_tokens = sum(self._held.values())
        if is_gpu(self._device):
            reset_peak(self._device)
        else:
            reset_peak_resident()
        return found


class DeviceAccount:
    """The memory of one device, which holds one microbatch at a time."""

    def __init__(self, backbone: Backbone) -> None:
        self._backbone = backbone
        self.meter = PeakMeter(backbone.device)

    def memory(self) -> list[ReplicaMemory]:
        found = replica_memory(self._backbone)
        return [] if found is None else [found]

    def microbatches(self, capacity: int, adapters: Collection[AdapterSpec]) -> list[MicrobatchMemory]:
        return [MicrobatchMemory(self._backbone.activation_bytes(capacity, adapters), 1)]

    def shares(self, job_bytes: Mapping[str, int]) -> list[float]:
        return [sum(job_bytes.values())]

    def pop_peaks(self) -> list[list[MemoryPeak]]:
        peak = self.meter.pop()
        return [[] if peak is None else [peak]]


def release_memory(backbone: Backbone) -> None:
    backbone.path.forget()
    gc.collect()
    empty_cache(backbone.device)


def measure(backbone: Backbone, run: Callable[[], None]) -> MemoryTrial:
    """Measures the seconds and bytes of a function after one run to warm it up."""
    run()
    # A captured graph hides its memory: it allocates at capture, not at replay.
    release_memory(backbone)
    held_bytes = _held_bytes(backbone.device, run) if is_gpu(backbone.device) else _saved_bytes(run)
    start = time.perf_counter()
    run()
    return MemoryTrial(time.perf_counter() - start, held_bytes)


def _saved_bytes(run: Callable[[], None]) -> int:
    saved: dict[int, int] = {}

    def remember(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, torch.nn.Parameter):
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
        run()
    return sum(saved.values())


def _held_bytes(device: torch.device, run: Callable[[], None]) -> int:
    """Peak bytes of a GPU while it runs, above what it held before."""
    reset_peak(device)
    before = allocated_bytes(device)
    run()
    synchronise(device)
    return peak_bytes(device) - before


def start_capacity(backbone: Backbone, wanted: Capacity) -> int:
    """Tokens per microbatch for unknown jobs: as `CapacityLimit.fit` would choose for usual ones. It depends only on
    the backbone and the size of the GPU, not on the first jobs or on what else runs there."""
    device = backbone.device
    sizes = capacities(wanted, device.type)
    if len(sizes) == 1:
        return sizes[0]
    memory = ReplicaMemory(int(total_bytes(device) * memory_share(device)), allocated_bytes(device))
    width = sum(linear.in_features + linear.out_features for linear in backbone.linears.values())
    job_bytes = USUAL_RANK * width * (weight_bytes(backbone) + USUAL_STATE_BYTES)
    return usual_capacity(sizes, memory, lambda size: backbone.path.activation_bytes(size, USUAL_RANK), job_bytes)


def usual_capacity(
    sizes: Sequence[int], memory: ReplicaMemory, activation_bytes: Callable[[int], int], job_bytes: int
) -> int:
    """The largest size with memory for usual jobs that fill it, each with an adapter of so many bytes; else the
    smallest."""
    *larger, least = sizes
    for size in larger:
        budget = Budget(memory.usable_bytes, memory.allocated_bytes + activation_bytes(size), MARGIN)
        if budget.why_never(-(-size // USUAL_TOKENS) * job_bytes) is None:
            return size
    return least


@dataclass(frozen=True)
class ExpectedJobs:
    adapters: tuple[AdapterSpec, ...]
    most: int
    have_any_order: bool = False

    @classmethod
    def of(cls, jobs: Sequence[JobSpec], most: int | None) -> ExpectedJobs:
        return cls(
            tuple(job.adapter for job in jobs), most or len(jobs), any(job.gradient_sum == "any_order" for job in jobs)
        )

    def compile_ahead(self, resolved: ResolvedModel, tensor: int = 1) -> compile_ahead.CompileAhead | None:
        """Starts to compile the kernels that these jobs need, unless they are cached. `tensor`: devices that share
        every layer."""
        return compile_ahead.start(
            resolved, self.adapters, self.most, have_any_order=self.have_any_order, tensor=tensor
        )


USUAL_JOBS = ExpectedJobs(tuple(AdapterSpec(r=rank, lora_dropout=0.1) for rank in (16, 64)), 32)
"""Jobs that a service expects: both usual classes of ranks, with dropout and without."""


def load_within(
    described: BackboneSpec | ResolvedModel, limit: float | str | None, expected: ExpectedJobs
) -> tuple[Backbone, tuple[str, ...]]:
    """A backbone, loaded within a memory limit such as `40GB` or 0.5, and notes for the user. Kernels that the expected
    jobs need are compiled meanwhile, unless they are cached."""
    resolved = resolve(described)
    ahead = expected.compile_ahead(resolved)
    backbone = load_part_within_memory(resolved, limit)
    backbone.ahead = ahead
    return backbone, () if ahead is None or ahead.is_ready else (COMPILING,)


def load_part_within_memory(
    resolved: ResolvedModel,
    limit: float | str | None,
    part: ModelPart | None = None,
    peers: Peers | None = None,
    devices: Devices | None = None,
) -> Backbone:
    """A backbone, or a part of one, within a memory limit; ModelError where it does not fit."""
    device = resolved.device
    if limit is not None and is_gpu(device):
        limit_memory(device, memory_fraction(limit, total_bytes(device)))
    try:
        with memory_errors():
            backbone = load_backbone(resolved, part, peers, devices)
    except torch.OutOfMemoryError:
        within = "" if limit is None else f" within a memory_limit of {limit}"
        what = "does not fit the GPU's memory" if part is None else "has a part that does not fit its GPU's memory"
        instead = "use a larger GPU" if part is None else "divide it over more devices"
        raise ModelError(f"{what}{within}; quantize it, or {instead}.", where=resolved.where) from None
    if limit is not None and not is_gpu(device):
        backbone.memory_limit = int(memory_fraction(limit, memory_bytes()) * memory_bytes())
    return backbone
