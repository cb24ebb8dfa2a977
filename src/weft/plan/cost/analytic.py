"""Seconds from shapes and a hardware table: the start of planning, before anything is measured.

One layer over T rows in samples of n tokens, forward (F) and backward (B):
    products   2·weights·T FLOP each way, at the rate products reach inside a step; never less than reading the weights
    attention  4·width·Σ n(n+1)/2 FLOP forward, 2.5 times that backward (it makes the scores again)
    passes     norms, rotation, gated activation: bytes read and written
    adapters   bytes of shrink, expand and their gradients over every row, 12·rank·(in + out) FLOP per token in all, and
               each job's gradients read and written once per microbatch
    fixed      launches
plus two all-reduces per layer and pass for tensor parallelism, the head on the last stage, and recomputation. The
shares below were chosen on an H200 (benchmarks/h200.json), which the result meets within 10 %.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from weft.plan.cost.hardware import Hardware
from weft.plan.cost.learned import AdapterTimes
from weft.plan.cost.memory import MemoryModel
from weft.plan.cost.shape import ALL_LINEAR, ModelShape, estimated_row_tile

PRODUCT_IN_STEP = 0.92
"""Rate of a layer's products relative to one large square product."""
ATTENTION_SHARE = 0.55
"""Rate of attention over samples of some hundred tokens, relative to one large square product."""
ATTENTION_BACKWARD = 2.5
RANK_SHARE = 0.5
"""Rate of products with a rank as one side, relative to one large square product."""
KERNELS_PER_LAYER = 14
OPTIMIZER_BYTES = 42
"""Bytes per parameter and step: gradient twice, master and moments read and written, the 16-bit copy, zeroing."""
OPTIMIZER_S = 5e-5
PARAMETERS_MOVED = (2, 10)
"""Bytes per parameter that a job's microbatch moves forward, and backward with its gradients."""
USUAL_RANKS = (16,)
"""Ranks assumed where adapters come and go."""


@dataclass(frozen=True)
class BackboneSetup:
    shape: ModelShape
    ranks: tuple[int, ...] = USUAL_RANKS
    quantize: str = "none"
    recompute: str = "none"
    num_parameters: int | None = None
    """Parameters of an adapter on average; None: those of a LoRA of the largest rank on the targets."""
    plain_row_bytes: int | None = None
    """As in `MemoryModel`."""

    def cost(
        self,
        hardware: Hardware,
        num_stages: int = 1,
        tensor_parallel: int = 1,
        *,
        capacity: int | None = None,
        row_tile: int = 1,
        targets: str | tuple[str, ...] = ALL_LINEAR,
        split: tuple[int, ...] | None = None,
    ) -> AnalyticCost:
        """The cost model of a replica on devices of this kind. `capacity`: tokens of a full microbatch, from which the
        row tile is estimated; otherwise `row_tile` counts."""
        if capacity is not None:
            row_tile = estimated_row_tile(hardware.name, capacity, self.shape.hidden)
        return AnalyticCost(
            self.shape,
            hardware,
            num_stages,
            tensor_parallel,
            self.quantize,
            self.recompute,
            rank=max(self.ranks),
            num_jobs=len(self.ranks),
            targets=targets,
            row_tile=row_tile,
            split=split,
            num_parameters=self.num_parameters,
            plain_row_bytes=self.plain_row_bytes,
        )


@dataclass(frozen=True)
class LayerSeconds:
    products: float
    attention: float
    passes: float
    adapters: float
    reduces: float
    launches: float

    @property
    def total(self) -> float:
        return self.products + self.attention + self.passes + self.adapters + self.reduces + self.launches


