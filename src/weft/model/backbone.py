"""The frozen model with its slots: runs packed microbatches and gives every segment its own loss and gradients."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from weft.adapters.adapter import Adapter
from weft.adapters.devices import Devices
from weft.adapters.experts import ExpertSite
from weft.adapters.frozen import Fp8, quantisation
from weft.adapters.method import Attachment
from weft.adapters.parts import (
    HEAD,
    INPUT_ROWS,
    OUTPUT_ROWS,
    HeadShape,
    HeadWeights,
    InputTokenRows,
    PartShape,
    TokenRows,
)
from weft.adapters.routing import Routing
from weft.adapters.sites import SlotLinear, linear_modules
from weft.data.tokenise import with_new_tokens
from weft.errors import ConfigError, ModelError
from weft.kernels.device import capability, is_gpu
from weft.kernels.device_event import DeviceEvent
from weft.kernels.launch import has_triton
from weft.methods.registry import has_kernels, method_of
from weft.methods.virtual_tokens.method import INPUT_PATH, layer_path
from weft.model.fused.decode import FusedDecoder
from weft.model.fused.model import FusedModel, fuse, why_not
from weft.model.fused.path import FusedPath
from weft.model.loss import Head, head_of
from weft.model.model_part import BackboneSites, ModelPart, has_per_layer_inputs, inputs_of, plain_parameter
from weft.model.packed import PackedBatch
from weft.model.packing import attention, experts, mixers
from weft.model.packing.kept import row_bytes, trained_width
from weft.model.path import Memory, Path, PendingScores, ReferencePath
from weft.model.shards import LayerRing
from weft.model.trained_rows import Embeddings, logits_of
from weft.objectives.heads import HeadObjective
from weft.objectives.objective import Score
from weft.plan.cost.memory import MemoryModel
from weft.plan.cost.shape import ModelShape
from weft.spec import AdapterSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from weft.model.ahead.compile_ahead import CompileAhead


class Backbone:
    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str, part: ModelPart | None = None
    ) -> None:
        """Takes over `model`: its linears become slot linears. `part`: what it is of a whole model, if not all."""
        self.model = model
        self.part = part
        self.tokenizer = tokenizer
        self.name = name
        self.digests: dict[str, str] = {}
        """Digests of the files it was loaded from (`source.py`); empty if it was made in memory."""
        self.memory_limit: int | None = None
        """Most bytes of this process, on a CPU; None: as many as are free."""
        self.routing = Routing()
        self.linears: dict[str, SlotLinear] = {}
        self.kernels = "reference: as loaded"
        self._experts = self._install(torch.zeros((), device=self.device, requires_grad=True))
        self._heads: dict[int, HeadWeights] = {}
        """Heads of jobs by slot; both paths read them."""
        self.embeddings = Embeddings(model, tokenizer, part)
        """The input embedding and the output head, whose rows adapters may train."""
        self._output_rows: dict[int, TokenRows] = {}
        inputs = inputs_of(model, tokenizer, self.routing)
        self._inputs = inputs
        self.reference = ReferencePath(model, self.linears, inputs, self.routing, self._heads, self._output_rows)
        """The path through transformers' own modules, for adapters whose method has no kernels."""
        self.path: Path = self.reference
        self.sites = BackboneSites(model, part, self.linears, self._experts, inputs)
        self.devices: Devices | None = None
        """The devices with the other parts of every layer; None if this device has all parts."""
        self._leading: dict[int, int] = {}
        self._tokenizers: dict[int, PreTrainedTokenizerBase] = {}
        self._slot_paths: dict[int, Path] = {}
        self.ring: LayerRing | None = None
        """The ring through which weights of layers come and go, if they are spread over several devices."""
        self.ahead: CompileAhead | None = None
        """The compilation of its kernels ahead; the first microbatch waits for it."""
        self._waited_s = 0.0

    @property
    def device(self) -> torch.device:
        return plain_parameter(self.model).device

    @property
    def works_on(self) -> bool:
        """Whether the device still works after `launch` returns, so that more can be launched before results arrive."""
        return is_gpu(self.device)

    def wait(self) -> None:
        DeviceEvent(self.device).wait()

    @property
    def dtype(self) -> torch.dtype:
        return plain_parameter(self.model).dtype

    @property
    def vocabulary(self) -> int:
        embeddings: Any = self.model.get_input_embeddings()
        return int(embeddings.weight.shape[0])

    @property
    def max_positions(self) -> int:
        """Longest sample that the model has positions for."""
        config = self.model.config
        longest: int = getattr(config, "max_position_embeddings", 2**31)
        rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
        # Some families have one set of settings per kind of layer.
        kinds = [kind for kind in rope.values() if isinstance(kind, dict)] or [rope]
        # These two rescale every position once any sample in the buffer is long: a neighbour would change my result.
        limited = [kind for kind in kinds if kind.get("rope_type") in ("dynamic", "longrope")]
        return min([longest, *(int(kind.get("original_max_position_embeddings") or longest) for kind in limited)])

    def use_kernels(self, choice: str, memory: Memory | None = None) -> None:
        """Chooses the path: `reference`, `fused`, or `auto` for fused where it is faster and fits the model. Must be
        called before adapters are attached."""
        assert not self._slot_paths, "adapters are attached already"
        obstacle = why_not(self.model, self.linears, self.device, self.dtype)
        if choice == "auto":
            obstacle = obstacle or why_reference(self.device, self.dtype)
        if choice == "reference" or (choice == "auto" and obstacle):
            self.path = self.reference
            self.kernels = "reference: requested" if choice == "reference" else f"reference: {obstacle}"
            if choice == "auto" and why_reference(self.device, self.dtype) is None:
                self.reference.use_lora_kernels()
                self.kernels += "; LoRA in Triton"
            return
        if obstacle:
            raise ModelError(f"the fused kernels do not fit: {obstacle}; use auto or reference.", where="kernels")
        memory = memory or Memory()
        fused = fuse(self.model, self.linears, self.part, self.devices)
        parts = (fused, self._numbers(fused), self.head, memory)
        lane = 0 if self.part is None else self.part.first
        self.path = FusedPath(*parts, self._memory_model(memory), self._heads, lane)
        is_captured = self.devices is None or self.devices.can_be_recorded
        triton = "Triton and captured graphs" if is_captured else "Triton"
        self.kernels = "fused: " + (triton if self.works_on else "plain torch")

    def gather_by(self, ring: LayerRing) -> None:
        """Makes microbatches wait at every layer for its frozen weights; use `model/divided.py`."""
        self.ring = ring
        self.reference.gather_by(ring)
        if isinstance(self.path, FusedPath):
            self.path.gather_by(ring)

    @property
    def num_bytes(self) -> int:
        parameters = {id(p): p for p in self.model.parameters()}
        if self.ring is not None:
            spread = [x for linear in self.linears.values() for x in linear.frozen.stored.values()]
            parameters = {key: p for key, p in parameters.items() if key not in {id(x) for x in spread}}
        own = sum(p.numel() * p.element_size() for p in parameters.values())
        return own + (0 if self.ring is None else self.ring.num_bytes)

    def _numbers(self, fused: FusedModel) -> dict[str, int]:
        numbers = {path: number for number, path in enumerate(self.linears)}
        sites = [layer.sites for layer in fused.layers]
        ends = [end.module for own in sites for end in (own.attention_end, own.mlp_end)]
        numbers |= dict(zip(self.sites.of(Attachment.BLOCK_OUTPUT), ends, strict=True))
        first = 0 if self.part is None else self.part.first
        numbers |= {layer_path(i): own.keys_and_values for i, own in enumerate(sites, first)}
        return {**numbers, INPUT_PATH: fused.input_rows}

    def _memory_model(self, memory: Memory) -> MemoryModel:
        weights = [linear.frozen for linear in self.linears.values()]
        shape = ModelShape.from_config(self.model.config.to_dict(), self.name)
        if self.part is not None:
            shape = replace(shape, num_layers=self.part.end - self.part.first)
        copies = min((weight.copies for weight in weights if isinstance(weight, Fp8)), default=1)
        count = 1 if self.devices is None else self.devices.count
        kind = quantisation(weights)
        return MemoryModel(shape, kind, memory.recompute, self.dtype.itemsize, copies, tensor_parallel=count)

    def new_adapter(
        self,
        spec: AdapterSpec,
        seed: int,
        device: torch.device | None = None,
        objective: HeadObjective | None = None,
        gradient_sum: str = "in_order",
    ) -> Adapter:
        """A new adapter for this backbone, on its device by default; it trains once attached. `objective` is one that
        needs a head; `gradient_sum` is the job's setting."""
        self._refuse_lossless(spec)
        self._refuse_rows(spec)
        head = None
        if objective is not None:
            head = HeadShape(objective.num_labels, self.head.weight_VD.shape[1], objective.has_bias)
        device, parts = device or self.device, self._parts(spec, head)
        sites, is_any_order = self.sites.targeted(spec), self._adds_in_any_order(spec, gradient_sum)
        return Adapter(
            spec, method_of(spec), sites, seed, device, parts, has_any_order_sums=is_any_order, devices=self.devices
        )

    def stored_adapter(
        self,
        spec: AdapterSpec,
        paths: Iterable[str],
        head: HeadShape | None = None,
        device: torch.device | None = None,
    ) -> Adapter:
        """An adapter beside the backbone at the sites of a file, on its device by default; its weights are loaded next,
        and it does not train."""
        sites = self.sites.stored(spec, paths)
        return Adapter(spec, method_of(spec), sites, None, device or self.device, self._parts(spec, head))

    def _parts(self, spec: AdapterSpec, head: HeadShape | None) -> dict[str, PartShape]:
        return {**({} if head is None else {HEAD: head}), **self.embeddings.shapes_here(spec)}

    def check_adapter(self, spec: AdapterSpec) -> None:
        self._refuse_lossless(spec)
        self._refuse_rows(spec)
        method_of(spec).check(spec, self.sites.shapes(spec))
        self.embeddings.shapes(spec)

    def _refuse_rows(self, spec: AdapterSpec) -> None:
        """ConfigError for rows that are no tokens of a model whose layers have embeddings of their own."""
        if has_per_layer_inputs(self.model) and (spec.new_tokens or method_of(spec).attachment is Attachment.INPUT):
            what = "new_tokens" if spec.new_tokens else spec.method
            raise ConfigError(
                f"every layer of {self.model.config.model_type} has embeddings of the known tokens, so {what} is not "
                "supported; use another method.",
                where="adapter.new_tokens" if spec.new_tokens else "adapter.method",
            )

    def _refuse_lossless(self, spec: AdapterSpec) -> None:
        # A skeleton does not know how its weights will be stored.
        has_lost = self.device.type == "meta" or any(linear.read_original for linear in self.linears.values())
        if spec.init_lora_weights != "loftq" or has_lost:
            return
        raise ConfigError(
            "loftq needs quantised weights, whose loss it makes up for; set quantize, or use pissa.",
            where="adapter.init_lora_weights",
        )

    def _adds_in_any_order(self, spec: AdapterSpec, gradient_sum: str) -> bool:
        """True if gradients are added in any order; ConfigError if that is not supported."""
        if gradient_sum != "any_order":
            return False
        if spec.experts == "full":
            reason = "any_order keeps 16 more bytes for each of the parameters, of which experts: full has many"
            raise ConfigError(f"{reason}; use in_order, or experts: shared.", where="gradient_sum")
        if self._path_for(spec) is not self.reference:
            if not method_of(spec).has_any_order_kernels:
                reason = f"any_order has fused kernels for lora only, not for {_named(spec)}"
                where = "gradient_sum"
                raise ConfigError(f"{reason}; use in_order, or device cpu with kernels reference.", where=where)
        elif self.works_on:
            reason = f"any_order needs a CPU or the fused kernels; the kernels here are {self.kernels}"
            raise ConfigError(f"{reason}; use in_order.", where="gradient_sum")
        return True

    def lane(self, spec: AdapterSpec) -> str:
        """Adapters of different lanes cannot share a microbatch: those without kernels have their own lane."""
        path = self._path_for(spec)
        return "" if path is self.path else path.name

    def kernel_bytes(self, spec: AdapterSpec, paths: Iterable[str] | None = None) -> int:
        """What kernels need for an adapter besides its weights and their copy; `paths`: those of a file."""
        if not self._path_for(spec).copy_bytes:
            return 0
        return method_of(spec).kernel_bytes(spec, self.sites.shapes(spec, paths), self.dtype.itemsize)

    def path_of(self, slot: int | None) -> Path:
        return self.path if slot is None else self._slot_paths.get(slot, self.path)

    def has_own_head(self, slot: int | None) -> bool:
        return slot in self._output_rows

    def leading_rows(self, slot: int | None) -> int:
        return 0 if slot is None else self._leading.get(slot, 0)

    def tokenizer_of(self, slot: int | None) -> PreTrainedTokenizerBase:
        return self.tokenizer if slot is None else self._tokenizers.get(slot, self.tokenizer)

    def activation_bytes(self, capacity: int, adapters: Collection[AdapterSpec]) -> int:
        """Upper bound of a microbatch's memory between forward and backward, with any of these adapters."""
        fused = [spec for spec in adapters if has_kernels(spec)]
        widest = max([1, *(method_of(spec).kernel_rank(spec) for spec in fused)])
        found = [self.path.activation_bytes(capacity, widest, {method_of(spec).kernel_keeps for spec in fused})]
        for spec in adapters:
            if not has_kernels(spec):
                kept = capacity * self.sites.saved_width(spec) * self.dtype.itemsize
                kept += method_of(spec).workspace_bytes + self._rows_bytes(spec)
                found.append(self.reference.activation_bytes(capacity, widest) + kept)
        return max(found) + capacity * self._trained_width(adapters) * self.dtype.itemsize

    def row_bytes(self, dtype: torch.dtype, adapters: Iterable[AdapterSpec]) -> int:
        """Bytes that the reference path keeps of a row with any of these adapters, at most; without weights, too."""
        return row_bytes(self.model, dtype) + self._trained_width(adapters) * dtype.itemsize

    def _trained_width(self, adapters: Iterable[AdapterSpec]) -> int:
        return trained_width(self.model, self.sites.unusual_targets(adapters))

    def _rows_bytes(self, spec: AdapterSpec) -> int:
        """Memory of a microbatch for rows of tokens: a copy as activations, and a sum of gradients."""
        num = sum(sum(shape.sizes) for shape in self.embeddings.shapes_here(spec).values())
        return num * (self.dtype.itemsize + 4)

    def _path_for(self, spec: AdapterSpec) -> Path:
        return self.path if has_kernels(spec) else self.reference

    def attach(self, adapter: Adapter) -> int:
        path = self._path_for(adapter.spec)
        slot = path.take_slot(adapter)
        self._slot_paths[slot] = path
        self._leading[slot] = adapter.spec.num_leading_rows
        if adapter.head is not None:
            self._heads[slot] = adapter.head
        sites = self.sites.of(adapter.method.attachment)
        for module, weights in adapter.modules.items():
            sites[module].put(slot, weights)
        if adapter.spec.new_tokens:
            self._tokenizers[slot] = with_new_tokens(self.tokenizer, adapter.spec.new_tokens)
        if INPUT_ROWS in adapter.token_rows:
            own = InputTokenRows(adapter.token_rows[INPUT_ROWS], self.embeddings.input_scale)
            self._inputs.put(slot, own)
        if OUTPUT_ROWS in adapter.token_rows:
            self._output_rows[slot] = adapter.token_rows[OUTPUT_ROWS]
        return slot

    def detach(self, slot: int) -> None:
        self._slot_paths.pop(slot).free_slot(slot)
        self._leading.pop(slot)
        self._heads.pop(slot, None)
        self._output_rows.pop(slot, None)
        self._tokenizers.pop(slot, None)
        for site in self.sites.all():
            site.free(slot)

    def forward_backward(self, batch: PackedBatch, row_tile: int | None) -> list[float]:
        """Runs a microbatch; adds to every attached adapter's gradients; returns each segment's summed loss."""
        return self.launch(batch, row_tile).losses()

    def launch(self, batch: PackedBatch, row_tile: int | None) -> PendingScores:
        """Starts a microbatch, which adds to every attached adapter's gradients; a GPU continues after this returns."""
        return self._path_through(batch).launch(batch, row_tile)

    def look(self, batch: PackedBatch, row_tile: int | None) -> PendingScores:
        return self._path_through(batch).look(batch, row_tile)

    def scores(self, batch: PackedBatch, row_tile: int | None) -> list[Score]:
        return self.look(batch, row_tile).scores()

    @property
    def compiling_s(self) -> float:
        """Seconds that microbatches have waited for kernels compiled ahead, and for captures."""
        return self._waited_s + self.path.captured_s

    def _path_through(self, batch: PackedBatch) -> Path:
        if self.ahead is not None:
            begun_s = time.perf_counter()
            self.ahead.wait()
            self._waited_s += time.perf_counter() - begun_s
            self.ahead = None
        paths = {self.path_of(slot) for slot in batch.segment_slots if slot is not None}
        assert len(paths) < 2, "jobs of different lanes share no microbatch"
        return paths.pop() if paths else self.path

    def logits(self, batch: PackedBatch) -> torch.Tensor:
        """Logits (T, V) of all rows."""
        hidden_TD = self.read_on(batch, [])
        return self.logits_of(hidden_TD, batch.slots_at(range(len(hidden_TD))))

    @torch.no_grad()
    def logits_of(self, hidden_ND: torch.Tensor, slots: Sequence[int | None]) -> torch.Tensor:
        """Logits (N, V) of last hidden states, each by the head of its slot."""
        return logits_of(self.head, self._output_rows, hidden_ND, slots)

    def decoder(self, slot: int | None) -> FusedDecoder | None:
        """What continues sequences of a slot with keys and values in pages; None where the reference path does."""
        path = self.path_of(slot)
        return path.decoder if isinstance(path, FusedPath) else None

    @torch.no_grad()
    def read_on(self, batch: PackedBatch, caches: list[Any], entering_TD: torch.Tensor | None = None) -> torch.Tensor:
        """Last hidden states (T, D), continuing from `caches` while generating. `entering_TD`: output of the earlier
        layers, if this is a later part of a model."""
        return self.reference.hidden(batch, None, caches, entering_TD=entering_TD)

    @property
    def head(self) -> Head:
        return head_of(self.model)

    def _install(self, anchor: torch.Tensor) -> dict[str, ExpertSite]:
        """Freezes the model and replaces every linear except the head; attention and mixers find the routing there.
        Returns the products of routed experts, by path."""
        self.model.requires_grad_(False)
        self.model.eval()
        attention.prepare_attention(self.model)
        mixers.prepare_mixers(self.model)
        products = experts.prepare(self.model, self.routing)
        for path, linear in linear_modules(self.model).items():
            parent, _, leaf = path.rpartition(".")
            slotted = SlotLinear(linear, self.routing, anchor)
            setattr(self.model.get_submodule(parent), leaf, slotted)
            self.linears[path] = slotted
        for module in self.model.modules():
            object.__setattr__(module, "weft_routing", self.routing)
        return products


def _named(spec: AdapterSpec) -> str:
    """A method, and the start that makes it another one."""
    start = spec.init_lora_weights
    return f"{spec.method} with {start}" if isinstance(start, str) and spec.method == "lora" else spec.method


def why_reference(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the fused step would not be faster on a device; None if it is."""
    if not is_gpu(device):
        return "a CPU has no launches to save"
    if dtype is torch.float32:
        return "float32 weights; the kernels are made for bfloat16"
    if capability(device) < (8, 0):
        return "the GPU is older than Ampere"
    return None if has_triton() else "Triton is not installed"
