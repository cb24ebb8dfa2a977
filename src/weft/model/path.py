"""The two ways through a frozen model, as one protocol, and the scores of a microbatch that a device still works on.

A path, reference or fused, runs packed microbatches with the adapters on its slots. `Backbone` chooses one when kernels
are chosen; no other module needs to know which.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import numpy as np
import torch

from weft.adapters.adapter import Adapter
from weft.adapters.method import Keeps
from weft.kernels.device_event import AsyncCopy, DeviceEvent, sent
from weft.model.loss import DistillationPass
from weft.model.objective_loss import HeadPass, LossPass, MicrobatchLoss
from weft.model.packed import PackedBatch
from weft.objectives.distillation import MEASURED
from weft.objectives.objective import ACCURACY, LOSS, MetricSum, MetricTotals, Score


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
    """Activations that are recomputed in backward: cheap ones only, also the widest product of a layer, or a whole
    layer."""
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