@dataclass(frozen=True)
class AnalyticCost:
    """A `CostModel` for replicas <tensor_parallel, num_stages> of one backbone on one kind of device."""

    shape: ModelShape
    hardware: Hardware
    num_stages: int = 1
    tensor_parallel: int = 1
    quantize: str = "none"
    recompute: str = "none"
    rank: int = 16
    """Rank of the adapters in a microbatch; 0: none."""
    num_jobs: int = 1
    """Adapters in a microbatch; 0: what each of them adds is counted elsewhere (`apart`)."""
    targets: str | tuple[str, ...] = ALL_LINEAR
    row_tile: int = 1
    """Rows are computed in whole tiles of this size."""
    split: tuple[int, ...] | None = None
    """Layers of every stage; None: as equal as possible."""
    num_parameters: int | None = None
    """Parameters of each adapter; None: those of a LoRA of `rank` on `targets`."""
    plain_row_bytes: int | None = None
    """As in `MemoryModel`."""

    def __post_init__(self) -> None:
        self.shape.chosen(self.targets)
        assert self.memory.num_stages == self.num_stages

    @property
    def memory(self) -> MemoryModel:
        return MemoryModel(
            self.shape,
            self.quantize,
            self.recompute,
            self.hardware.activation_bytes,
            num_stages=self.num_stages,
            tensor_parallel=self.tensor_parallel,
            split=self.split,
            plain_row_bytes=self.plain_row_bytes,
            num_parameters=self.num_parameters,
        )

    def apart(self) -> tuple[AnalyticCost, AdapterTimes]:
        """Without what each job adds to a microbatch, and that alone: of a pass of a stage, on average."""
        passes_s = self._layer_parameters * sum(PARAMETERS_MOVED) / self.hardware.memory_rate
        job_s = passes_s / len(PARAMETERS_MOVED) * self.shape.num_layers / self.num_stages if self.rank else 0.0
        return replace(self, num_jobs=0), AdapterTimes(job_s, 0.0)

    def rows(self, lengths: Sequence[int]) -> int:
        return -(-sum(lengths) // self.row_tile) * self.row_tile

    def forward_s(self, lengths: Sequence[int], stage: int) -> float:
        if not lengths:
            return 0.0
        layers = self.memory.layers(stage)
        head = self._head_s(lengths) if stage == self.num_stages - 1 else 0.0
        return layers * self.layer(lengths, is_forward=True).total + head

    def backward_s(self, lengths: Sequence[int], stage: int) -> float:
        if not lengths:
            return 0.0
        layer = self.layer(lengths, is_forward=False).total
        if self.recompute == "full":
            layer += self.layer(lengths, is_forward=True).total
        elif self.recompute == "mlp":
            share = 2 * self.shape.ffn * self.shape.hidden / self.shape.layer_weights
            layer += share * self._products_s(lengths, is_forward=True)
        head = self._head_s(lengths) if stage == self.num_stages - 1 else 0.0
        return self.memory.layers(stage) * layer + head

    def transfer_s(self, num_tokens: int) -> float:
        return self.hardware.send_s(num_tokens * self.shape.hidden * self.hardware.activation_bytes)

    def step_s(self, stage: int) -> float:
        if not self.rank:
            return 0.0
        parameters = self.memory.layers(stage) * self._layer_parameters
        return OPTIMIZER_S + parameters * OPTIMIZER_BYTES / self.hardware.memory_rate

    def held_bytes(self, lengths: Sequence[int], stage: int) -> int:
        return self.memory.kept_bytes(self.rows(lengths), self.rank or 1, stage)

    def layer(self, lengths: Sequence[int], *, is_forward: bool) -> LayerSeconds:
        """Seconds of one microbatch through one layer, without recomputation."""
        ratio = 1 if is_forward else 2
        return LayerSeconds(
            self._products_s(lengths, is_forward=is_forward),
            self._attention_s(lengths) * (1 if is_forward else ATTENTION_BACKWARD),
            self._passes_s(lengths) * ratio,
            self._adapters_s(lengths, is_forward=is_forward),
            self._reduces_s(lengths),
            self._launches_s * ratio,
        )

    def _products_s(self, lengths: Sequence[int], *, is_forward: bool) -> float:
        device, weights = self.hardware, self.shape.layer_weights / self.tensor_parallel
        in_fp8 = self.quantize == "fp8" and device.fp8_flop is not None and (is_forward or self.memory.fp8_copies == 2)
        rate = PRODUCT_IN_STEP * (device.fp8_flop if in_fp8 and device.fp8_flop else device.product_flop)
        stored = weights * self.memory.weight_bytes_each
        makes_dense = self.quantize != "none" and not in_fp8
        dense = (stored + weights * device.activation_bytes) / device.memory_rate if makes_dense else 0.0
        return dense + max(2 * weights * self.rows(lengths) / rate, stored / device.memory_rate)

    def _attention_s(self, lengths: Sequence[int]) -> float:
        rate = self.hardware.product_flop * ATTENTION_SHARE * self.tensor_parallel
        return self.shape.attention_flop(lengths) / rate

    def _passes_s(self, lengths: Sequence[int]) -> float:
        shape = self.shape
        wide = 3 * shape.qkv_width + shape.attention_width + 3 * shape.ffn
        # Norms of results read their input again and write its gradient in the backward; factors do both as well.
        form = shape.form
        narrow = (10 if form.norms_results or form.scales_results else 8) * shape.hidden
        return self._moved_s(self.rows(lengths) * (narrow + wide / self.tensor_parallel))

    def _adapters_s(self, lengths: Sequence[int], *, is_forward: bool) -> float:
        if not self.rank:
            return 0.0
        numbers = self._adapter_numbers(is_forward=is_forward)
        names = self.shape.chosen(self.targets)
        each = sum(sum(self.shape.linears[name]) for name in names)
        rate = self.hardware.product_flop * RANK_SHARE * self.tensor_parallel
        arithmetic = (4 if is_forward else 8) * self.rank * each * sum(lengths) / rate
        jobs = min(self.num_jobs, len(lengths))
        weights = jobs * self._layer_parameters * PARAMETERS_MOVED[not is_forward] / self.hardware.memory_rate
        return self._moved_s(self.rows(lengths) * numbers / self.tensor_parallel) + arithmetic + weights

    @property
    def _layer_parameters(self) -> float:
        """Parameters of an adapter in one layer."""
        if self.num_parameters is None:
            return self.shape.adapter_parameters(self.rank, self.targets) // self.shape.num_layers
        return self.num_parameters / self.shape.num_layers

    def _adapter_numbers(self, *, is_forward: bool) -> int:
        """Numbers per row that the adapters move through memory. Forward: read x, add to y. Backward: read dy twice and
        x once, add to dx. The widest (gate and up forward, the input of down backward) are counted as added inside
        their products."""
        chosen, linears = self.shape.chosen(self.targets), self.shape.linears
        _, _, gates, down = self.shape.sites
        adapted = [site for site in self.shape.sites if set(site) & set(chosen)]
        read = {site: linears[site[0]][1] for site in adapted}
        made = {site: sum(linears[name][0] for name in site) for site in adapted}
        if is_forward:
            return sum(read.values()) + 2 * sum(size for site, size in made.items() if site != gates)
        added = sum(size for site, size in read.items() if site != down)
        return 2 * sum(made.values()) + sum(read.values()) + 2 * added

    def _reduces_s(self, lengths: Sequence[int]) -> float:
        """Seconds of sums over devices: each device receives 2 (N - 1) / N tensors in two messages, as in
        `adapters/devices.py`."""
        parts = self.tensor_parallel
        if parts == 1:
            return 0.0
        numbers = self.rows(lengths) * self.shape.hidden * (parts - 1) / parts
        return 2 * 2 * self.hardware.send_s(numbers * self.hardware.activation_bytes)

    def _head_s(self, lengths: Sequence[int]) -> float:
        rate = PRODUCT_IN_STEP * self.hardware.product_flop * self.tensor_parallel
        logits = 1.5 * self._moved_s(self.rows(lengths) * self.shape.vocabulary / self.tensor_parallel)
        return 2 * self.shape.head_weights * self.rows(lengths) / rate + logits

    @property
    def _launches_s(self) -> float:
        return KERNELS_PER_LAYER * self.hardware.launch_s

    def _moved_s(self, numbers: float) -> float:
        return numbers * self.hardware.activation_bytes / self.hardware.memory_rate
