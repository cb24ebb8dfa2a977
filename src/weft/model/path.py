"""The two ways through a frozen model, as one protocol, and the scores of a microbatch that a device still works on.

A path, reference or fused, runs packed microbatches with the adapters on its slots. `Backbone` chooses one when kernels
are chosen; no other module needs to know which. The reference path is here: transformers' own modules over slot
linears, with autograd; plain torch that runs anywhere. The other one is in `fused/`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import numpy as np
import torch

from weft.adapters.adapter import Adapter
from weft.adapters.method import Keeps
from weft.adapters.parts import HeadWeights, TokenRows
from weft.adapters.routing import Routing
from weft.adapters.sites import InputRows, SlotLinear
from weft.adapters.slots import SlotKernels
from weft.kernels.device import is_cpu
from weft.kernels.device_event import AsyncCopy, DeviceEvent, sent
from weft.kernels.lora.linears import KernelRows
from weft.model.loss import BlockedLoss, DistillationPass, head_of, run_distillation
from weft.model.model_part import AbsentLayer, has_per_layer_inputs, plain_parameter
from weft.model.objective_loss import HeadPass, LossPass, MicrobatchLoss, run_heads, run_loss
from weft.model.packed import PackedBatch
from weft.model.packing.kept import row_bytes
from weft.model.shards import LayerRing
from weft.model.trained_rows import loss_of
from weft.objectives.distillation import MEASURED
from weft.objectives.objective import ACCURACY, LOSS, MetricSum, MetricTotals, Score
from weft.plan.cost.shape import CPU_ROW_TILE

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class PendingScores:
    def __init__(
        self,
        passed: LossPass,
        batch: PackedBatch,
        begun: DeviceEvent,
        headed: Sequence[HeadPass] = (),
        taught: Sequence[DistillationPass] = (),
    ) -> None:
        # Not all of it: the gradient's memory is needed again.
        self._results_2N, self._likelihoods = passed.results_2N, passed.results
        self._counts = batch.counts
        self._importance = batch.importance
        self._scored_groups = batch.scored_groups
        self._begun = begun
        measured = [torch.stack([each.losses_G, *each.metrics.values()]) for each in passed.results]
        self._measured = [AsyncCopy(values).begin() for values in measured]
        self._headed = headed
        units = [torch.cat([one.results.losses_U[:, None], one.results.measured_UK], dim=1) for one in headed]
        self._units = [AsyncCopy(values).begin() for values in units]
        self._taught = taught
        self._distilled_counts = [AsyncCopy(one.measured_KN).begin() for one in taught]
        self._arrival = AsyncCopy(passed.results_2N).begin()

    def scores(self) -> list[Score]:
        """Each segment's score, over its own rows only; waits for the device."""
        losses, hits = self._arrival.get().double().numpy()
        if self._importance is not None:
            losses = losses * self._importance
        found: list[Score] = []
        for end, count in zip(np.cumsum(self._counts).tolist(), self._counts, strict=True):
            own = slice(end - count, end)
            weight = count if self._importance is None else float(self._importance[own].sum())
            loss = MetricSum(float(losses[own].sum()), weight)
            found.append({LOSS: loss, ACCURACY: MetricSum(float(hits[own].sum()), count)})
        for scored, likelihood, values in zip(self._scored_groups, self._likelihoods, self._measured, strict=True):
            for segment in scored.learners:
                found[segment] = {ACCURACY: found[segment][ACCURACY]}
            for segment in scored.unlearned:
                found[segment] = {}
            for segment, group in zip(scored.leaders, values.get().double().t().tolist(), strict=True):
                loss, *others = group
                metrics = {name: MetricSum(value, 1) for name, value in zip(likelihood.metrics, others, strict=True)}
                known = {name: metric for name, metric in metrics.items() if not math.isnan(metric.total)}
                found[segment] = {**found[segment], LOSS: MetricSum(loss, 1), **known}
        self._add_heads(found)
        self._add_distillation(found)
        return found

    def _add_heads(self, found: list[Score]) -> None:
        for one, values in zip(self._headed, self._units, strict=True):
            labelled = one.labelled
            tallies: dict[int, MetricTotals] = {int(segment): MetricTotals() for segment in labelled.segments}
            units = zip(labelled.unit_segments, labelled.unit_labels, values.get().double().tolist(), strict=True)
            for segment, label, (loss, *measured) in units:
                tallies[int(segment)].add(labelled.objective.score(float(label), loss, measured))
            for segment, tally in tallies.items():
                found[segment] = tally.sums

    def _add_distillation(self, found: list[Score]) -> None:
        for one, values in zip(self._taught, self._distilled_counts, strict=True):
            measured_KN = values.get().double().numpy()
            for segment in np.unique(one.segments).tolist():
                own_KN = measured_KN[:, one.segments == segment]
                sums = zip(MEASURED, own_KN.sum(axis=1).tolist(), strict=True)
                found[segment] = {name: MetricSum(total, own_KN.shape[1]) for name, total in sums}

    def losses(self) -> list[float]:
        """Each segment's summed loss, over its own rows only; waits for the device."""
        return [score[LOSS].total for score in self.scores()]

    def wait(self) -> float:
        """Waits for the device; returns when its end was first seen, by `time.perf_counter`."""
        return self._arrival.moment.wait()

    def seconds(self, begun: DeviceEvent | None = None) -> float:
        """Seconds that the microbatch took, or since another moment; waits for the device."""
        return self._arrival.moment.seconds_since(begun or self._begun)

    def finite(self, owners: Sequence[int], num_owners: int) -> torch.Tensor:
        """For each owner, on the device: 1 if all losses of its segments are finite, else 0. `owners`: the owner of
        each segment; below 0 for none. Does not wait for the device."""
        indices = np.array(owners, dtype=np.int64).clip(min=-1) + 1
        checked = [(np.repeat(indices, self._counts), self._results_2N[0])]
        for scored, likelihood in zip(self._scored_groups, self._likelihoods, strict=True):
            checked.append((indices[list(scored.leaders)], likelihood.losses_G))
        for one in self._headed:
            checked.append((indices[one.labelled.unit_segments], one.results.losses_U))
        for taught in self._taught:
            checked.append((indices[taught.segments], taught.measured_KN[0]))
        device = self._results_2N.device
        bad_J = torch.zeros(num_owners + 1, device=device)
        for owner, losses in checked:
            bad_J.index_add_(0, sent(torch.from_numpy(owner), device), (~torch.isfinite(losses)).float())
        return (bad_J[1:] == 0).float()


