"""The reference path: transformers' own modules over slot linears, with autograd; plain torch that runs anywhere."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from weft.adapters.adapter import Adapter
from weft.adapters.head import HeadWeights
from weft.adapters.leading_rows import InputRows
from weft.adapters.linear import SlotLinear
from weft.adapters.method import Keeps
from weft.adapters.routing import Routing
from weft.adapters.token_rows import TokenRows
from weft.kernels.device import is_cpu
from weft.kernels.device_event import DeviceEvent
from weft.model.distill import run_distillation
from weft.model.heads import run_heads
from weft.model.judge import MicrobatchLoss, run_loss
from weft.model.loss import BlockedLoss, head_of
from weft.model.model_part import AbsentLayer, plain_parameter
from weft.model.own_head import loss_of
from weft.model.packed import PackedBatch
from weft.model.path import Memory
from weft.model.scores import PendingScores
from weft.model.shards.ring import LayerRing
from weft.plan.cost.rows import CPU_ROW_TILE

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, eq=False)
class PendingBackward:
    """What the losses of a microbatch leave to do."""

    grad_TD: torch.Tensor
    """Of the last hidden states."""
    scores: Callable[[DeviceEvent], PendingScores]
    """To be asked once all else has been asked of the device; given when the microbatch began."""


class ReferencePath:
    """Runs microbatches through the model's own modules."""

    name: ClassVar[str] = "reference"
    memory = Memory()
    copy_bytes = 0
    captured_s = 0.0

    def __init__(
        self,
        model: PreTrainedModel,
        linears: Mapping[str, SlotLinear],
        inputs: InputRows,
        routing: Routing,
        heads: Mapping[int, HeadWeights],
        output_rows: Mapping[int, TokenRows],
    ) -> None:
        """`routing` is the table that all places of the model share, `heads` those of jobs, by slot, and `output_rows`
        their own rows of the output head."""
        self._heads = heads
        self._output_rows = output_rows
        self._model = model
        self._linears = linears
        self._inputs = inputs
        self._routing = routing
        self._num_slots = 0
        self._ring: LayerRing | None = None

    def gather_by(self, ring: LayerRing) -> None:
        """Lets every layer wait for its frozen weights, on the way forward and on the way back."""
        self._ring = ring
        layers: Any = self._model.base_model.layers
        here = [layer for layer in layers if not isinstance(layer, AbsentLayer)]
        for index, layer in enumerate(here):
            layer.register_forward_pre_hook(lambda *_, index=index: ring.use(index))
            layer.register_forward_hook(lambda *given, index=index: _before_gradient(given[-1], ring, index))

    def take_slot(self, adapter: Adapter) -> int:
        """Gives an adapter a number below zero that no other has had; the fused path's are above zero."""
        self._num_slots += 1
        return -self._num_slots

    def free_slot(self, slot: int) -> None:
        """Has nothing to do: the slot linears hold all there is."""

    def launch(self, batch: PackedBatch, row_tile: int | None, *, through: bool = False) -> PendingScores:
        """Starts a microbatch forward and back; `through` also where no adapter asks for gradients."""
        begun = DeviceEvent(plain_parameter(self._model).device)
        hidden_TD = self.hidden(batch, row_tile, through=through)
        learnt = self.learn(hidden_TD.detach(), batch)
        self.go_back(hidden_TD, learnt.grad_TD)
        return learnt.scores(begun)

    def go_back(self, hidden_TD: torch.Tensor, grad_TD: torch.Tensor | None) -> None:
        """From the gradient of what `hidden` returned back to wherever something learns; nowhere if nothing does."""
        if self._ring is not None:
            self._ring.begin(back=True)
        if hidden_TD.requires_grad:
            hidden_TD.backward(grad_TD)
        if self._ring is not None:
            self._ring.end(then_back=False)

    def learn(self, hidden_TD: torch.Tensor, batch: PackedBatch) -> PendingBackward:
        """The losses behind the last hidden states, and the gradient of these."""
        rows_ND = hidden_TD[batch.supervised_N]
        passed = run_loss(self.loss(batch), rows_ND, batch.targets_N, batch.weights_N, batch.scored_groups)
        assert passed.grad_ND is not None
        grad_TD = torch.zeros_like(hidden_TD)
        grad_TD[batch.supervised_N] = passed.grad_ND
        headed = run_heads(hidden_TD, batch.heads, self._heads, grad_TD)
        taught = run_distillation(head_of(self._model), hidden_TD, batch.taught, grad_TD)
        return PendingBackward(grad_TD, lambda begun: PendingScores(passed, batch, begun, headed, taught))

    @torch.no_grad()
    def look(self, batch: PackedBatch, row_tile: int | None) -> PendingScores:
        """Starts a microbatch forward only."""
        begun = DeviceEvent(plain_parameter(self._model).device)
        return self.judge(self.hidden(batch, row_tile), batch, begun)

    def judge(self, hidden_TD: torch.Tensor, batch: PackedBatch, begun: DeviceEvent) -> PendingScores:
        """The scores behind the last hidden states of a microbatch that began then; nothing learns from them."""
        passed = run_loss(self.loss(batch), hidden_TD[batch.supervised_N], batch.targets_N, None, batch.scored_groups)
        headed = run_heads(hidden_TD, batch.heads, self._heads)
        taught = run_distillation(head_of(self._model), hidden_TD, batch.taught)
        return PendingScores(passed, batch, begun, headed, taught)

    @torch.no_grad()
    def read(self, batch: PackedBatch, row_tile: int | None) -> torch.Tensor:
        """Starts a microbatch forward only: the last hidden states of its supervised rows (N, D)."""
        return self.hidden(batch, row_tile)[batch.supervised_N]

    def hidden(
        self,
        batch: PackedBatch,
        row_tile: int | None,
        caches: list[Any] | None = None,
        *,
        through: bool = False,
        entering_TD: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Last hidden states (T, D), after the final norm; they continue from `caches` while generating.

        `entering_TD`: what the layers before have made, where this is a later part of a model. Where gradients are
        enabled, `go_back` has to follow.
        """
        self._routing.segments, self._routing.slots = batch.segments, batch.slots
        self._routing.tokens = batch.ids
        self._routing.bounds, self._routing.longest = batch.bounds, batch.longest
        self._routing.dropout_keys_T = batch.dropout_keys_T
        self._routing.row_tile = row_tile
        self._routing.caches = caches or []
        if entering_TD is None:
            embeds_1TD = self._inputs.adapted(self._embedded(batch)[None].requires_grad_(through))
        else:
            embeds_1TD = entering_TD[None]
        goes_back = torch.is_grad_enabled()
        if self._ring is not None:
            self._ring.begin(back=False)
        output = self._model.base_model(
            inputs_embeds=embeds_1TD,
            position_ids=batch.positions_T[None],
            attention_mask=None,
            use_cache=False,
        )
        if self._ring is not None:
            self._ring.end(then_back=goes_back)
        return output.last_hidden_state[0]  # type: ignore[no-any-return]

    def _embedded(self, batch: PackedBatch) -> torch.Tensor:
        """What the first layer sees of the tokens (T, D); new tokens have anything, until their jobs fill it in."""
        embeddings: Any = self._model.get_input_embeddings()
        ids_T, num_rows = batch.input_ids_T, embeddings.weight.shape[0]
        if batch.num_rows and batch.ids.max() >= num_rows:
            ids_T = ids_T.clamp(max=num_rows - 1)
        embedded: torch.Tensor = embeddings(ids_T)
        return embedded

    def row_tile(self, capacity: int) -> int:
        """A fixed block on a CPU; the whole microbatch on a GPU."""
        return CPU_ROW_TILE if is_cpu(plain_parameter(self._model).device) else capacity

    def activation_bytes(self, capacity: int, widest_rank: int, keeps: Collection[Keeps] = ()) -> int:
        """The input and output of every linear, once: an upper estimate."""
        width = sum(sum(linear.share.shape) for linear in self._linears.values())
        return capacity * plain_parameter(self._model).dtype.itemsize * width

    def loss(self, batch: PackedBatch) -> MicrobatchLoss:
        """What makes losses of the hidden states of a microbatch's supervised rows."""
        return loss_of(BlockedLoss(head_of(self._model)), batch, self._output_rows, plain_parameter(self._model).dtype)

    def forget(self) -> None:
        """Has nothing to give back."""


def _before_gradient(left: torch.Tensor, ring: LayerRing, layer: int) -> None:
    """Lets a layer's backward wait for its weights: nothing of it runs before the gradient of what left it is known."""
    if left.requires_grad:
        left.register_hook(lambda _: ring.use(layer))
