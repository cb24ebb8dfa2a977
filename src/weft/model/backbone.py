"""The frozen model with its slots: runs packed microbatches and gives every segment its own loss and gradients."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from weft.adapters.adapter import Adapter
from weft.adapters.devices import Devices
from weft.adapters.frozen import Fp8, quantisation
from weft.adapters.head import HEAD, HeadShape, HeadWeights
from weft.adapters.linear import SlotLinear
from weft.adapters.linear_modules import linear_modules
from weft.adapters.method import Attachment, LinearShape, Method
from weft.adapters.part import PartShape
from weft.adapters.routing import Routing
from weft.adapters.row_place import RowSite
from weft.adapters.targets import choose_modules, refuse_experts
from weft.adapters.token_rows import INPUT_ROWS, OUTPUT_ROWS, InputTokenRows, TokenRows
from weft.data.tokens.tokenise import with_new_tokens
from weft.errors import ConfigError, ModelError
from weft.kernels.device import capability, is_gpu
from weft.kernels.device_event import DeviceEvent
from weft.kernels.launch import has_triton
from weft.methods.registry import has_kernels, method_of
from weft.methods.virtual_tokens.files import INPUT_PATH, layer_path
from weft.model.embeddings import Embeddings
from weft.model.fused.model import FusedModel, fuse, why_not
from weft.model.fused.path import FusedPath
from weft.model.loss import Head, head_of
from weft.model.model_part import WHOLE, ModelPart, plain_parameter
from weft.model.other_places import block_paths_of, blocks_of, inputs_of, keys_and_values_of
from weft.model.own_head import logits_of
from weft.model.packed import PackedBatch
from weft.model.packing import experts, own_attention
from weft.model.path import Memory, Path
from weft.model.reference import ReferencePath
from weft.model.scores import PendingScores
from weft.model.shards.ring import LayerRing
from weft.objectives.heads.head_objective import HeadObjective
from weft.objectives.metrics import Score
from weft.plan.cost.memory import MemoryModel
from weft.plan.cost.shape import ModelShape
from weft.spec import AdapterSpec

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from weft.model.ahead.compile_ahead import CompileAhead


class Backbone:
    """One frozen model that many adapters share."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str, part: ModelPart | None = None
    ) -> None:
        """Takes over `model`: its linears become slot linears. Use `backbone.load.load_backbone`.

        `part`: what of a whole model it is, if not all.
        """
        self.model = model
        self.part = part
        self.tokenizer = tokenizer
        self.name = name
        self.routing = Routing()
        self.linears: dict[str, SlotLinear] = {}
        """Every linear but the output head, by path."""
        self.kernels = "reference: as loaded"
        """Which path runs, and why."""
        self._install(torch.zeros((), device=self.device, requires_grad=True))
        blocks = block_paths_of(model)
        self.blocks = blocks_of(model, blocks, self.routing)
        """The outputs of attention and MLP blocks, by the blocks' paths; none where the family has no description."""
        self._heads: dict[int, HeadWeights] = {}
        """The heads of jobs that have one, by slot; both paths read them."""
        self.embeddings = Embeddings(model, tokenizer, part)
        """The input embedding and the output head, of which adapters may have rows of their own."""
        self._output_rows: dict[int, TokenRows] = {}
        """Rows of the output head that jobs have of their own, by slot."""
        inputs = inputs_of(model, tokenizer, self.routing)
        self._inputs = inputs
        self.reference = ReferencePath(model, self.linears, inputs, self.routing, self._heads, self._output_rows)
        """Transformers' own modules: the way of adapters whose method has no kernels."""
        self.path: Path = self.reference
        """How microbatches run, unless an adapter's method has no kernels."""
        self._places: dict[Attachment, Mapping[str, SlotLinear | RowSite]] = {
            Attachment.LINEAR: self.linears,
            Attachment.BLOCK_OUTPUT: self.blocks,
            Attachment.INPUT: {INPUT_PATH: inputs} if part is None or part.is_first else {},
            Attachment.KEYS_AND_VALUES: keys_and_values_of(model, part, self.routing),
        }
        self._paths = {kind: list(places) for kind, places in self._places.items()}
        """Of the whole model."""
        if part is not None:
            layers = [layer_path(layer) for layer in range(part.num_layers)]
            whole = {Attachment.LINEAR: getattr(model, WHOLE), Attachment.BLOCK_OUTPUT: blocks}
            self._paths = {**whole, Attachment.INPUT: [INPUT_PATH], Attachment.KEYS_AND_VALUES: layers}
        self.devices: Devices | None = None
        """That have the other parts of every layer; None where this one has all of them."""
        self._leading: dict[int, int] = {}
        self._tokenizers: dict[int, PreTrainedTokenizerBase] = {}
        """Of slots whose adapters have new tokens."""
        self._slot_paths: dict[int, Path] = {}
        self.ring: LayerRing | None = None
        """Where the frozen weights of the layers come and go, if they are spread over several devices."""
        self.ahead: CompileAhead | None = None
        """Kernels that are being compiled for it; the first microbatch waits for them."""
        self._waited_s = 0.0

    @property
    def device(self) -> torch.device:
        """Where the model lives."""
        return plain_parameter(self.model).device

    @property
    def works_on(self) -> bool:
        """Whether the device works on after `launch` returns, so that more can be asked of it before results are in."""
        return is_gpu(self.device)

    def wait(self) -> None:
        """Until the device has done all that was asked of it."""
        DeviceEvent(self.device).wait()

    @property
    def dtype(self) -> torch.dtype:
        """Type of the frozen weights."""
        return plain_parameter(self.model).dtype

    @property
    def vocabulary(self) -> int:
        """Tokens the model knows."""
        embeddings: Any = self.model.get_input_embeddings()
        return int(embeddings.weight.shape[0])

    @property
    def max_positions(self) -> int:
        """Longest sample the model has positions for."""
        config = self.model.config
        longest: int = getattr(config, "max_position_embeddings", 2**31)
        rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
        # Some families have one set of settings per kind of layer.
        kinds = [kind for kind in rope.values() if isinstance(kind, dict)] or [rope]
        # These two rescale every position once any sample in the buffer is long: a neighbour would change my result.
        limited = [kind for kind in kinds if kind.get("rope_type") in ("dynamic", "longrope")]
        return min([longest, *(int(kind.get("original_max_position_embeddings") or longest) for kind in limited)])

    def use_kernels(self, choice: str, memory: Memory | None = None) -> None:
        """Chooses the path: `reference`, `fused`, or `auto` for fused where it is the faster one and fits the model.

        To be called before adapters are attached.
        """
        assert not self._slot_paths, "adapters are attached already"
        obstacle = why_not(self.model, self.linears, self.device, self.dtype)
        if choice == "auto":
            obstacle = obstacle or why_reference(self.device, self.dtype)
        if choice == "reference" or (choice == "auto" and obstacle):
            self.path = self.reference
            self.kernels = "reference: asked for" if choice == "reference" else f"reference: {obstacle}"
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
        self.kernels = "fused: " + (triton if self.works_on else "plain torch twins")

    def gather_by(self, ring: LayerRing) -> None:
        """Lets microbatches wait at every layer for its frozen weights; use `backbone.shards.sharing.share_layers`."""
        self.ring = ring
        self.reference.gather_by(ring)
        if isinstance(self.path, FusedPath):
            self.path.gather_by(ring)

    @property
    def num_bytes(self) -> int:
        """Memory of the frozen weights on this device."""
        parameters = {id(p): p for p in self.model.parameters()}
        if self.ring is not None:
            spread = [x for linear in self.linears.values() for x in linear.frozen.stored.values()]
            parameters = {key: p for key, p in parameters.items() if key not in {id(x) for x in spread}}
        own = sum(p.numel() * p.element_size() for p in parameters.values())
        return own + (0 if self.ring is None else self.ring.num_bytes)

    def _numbers(self, fused: FusedModel) -> dict[str, int]:
        """The modules of the fused path's table by the paths of this backbone's places."""
        numbers = {path: number for number, path in enumerate(self.linears)}
        places = [layer.places for layer in fused.layers]
        ends = [end.module for own in places for end in (own.attention_end, own.mlp_end)]
        numbers |= dict(zip(self.blocks, ends, strict=True))
        first = 0 if self.part is None else self.part.first
        numbers |= {layer_path(i): own.keys_and_values for i, own in enumerate(places, first)}
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
        """A fresh adapter for this backbone, beside it if no other device is named; it trains once attached.

        `objective` is one that needs a head; `gradient_sum` is the job's setting.
        """
        self._refuse_lossless(spec)
        head = None
        if objective is not None:
            head = HeadShape(objective.num_labels, self.head.weight_VD.shape[1], objective.has_bias)
        device = self.device if device is None else device
        parts = self._parts(spec, head)
        places, is_any_order = self._targets(spec), self._adds_in_any_order(spec, gradient_sum)
        return Adapter(spec, method_of(spec), places, seed, device, parts, has_any_order_sums=is_any_order)

    def stored_adapter(self, spec: AdapterSpec, paths: Iterable[str], head: HeadShape | None = None) -> Adapter:
        """An adapter beside the backbone that sits where a file says; its weights are loaded next."""
        method = method_of(spec)
        places = {path: self._places[method.attachment][path] for path in paths}
        return Adapter(spec, method, places, 0, self.device, self._parts(spec, head))

    def _parts(self, spec: AdapterSpec, head: HeadShape | None) -> dict[str, PartShape]:
        """What an adapter has besides its method's tensors, by name."""
        return {**({} if head is None else {HEAD: head}), **self.embeddings.shapes_here(spec)}

    def check_adapter(self, spec: AdapterSpec) -> None:
        """ConfigError if an adapter does not fit this backbone; makes none."""
        self._refuse_lossless(spec)
        method_of(spec).check(spec, _shapes(self._targets(spec)))
        self.embeddings.shapes(spec)

    def _refuse_lossless(self, spec: AdapterSpec) -> None:
        """ConfigError if an adapter is to make up for what weights have lost that have lost nothing."""
        # A skeleton does not know how its weights will be stored.
        has_lost = self.device.type == "meta" or any(linear.read_original for linear in self.linears.values())
        if spec.init_lora_weights != "loftq" or has_lost:
            return
        raise ConfigError(
            "loftq makes up for what quantised weights have lost, and these are not quantised; set quantize, or use "
            "pissa.",
            where="adapter.init_lora_weights",
        )

    def _adds_in_any_order(self, spec: AdapterSpec, gradient_sum: str) -> bool:
        """True if gradients are added in any order; ConfigError where that is not supported."""
        if gradient_sum != "any_order":
            return False
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
        """Adapters of different lanes cannot share a microbatch: those that no kernel can run have one apart."""
        path = self._path_for(spec)
        return "" if path is self.path else path.name

    def kernel_bytes(self, spec: AdapterSpec) -> int:
        """What kernels hold of an adapter besides a copy of its parameters."""
        if self._path_for(spec) is self.reference:
            return 0
        return method_of(spec).kernel_bytes(spec, _shapes(self._targets(spec)), self.dtype.itemsize)

    def path_of(self, slot: int | None) -> Path:
        """The path that runs the samples of a slot."""
        return self.path if slot is None else self._slot_paths.get(slot, self.path)

    def has_own_head(self, slot: int | None) -> bool:
        """Whether a slot's adapter has rows of the output head of its own."""
        return slot in self._output_rows

    def leading_rows(self, slot: int | None) -> int:
        """Rows in front of each sample that a slot's adapter fills."""
        return 0 if slot is None else self._leading.get(slot, 0)

    def tokenizer_of(self, slot: int | None) -> PreTrainedTokenizerBase:
        """The tokenizer that a slot's adapter reads and writes with."""
        return self.tokenizer if slot is None else self._tokenizers.get(slot, self.tokenizer)

    def activation_bytes(self, capacity: int, adapters: Collection[AdapterSpec]) -> int:
        """What a microbatch may hold between forward and backward, whichever of these adapters takes part."""
        fused = [spec for spec in adapters if has_kernels(spec)]
        widest = max([1, *(method_of(spec).kernel_rank(spec) for spec in fused)])
        found = [self.path.activation_bytes(capacity, widest, {method_of(spec).kernel_keeps for spec in fused})]
        for spec in adapters:
            if not has_kernels(spec):
                kept = capacity * self._kept_width(spec) * self.dtype.itemsize
                kept += method_of(spec).workspace_bytes + self._rows_bytes(spec)
                found.append(self.reference.activation_bytes(capacity, widest) + kept)
        return max(found)

    def _kept_width(self, spec: AdapterSpec) -> int:
        """Numbers of a row that an adapter's slots keep on the reference path, beside the linears' own."""
        method = method_of(spec)
        return sum(method.saved_width(spec, path, shape) for path, shape in _shapes(self._targets(spec)).items())

    def _rows_bytes(self, spec: AdapterSpec) -> int:
        """What a microbatch holds of rows of tokens: a copy as the activations are, and a sum of gradients."""
        num = sum(sum(shape.sizes) for shape in self.embeddings.shapes_here(spec).values())
        return num * (self.dtype.itemsize + 4)

    def _path_for(self, spec: AdapterSpec) -> Path:
        return self.path if has_kernels(spec) else self.reference

    def shapes_for(self, method: Method) -> dict[str, LinearShape]:
        """Every place that adapters of a method can sit in, by path, with its outputs and inputs."""
        return _shapes(self._places[method.attachment])

    def places(self, attachment: Attachment) -> Mapping[str, SlotLinear | RowSite]:
        """Every place of a kind where adapters can sit, by path."""
        return self._places[attachment]

    def paths_for(self, method: Method) -> list[str]:
        """Every place of the whole model that adapters of a method can sit in."""
        return self._paths[method.attachment]

    def targets(self, spec: AdapterSpec) -> list[str]:
        """The places of the whole model where an adapter sits."""
        refuse_experts(spec, self._experts)
        method = method_of(spec)
        return choose_modules(spec, method.attachment, self.paths_for(method))

    def _targets(self, spec: AdapterSpec) -> dict[str, SlotLinear | RowSite]:
        places = self._places[method_of(spec).attachment]
        return {path: places[path] for path in self.targets(spec) if path in places}

    def attach(self, adapter: Adapter) -> int:
        """Puts an adapter on a free slot and returns the slot."""
        path = self._path_for(adapter.spec)
        slot = path.take_slot(adapter)
        self._slot_paths[slot] = path
        self._leading[slot] = adapter.spec.num_leading_rows
        if adapter.head is not None:
            self._heads[slot] = adapter.head
        places = self._places[adapter.method.attachment]
        for module, weights in adapter.modules.items():
            places[module].put(slot, weights)
        if adapter.spec.new_tokens:
            self._tokenizers[slot] = with_new_tokens(self.tokenizer, adapter.spec.new_tokens)
        if INPUT_ROWS in adapter.token_rows:
            own = InputTokenRows(adapter.token_rows[INPUT_ROWS], self.embeddings.input_scale)
            self._inputs.put(slot, own)
        if OUTPUT_ROWS in adapter.token_rows:
            self._output_rows[slot] = adapter.token_rows[OUTPUT_ROWS]
        return slot

    def detach(self, slot: int) -> None:
        """Frees a slot."""
        self._slot_paths.pop(slot).free_slot(slot)
        self._leading.pop(slot)
        self._heads.pop(slot, None)
        self._output_rows.pop(slot, None)
        self._tokenizers.pop(slot, None)
        for places in self._places.values():
            for place in places.values():
                place.free(slot)

    def forward_backward(self, batch: PackedBatch, row_tile: int | None) -> list[float]:
        """Runs a microbatch; adds to every attached adapter's gradients; returns each segment's summed loss."""
        return self.launch(batch, row_tile).losses()

    def launch(self, batch: PackedBatch, row_tile: int | None) -> PendingScores:
        """Starts a microbatch, which adds to every attached adapter's gradients; a GPU works on after this returns."""
        return self._path_through(batch).launch(batch, row_tile)

    def look(self, batch: PackedBatch, row_tile: int | None) -> PendingScores:
        """Starts a microbatch forward only."""
        return self._path_through(batch).look(batch, row_tile)

    def scores(self, batch: PackedBatch, row_tile: int | None) -> list[Score]:
        """Each segment's score, without gradients."""
        return self.look(batch, row_tile).scores()

    @property
    def compiling_s(self) -> float:
        """Seconds in which microbatches have waited for kernels that are compiled ahead, and for captures, so far."""
        return self._waited_s + self.path.captured_s

    def _path_through(self, batch: PackedBatch) -> Path:
        """The path that runs a microbatch, when its kernels are there."""
        if self.ahead is not None:
            begun_s = time.perf_counter()
            self.ahead.wait()
            self._waited_s += time.perf_counter() - begun_s
            self.ahead = None
        paths = {self.path_of(slot) for slot in batch.segment_slots if slot is not None}
        assert len(paths) < 2, "jobs of different lanes share no microbatch"
        return paths.pop() if paths else self.path

    @torch.no_grad()
    def logits(
        self,
        batch: PackedBatch,
        rows: Sequence[int] | None = None,
        caches: list[Any] | None = None,
        entering_TD: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Logits (rows, V) of the given rows (default: all), continuing from `caches` while generating.

        `entering_TD`: what the layers before have made, where this is the last part of a model.
        """
        hidden_TD = self.reference.hidden(batch, None, caches, entering_TD=entering_TD)
        chosen = range(len(hidden_TD)) if rows is None else rows
        return logits_of(self.head, batch, self._output_rows, hidden_TD, chosen)

    @torch.no_grad()
    def pass_on(self, batch: PackedBatch, caches: list[Any], entering_TD: torch.Tensor | None) -> torch.Tensor:
        """What leaves a part of a model that is not the last one, while generating."""
        return self.reference.hidden(batch, None, caches, entering_TD=entering_TD)

    @property
    def head(self) -> Head:
        """The frozen output head."""
        return head_of(self.model)

    def _install(self, anchor: torch.Tensor) -> None:
        """Freezes the model and replaces every linear but the head; attention finds the routing on its module."""
        self.model.requires_grad_(False)
        self.model.eval()
        self._experts = experts.expert_weights(self.model)
        own_attention.prepare(self.model)
        experts.prepare(self.model, self.routing)
        for path, linear in linear_modules(self.model).items():
            parent, _, leaf = path.rpartition(".")
            slotted = SlotLinear(linear, self.routing, anchor)
            setattr(self.model.get_submodule(parent), leaf, slotted)
            self.linears[path] = slotted
        for module in self.model.modules():
            object.__setattr__(module, "weft_routing", self.routing)


def _named(spec: AdapterSpec) -> str:
    """A method, and the start that makes it another one."""
    start = spec.init_lora_weights
    return f"{spec.method} with {start}" if isinstance(start, str) and spec.method == "lora" else spec.method


def _shapes(places: Mapping[str, SlotLinear | RowSite]) -> dict[str, LinearShape]:
    return {path: (place.out_features, place.in_features) for path, place in places.items()}


def why_reference(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the fused step would not be the faster one on a device; None if it is."""
    if not is_gpu(device):
        return "a CPU has no launches to save"
    if dtype is torch.float32:
        return "float32 weights; the kernels are made for bfloat16"
    if capability(device) < (8, 0):
        return "the GPU is older than Ampere"
    return None if has_triton() else "Triton is not installed"
