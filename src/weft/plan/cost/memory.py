"""Memory of training, from shapes alone: weights, adapters, kept activations, working space.

Per device of stage s with tensor-parallel degree t, for one microbatch of T rows in the fused step:
    weights       linears by their storage / t, norms and biases; embedding on the first stage, head on the last,
                  whole on each of t devices; with shards of N devices a layer's linears / N, and two gathered layers
    adapters      18 bytes per parameter: fp32 master, gradient and two moments, 16-bit copy; whole on each of t, but
                  for AdamW's moments / t
    kept          per row and layer what `kept_tensors` lists; with `offload` the large ones are elsewhere, but for
                  two layers
    workspace     the peak of one layer's backward, and what surrounds the layers
    loss          one block of logits
LoRA's parts follow PLoRA's appendix A (an indicator per linear, parameters, optimizer, activations b·s·r), with this
engine's storage. Kept bytes equal the fused step's exactly, and totals meet peaks measured on an H200 within 1 %
(tests/plan/cost).
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from weft.errors import ConfigError
from weft.plan.cost.shape import ALL_LINEAR, ModelShape, stage_layers
from weft.plan.decoder import RECOMPUTE, KeptTensor, kept_tensors
from weft.spec import JobSpec

STORED_BITS = {"none": 16.0, "fp8": 8.0, "int8": 8.0, "nf4": 4.5}
"""Bits per weight of a frozen linear; fp8 may be held twice."""
MASTER_BYTES, GRADIENT_BYTES, MOMENT_BYTES = 4, 4, 8
LOSS_ROWS = 1024
"""Rows of logits that exist at once."""
MIN_RANK_CLASS = 16
GATHERED_LAYERS = 2
"""Sharded layers that are whole on a device: the current one and the next."""
OFFLOAD_LAYERS = 2
"""Offloaded layers whose large tensors are on the device: the current one and the next."""


@dataclass(frozen=True)
class StateBytes:
    """Bytes per trainable parameter beside weight and gradient; by default AdamW's moments."""

    whole: float = 0.0
    divided: float = MOMENT_BYTES
    """Devices that share every layer have a part each."""

    def on(self, devices: int) -> float:
        return self.whole + self.divided / devices


def job_bytes(num_parameters: float, weight_bytes: int, state: StateBytes, devices: int = 1) -> float:
    """Bytes of an adapter on each of so many devices that share every layer, in plans and in admission.
    `weight_bytes`: of a parameter with its gradient and copies."""
    return num_parameters * (weight_bytes + state.on(devices))


def rank_class(ranks: Sequence[int]) -> int:
    """The rank that every rank is padded to in the step's S buffers: a power of two."""
    return max(MIN_RANK_CLASS, 1 << (max([1, *ranks]) - 1).bit_length())


