"""Measures a device: microbatches of a few shapes through a real backbone, their time and memory, and the fits.

Every case runs as in training: forward and backward for all jobs, then their optimizers. Memory is read off a step
whose optimizers already have their moments, with graphs captured again, so that it includes nothing from another case
and all that training will hold.
"""

from __future__ import annotations

import gc
import statistics
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from weft.adapters.frozen import quantisation
from weft.data.samples import Sample
from weft.engine.execute.optimizers import optimizer_of
from weft.engine.execute.optimizers.optimizer import step_together
from weft.errors import ConfigError, counted
from weft.kernels.device import (
    device_name,
    empty_cache,
    is_cpu,
    is_gpu,
    peak_bytes,
    peak_reserved_bytes,
    reset_peak,
    synchronise,
)
from weft.model.backbone import Backbone
from weft.model.packed import PackedBatch, SlotSample, pack_samples
from weft.plan.cost.fit import MicrobatchLoad
from weft.plan.cost.profile import Measurement, Profile, Setup, fit_profile
from weft.spec import AdapterSpec, JobSpec

SEED = 20260201
SMALLEST_CAPACITY = 128
JOB = JobSpec("profile", ("random tokens",), learning_rate=1e-4)


@dataclass(frozen=True)
class ProfileCase:
    jobs: tuple[tuple[int, tuple[int, ...]], ...]
    held_out: bool

    @property
    def text(self) -> str:
        tokens = sum(sum(own) for _, own in self.jobs)
        longest = max(max(own) for _, own in self.jobs)
        ranks = "/".join(str(rank) for rank in sorted({rank for rank, _ in self.jobs}))
        return f"{counted(len(self.jobs), 'job')} of rank {ranks}, {tokens} tokens in samples of {longest}"


_FITTED = (
    # (part of the capacity, one over a sample's part of it, ranks)
    (1.0, 16, (16,)),
    (0.5, 16, (16,)),
    (0.25, 16, (16,)),
    (1.0, 4, (16,)),
    (1.0, 16, (16,) * 4),
    (0.5, 32, (16,) * 8),
    (0.75, 8, (8,) * 4),
    (1.0, 2, (8,) * 2),
    (1.0, 32, (32,) * 4),
    (1.0, 16, (64,) * 2),
    (0.5, 16, (64,)),
    (0.25, 4, (64,)),
)
_HELD_OUT = (
    (0.75, 16, (16,) * 2),
    (1.0, 8, (16,) * 8),
    (0.5, 8, (8, 16)),
    (0.25, 8, (32,) * 2),
    (0.75, 32, (64, 16, 16)),
    (1.0, 16, (64, 32, 8)),
)


def check_capacity(capacity: int) -> None:
    """ConfigError for a capacity too small to fit the cost model."""
    if capacity < SMALLEST_CAPACITY:
        raise ConfigError(f"got {capacity}; at least {SMALLEST_CAPACITY} tokens.", where="--capacity")