Recompute = Literal["none", "mlp", "full"]


@dataclass(frozen=True)
class Memory:
    """Trades time for memory; no choice changes a result."""

    recompute: Recompute = "none"
    """Activations that are recomputed in backward: cheap ones, also a layer's widest product, or whole layers."""
    offload: bool = False
    """Whether other activations wait in host memory instead of the GPU's."""


class Path(Protocol):
    name: ClassVar[str]
    """Name in the records of a run: results of two paths differ in their last bits."""

    @property
    def captured_s(self) -> float: ...

    @property
    def memory(self) -> Memory: ...

    @property
    def copy_bytes(self) -> int:
        """Bytes per trainable parameter that a slot needs besides the adapter's own weights."""

    def take_slot(self, adapter: Adapter) -> int:
        """Gives an adapter a free slot and returns the slot's number."""

    def free_slot(self, slot: int) -> None: ...

    def launch(self, batch: PackedBatch, row_tile: int | None, *, through: bool = False) -> PendingScores:
        """Starts a microbatch forward and backward, which adds to the gradients of every adapter that takes part.
        Without adapters it runs forward only; `through` runs backward all the same, to measure its cost."""

    def look(self, batch: PackedBatch, row_tile: int | None) -> PendingScores: ...

    def loss(self, batch: PackedBatch) -> MicrobatchLoss: ...

    def read(self, batch: PackedBatch, row_tile: int | None) -> torch.Tensor:
        """Starts a microbatch forward only: the last hidden states of its supervised rows (N, D)."""

    def row_tile(self, capacity: int) -> int:
        """Rows per block of every frozen product: a property of the device, never of the batch's contents."""

    def activation_bytes(self, capacity: int, widest_rank: int, keeps: Collection[Keeps] = ()) -> int:
        """Upper bound of a microbatch's memory between forward and backward; `keeps`: of its methods."""

    def forget(self) -> None: ...


@dataclass(frozen=True, eq=False)
class PendingBackward:
    grad_TD: torch.Tensor
    scores: Callable[[DeviceEvent], PendingScores]
    """Returns the scores, given when the microbatch began; called once all other work has been launched."""