@dataclass(frozen=True)
class MemoryModel:
    """Bytes on one device of a replica."""

    shape: ModelShape
    quantize: str = "none"
    recompute: str = "none"
    activation_bytes: int = 2
    fp8_copies: int = 2
    num_stages: int = 1
    tensor_parallel: int = 1
    split: tuple[int, ...] | None = None
    """Layers of every stage; None: as equal as possible."""
    shards: int = 1
    """Devices that share the weights of the layers' linears."""
    plain_row_bytes: int | None = None
    """Bytes that the reference path keeps of a row in all layers, at most; None: those of the fused step."""
    num_parameters: int | None = None
    """Parameters of an adapter in all layers, on average; None: those of a LoRA of its rank on its targets."""

    def __post_init__(self) -> None:
        for where, value, accepted in (
            ("quantize", self.quantize, tuple(STORED_BITS)),
            ("recompute", self.recompute, RECOMPUTE),
        ):
            if value not in accepted:
                raise ConfigError(f"got {value!r}; accepted are {', '.join(accepted)}.", where=where)
        for where in ("tensor_parallel", "shards"):
            if getattr(self, where) < 1:
                raise ConfigError(f"got {getattr(self, where)}; at least 1 device.", where=where)
        stage_layers(self.shape.num_layers, self.num_stages, self.split)

    def layers(self, stage: int) -> int:
        return stage_layers(self.shape.num_layers, self.num_stages, self.split)[stage]

    @property
    def weight_bytes_each(self) -> float:
        if self.quantize == "none":
            return float(self.activation_bytes)
        return STORED_BITS[self.quantize] / 8 * (self.fp8_copies if self.quantize == "fp8" else 1)

    def weight_bytes(self, stage: int = 0) -> int:
        shape, size = self.shape, self.activation_bytes
        held = self.layers(stage) / self.shards + (min(GATHERED_LAYERS, self.layers(stage)) if self.shards > 1 else 0)
        linears = held * shape.layer_weights * self.weight_bytes_each / self.tensor_parallel
        extras = self.layers(stage) * shape.layer_extras * size
        is_first, is_last = stage == 0, stage == self.num_stages - 1
        num_tables = is_first + (is_last and not (shape.tied and is_first))
        tables = num_tables * shape.head_weights * size
        return round(linears + extras + tables + is_last * shape.hidden * size)

    @property
    def trained_bytes_each(self) -> int:
        """Bytes per trainable parameter with its gradient; where activations are fp32 the fused step still has a copy
        of its own."""
        has_copy = self.plain_row_bytes is None or self.activation_bytes < MASTER_BYTES
        return MASTER_BYTES + GRADIENT_BYTES + (self.activation_bytes if has_copy else 0)

    def _num_trained(self, rank: int, targets: str | Sequence[str], stage: int) -> int:
        num = self.shape.adapter_parameters(rank, targets) if self.num_parameters is None else self.num_parameters
        return num // self.shape.num_layers * self.layers(stage)

    def adapter_bytes(self, rank: int, targets: str | Sequence[str] = ALL_LINEAR, stage: int = 0) -> int:
        num = self._num_trained(rank, targets, stage)
        return round(job_bytes(num, self.trained_bytes_each, StateBytes(), self.tensor_parallel))

    def job_bytes(
        self, rank: int, num_parameters: int | None, state: StateBytes = StateBytes(), stage: int = 0
    ) -> float:
        """Bytes of a job's adapter on a stage. `num_parameters`: its own in all layers; None: as `adapter_bytes` counts
        them for its rank."""
        num: float = self._num_trained(rank, ALL_LINEAR, stage)
        if num_parameters is not None:
            num = num_parameters * self.layers(stage) / self.shape.num_layers
        return job_bytes(num, self.trained_bytes_each, state, self.tensor_parallel)

    def unlike_bytes(
        self, rank: int, num_parameters: int | None, state: StateBytes = StateBytes(), stage: int = 0
    ) -> float:
        """Bytes by which a job exceeds `adapter_bytes` of its rank; may be negative."""
        return self.job_bytes(rank, num_parameters, state, stage) - self.adapter_bytes(rank, stage=stage)

    def row_bytes(self, widest_rank: int = MIN_RANK_CLASS, recompute: str | None = None) -> float:
        """Bytes kept per row and layer between forward and backward."""
        mode = self.recompute if recompute is None else recompute
        kept = kept_tensors(self.shape, rank_class([widest_rank]))
        return sum(self._bytes(tensor) for tensor in kept if tensor.is_kept(mode))

    def _bytes(self, tensor: KeptTensor) -> float:
        each = self.activation_bytes if tensor.num_bytes is None else tensor.num_bytes
        return tensor.width * each / (self.tensor_parallel if tensor.is_split else 1)

    def kept_bytes(self, num_rows: int, widest_rank: int = MIN_RANK_CLASS, stage: int = 0) -> int:
        if self.plain_row_bytes is not None:
            return round(num_rows * self.plain_row_bytes * self.layers(stage) / self.shape.num_layers)
        return round(num_rows * self.layers(stage) * self.row_bytes(widest_rank))

    def offloaded_bytes(self, num_rows: int) -> int:
        """Bytes of kept tensors elsewhere with `offload`; the backward has two layers at a time on the device."""
        kept = kept_tensors(self.shape, MIN_RANK_CLASS)
        row = sum(self._bytes(tensor) for tensor in kept if tensor.is_moved and tensor.is_kept(self.recompute))
        return round(num_rows * max(self.layers(0) - OFFLOAD_LAYERS, 0) * row)

    def workspace_bytes(self, num_rows: int, widest_rank: int = MIN_RANK_CLASS) -> int:
        """Peak bytes of a layer's backward."""
        shape = self.shape
        if self.plain_row_bytes is not None:
            return 0
        # The gradient (also before the norm of a block's result) and the MLP's two tensors beside gate and up, which
        # their gradients overwrite; the last two norms' inputs and the gradient of the hidden states. With FP8 products
        # in the backward, the gradients of gate and up also exist in 8 bits.
        grads = 2 if shape.form.norms_results or shape.form.scales_results else 1
        row = grads * shape.hidden + 2 * shape.ffn / self.tensor_parallel + 3 * shape.hidden
        again = self.row_bytes(widest_rank, "none") - self.row_bytes(widest_rank)
        again += 2 * shape.ffn / self.tensor_parallel if self.quantize == "fp8" and self.fp8_copies == 2 else 0
        dense = 0.0
        if self.quantize in ("nf4", "int8") or (self.quantize == "fp8" and self.fp8_copies == 1):
            dense = 2 * shape.ffn * shape.hidden * self.activation_bytes / self.tensor_parallel
        return round(num_rows * (row * self.activation_bytes + again) + dense)

    def loss_bytes(self, stage: int = 0) -> int:
        if stage != self.num_stages - 1:
            return 0
        return LOSS_ROWS * self.shape.vocabulary * self.activation_bytes

    def microbatch_bytes(self, num_rows: int, widest_rank: int, stage: int = 0) -> int:
        """Bytes of a microbatch in flight; on a GPU each has graphs with memory of their own, for its backward too."""
        kept, workspace = self.kept_bytes(num_rows, widest_rank, stage), self.workspace_bytes(num_rows, widest_rank)
        return kept + workspace + self.loss_bytes(stage)

    def total_bytes(
        self,
        num_rows: int,
        ranks: Sequence[int],
        stage: int = 0,
        num_held: int = 1,
    ) -> int:
        """All bytes with one adapter per rank and `num_held` microbatches between forward and backward."""
        adapters = sum(self.adapter_bytes(rank, ALL_LINEAR, stage) for rank in ranks)
        held = num_held * self.microbatch_bytes(num_rows, max(ranks, default=1), stage)
        return self.weight_bytes(stage) + adapters + held

    def most_rows(
        self, budget_bytes: int, ranks: Sequence[int], row_tile: int = 64, stage: int = 0, num_held: int = 1
    ) -> int:
        """The largest microbatch, in whole tiles, of which `num_held` fit beside these adapters; 0 if none does."""

        def needed(tiles: int) -> int:
            return self.total_bytes(tiles * row_tile, ranks, stage=stage, num_held=num_held)

        above = max(1, budget_bytes // (needed(1) - needed(0)) + 2)
        return max(0, bisect.bisect_right(range(above), budget_bytes, key=needed) - 1) * row_tile


FLOAT_BYTES = 4
WORD_BYTES = 8


def optimizer_bytes(job: JobSpec) -> float:
    """Bytes per parameter on one device."""
    side = job.adapter.config.smallest_side(job.adapter)
    match job.optim:
        case "adamw_8bit":
            # Two codes, and two scales per 256; a short buffer has one more of each.
            return 2 + 2 * FLOAT_BYTES / 256
        case "sgd":
            return FLOAT_BYTES * (job.used_momentum > 0)
        case "lion":
            return FLOAT_BYTES
        case "adafactor":
            # A matrix of r by d, r ≤ d, has r + d numbers for its r · d weights.
            return FLOAT_BYTES * 2 / side
        case "muon":
            return FLOAT_BYTES * (1 if side > 1 else 2)
    return MOMENT_BYTES


def kept_bytes(job: JobSpec) -> float:
    """Bytes per parameter of the optimizer and of the average of the weights, if there is one."""
    return optimizer_bytes(job) + (0 if job.ema_decay is None else FLOAT_BYTES)


def passing_bytes(job: JobSpec) -> int:
    """Temporary bytes per parameter: without an optimizer kernel, a change as large as the weights; the weights before
    the step where some have a rate of their own; the last weights while their average is evaluated."""
    in_a_step = (job.optim in ("sgd", "lion")) + bool(job.learning_rate_pattern)
    return FLOAT_BYTES * max(in_a_step, job.ema_decay is not None)


def sum_bytes(job: JobSpec) -> int:
    """Bytes per parameter of order-independent sums: a word of 8 bytes, and a second for large gradients."""
    return 2 * WORD_BYTES if job.gradient_sum == "any_order" else 0


def best_bytes(job: JobSpec) -> int:
    """Bytes per parameter of the best evaluation's weights, kept for early stopping."""
    return FLOAT_BYTES if job.early_stopping_patience else 0


def job_state(job: JobSpec) -> StateBytes:
    """Bytes per parameter beside weight and gradient, as plans and admission count them."""
    divided = MOMENT_BYTES if job.optim == "adamw" else 0
    return StateBytes(kept_bytes(job) - divided + passing_bytes(job) + best_bytes(job) + sum_bytes(job), divided)