def profile_cases(capacity: int, longest: int, widest: int) -> tuple[ProfileCase, ...]:
    """Cases up to a capacity, with samples up to `longest` tokens and ranks up to `widest`. Narrow ranks come first:
    the fused step is launched for the widest rank its backbone has seen."""
    check_capacity(capacity)
    cases = []
    for held_out, rows in ((False, _FITTED), (True, _HELD_OUT)):
        for part, divisor, ranks in rows:
            length = min(capacity // divisor, longest)
            count = max(len(ranks), int(part * capacity) // length)
            jobs = tuple(
                (min(rank, widest), (length,) * len(range(job, count, len(ranks)))) for job, rank in enumerate(ranks)
            )
            cases.append(ProfileCase(jobs, held_out))
    return tuple(sorted(cases, key=lambda case: max(rank for rank, _ in case.jobs)))


def measure_profile(
    backbone: Backbone,
    *,
    capacity: int,
    recompute: str = "none",
    repeats: int = 3,
    report: Callable[[str], None] = lambda _: None,
) -> Profile:
    """Measures every case on a backbone without adapters, and fits."""
    row_tile = backbone.path.row_tile(capacity)
    widest = min(min(linear.in_features, linear.out_features) for linear in backbone.linears.values())
    measurements = []
    for case in profile_cases(capacity, backbone.max_positions, widest):
        found = measure_case(backbone, case, row_tile, repeats)
        measurements.append(found)
        report(
            f"{case.text}: {(found.forward_s + found.backward_s) * 1e3:,.1f} ms, optimizers {found.step_s * 1e3:,.1f} "
            f"ms, peak {found.peak_bytes / 1e9:,.3f} GB"
        )
    return fit_profile(_setup(backbone, row_tile, recompute), measurements)


def measure_case(backbone: Backbone, case: ProfileCase, row_tile: int, repeats: int) -> Measurement:
    """Time and memory of one microbatch; leaves the backbone without adapters again."""
    account = _Account(backbone)
    with account:
        adapters = [backbone.new_adapter(AdapterSpec(r=rank), seed) for seed, (rank, _) in enumerate(case.jobs)]
        slots = [backbone.attach(adapter) for adapter in adapters]
        optimizers = [optimizer_of(adapter, JOB) for adapter in adapters]
        batch = _pack(backbone, case, slots, row_tile)

        def take_steps() -> None:
            step_together(optimizers, [True] * len(optimizers))()

        def step() -> None:
            backbone.forward_backward(batch, row_tile)
            take_steps()

        step()
        account.start()
        step()
        peak, reserved = account.peak()
    try:
        both = _median_s(lambda: backbone.forward_backward(batch, row_tile), repeats, backbone.device)
        forward = _median_s(lambda: backbone.scores(batch, row_tile), repeats, backbone.device)
        stepping = _median_s(take_steps, repeats, backbone.device)
    finally:
        for slot in slots:
            backbone.detach(slot)
    load = MicrobatchLoad.of(case.jobs, sum(adapter.num_parameters for adapter in adapters), row_tile)
    # A forward pass alone cannot be slower than both; a noisy clock may still show that.
    backward = max(both - forward, 0.1 * both)
    return Measurement(load, forward, backward, stepping, peak, reserved, case.held_out)


class _Account:
    """Peak memory of tensors, with frozen weights: from the allocator on a GPU, counted here on a CPU."""

    def __init__(self, backbone: Backbone) -> None:
        self._backbone = backbone
        self._on_gpu = is_gpu(backbone.device)
        self._counter = None if self._on_gpu else TensorBytes()

    def __enter__(self) -> _Account:
        _release(self._backbone)
        if self._counter is not None:
            self._counter.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *reason: object) -> None:
        if self._counter is not None:
            self._counter.__exit__(*reason)  # type: ignore[no-untyped-call]

    def start(self) -> None:
        _release(self._backbone)
        if self._counter is not None:
            self._counter.reset_peak()
        else:
            reset_peak(self._backbone.device)

    def peak(self) -> tuple[int, int]:
        if self._counter is None:
            device = self._backbone.device
            synchronise(device)
            return peak_bytes(device), peak_reserved_bytes(device)
        model = self._backbone.model
        total = self._counter.peak + stored_bytes([*model.parameters(), *model.buffers()])
        return total, total


def _release(backbone: Backbone) -> None:
    backbone.path.forget()
    if is_gpu(backbone.device):
        gc.collect()
        synchronise(backbone.device)
        empty_cache(backbone.device)


def _pack(backbone: Backbone, case: ProfileCase, slots: Sequence[int], row_tile: int) -> PackedBatch:
    rng = np.random.default_rng(SEED)
    samples = []
    for slot, (_, lengths) in zip(slots, case.jobs, strict=True):
        weight = 1.0 / sum(length - 1 for length in lengths)
        for length in lengths:
            tokens = rng.integers(0, backbone.vocabulary, length, dtype=np.int32)
            samples.append(SlotSample(Sample(tokens, np.ones(length, dtype=np.bool_)), slot, weight))
    return pack_samples(samples, row_tile, backbone.device)


def _median_s(work: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Seconds on the host's clock from idle device to idle device."""
    taken = []
    for _ in range(repeats):
        synchronise(device)
        begun = time.perf_counter()
        work()
        synchronise(device)
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken)


def _setup(backbone: Backbone, row_tile: int, recompute: str) -> Setup:
    linears = list(backbone.linears.values())
    layers = int(backbone.model.config.get_text_config().num_hidden_layers)
    head = backbone.head.weight_VD
    device = backbone.device
    return Setup(
        device_name(device),
        backbone.name,
        head.shape[1],
        layers,
        sum(linear.in_features * linear.out_features for linear in linears) // layers,
        head.numel(),
        sum(linear.in_features + linear.out_features for linear in linears) // layers,
        head.element_size(),
        row_tile,
        quantisation(linear.frozen for linear in linears),
        recompute,
        backbone.path.name,
    )


class TensorBytes(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = 0
        self.peak = 0
        self._counted: dict[int, int] = {}

    def reset_peak(self) -> None:
        self.peak = self.live

    def __torch_dispatch__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in (result,) if isinstance(result, torch.Tensor) else tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        if key in self._counted or not is_cpu(storage.device):
            return
        self._counted[key] = storage.nbytes()
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.live -= self._counted.pop(key)


def stored_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the tensors' storage, shared storage once."""
    found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.device.type != "meta"}
    return sum(found.values())