class ReferencePath:
    name: ClassVar[str] = "reference"
    memory = Memory()
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
        """`routing` is the table that all sites of the model share, `heads` are those of jobs by slot, and
        `output_rows` their trained rows of the output head."""
        self._heads = heads
        self._output_rows = output_rows
        self._model = model
        self._linears = linears
        self._inputs = inputs
        self._routing = routing
        self._num_slots = 0
        self._ring: LayerRing | None = None
        self._kernels: SlotKernels | None = None

    def use_lora_kernels(self) -> None:
        """Runs LoRA at linears by the fused path's kernels; called before adapters are attached."""
        like = plain_parameter(self._model)
        self._kernels = SlotKernels(self._linears, like.device, like.dtype)

    @property
    def copy_bytes(self) -> int:
        return 0 if self._kernels is None else plain_parameter(self._model).dtype.itemsize

    def gather_by(self, ring: LayerRing) -> None:
        """Makes every layer wait for its frozen weights, forward and backward."""
        self._ring = ring
        layers: Any = self._model.base_model.layers
        here = [layer for layer in layers if not isinstance(layer, AbsentLayer)]
        for index, layer in enumerate(here):
            layer.register_forward_pre_hook(lambda *_, index=index: ring.use(index))
            layer.register_forward_hook(lambda *given, index=index: _before_gradient(given[-1], ring, index))

    def take_slot(self, adapter: Adapter) -> int:
        """Gives an adapter a new number: below zero, unless kernels run it, whose tables count from one."""
        slot = None if self._kernels is None else self._kernels.take_slot(adapter)
        if slot is not None:
            return slot
        self._num_slots += 1
        return -self._num_slots

    def free_slot(self, slot: int) -> None:
        if self._kernels is not None:
            self._kernels.free_slot(slot)

    def launch(self, batch: PackedBatch, row_tile: int | None, *, through: bool = False) -> PendingScores:
        begun = DeviceEvent(plain_parameter(self._model).device)
        hidden_TD = self.hidden(batch, row_tile, through=through)
        learnt = self.learn(hidden_TD.detach(), batch)
        self.go_back(hidden_TD, learnt.grad_TD)
        return learnt.scores(begun)

    def go_back(self, hidden_TD: torch.Tensor, grad_TD: torch.Tensor | None) -> None:
        """Runs backward from the gradient of what `hidden` returned to all trained parameters, if there are any."""
        if self._ring is not None:
            self._ring.begin(back=True)
        if hidden_TD.requires_grad:
            hidden_TD.backward(grad_TD)
        if self._ring is not None:
            self._ring.end(then_back=False)

    def learn(self, hidden_TD: torch.Tensor, batch: PackedBatch) -> PendingBackward:
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
        begun = DeviceEvent(plain_parameter(self._model).device)
        return self.score(self.hidden(batch, row_tile), batch, begun)

    def score(self, hidden_TD: torch.Tensor, batch: PackedBatch, begun: DeviceEvent) -> PendingScores:
        """The scores of the last hidden states of a microbatch that began at this moment, without gradients."""
        passed = run_loss(self.loss(batch), hidden_TD[batch.supervised_N], batch.targets_N, None, batch.scored_groups)
        headed = run_heads(hidden_TD, batch.heads, self._heads)
        taught = run_distillation(head_of(self._model), hidden_TD, batch.taught)
        return PendingScores(passed, batch, begun, headed, taught)

    @torch.no_grad()
    def read(self, batch: PackedBatch, row_tile: int | None) -> torch.Tensor:
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
        """Last hidden states (T, D), after the final norm; they continue from `caches` while generating. `entering_TD`:
        output of the earlier layers, if this is a later part of a model. With gradients enabled, `go_back` must
        follow."""
        self._routing.segments, self._routing.slots = batch.segments, batch.slots
        self._routing.tokens = batch.ids
        self._routing.blocks = batch.blocks
        self._routing.bounds, self._routing.longest = batch.bounds, batch.longest
        self._routing.dropout_keys_T = batch.dropout_keys_T
        self._routing.row_tile = row_tile
        self._routing.by_kernels = self._kernel_rows(batch) if row_tile is not None else None
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
            **self._per_layer_inputs(batch, entering_TD),
        )
        if self._ring is not None:
            self._ring.end(then_back=goes_back)
        return output.last_hidden_state[0]  # type: ignore[no-any-return]

    def _kernel_rows(self, batch: PackedBatch) -> KernelRows | None:
        if self._kernels is None:
            return None
        return self._kernels.rows(batch.spans, batch.num_rows, batch.keys_T, drops=batch.drops)

    def _per_layer_inputs(self, batch: PackedBatch, entering_TD: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """What a model adds to each layer by the token itself, in families that do so."""
        if entering_TD is not None or not has_per_layer_inputs(self._model):
            return {}
        base: Any = self._model.base_model
        return {"per_layer_inputs": base.get_per_layer_inputs(batch.input_ids_T[None], None)}

    def _embedded(self, batch: PackedBatch) -> torch.Tensor:
        """Embeddings of the tokens (T, D); rows of new tokens are arbitrary until their jobs fill them."""
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
        return capacity * self._row_bytes

    @cached_property
    def _row_bytes(self) -> int:
        return row_bytes(self._model, plain_parameter(self._model).dtype)

    def loss(self, batch: PackedBatch) -> MicrobatchLoss:
        return loss_of(BlockedLoss(head_of(self._model)), batch, self._output_rows, plain_parameter(self._model).dtype)

    def forget(self) -> None:
        """Does nothing: this path keeps no memory."""


def _before_gradient(left: torch.Tensor, ring: LayerRing, layer: int) -> None:
    """Makes a layer's backward wait for its weights: it starts once the gradient of the layer's output is known."""
    if left.requires_grad:
        left.register_hook(lambda _: ring.use(layer))
