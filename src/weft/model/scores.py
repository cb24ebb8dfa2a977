"""The scores of a microbatch that a device still works on."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from weft.kernels.device_event import AsyncCopy, DeviceEvent, sent
from weft.model.distill import DistillationPass
from weft.model.heads import HeadPass
from weft.model.judge import LossPass
from weft.model.packed import PackedBatch
from weft.objectives.distillation import MEASURED
from weft.objectives.metrics import ACCURACY, LOSS, MetricSum, MetricTotals, Score


class PendingScores:
    """The scores of a microbatch that a device works on; it is made once all of that work has been asked for."""

    def __init__(
        self,
        passed: LossPass,
        batch: PackedBatch,
        begun: DeviceEvent,
        headed: Sequence[HeadPass] = (),
        taught: Sequence[DistillationPass] = (),
    ) -> None:
        # Not all of it: the gradient's memory is needed again.
        self._results_2N, self._judged = passed.results_2N, passed.judged
        self._counts = batch.counts
        self._importance = batch.importance
        self._scored_groups = batch.scored_groups
        self._begun = begun
        measured = [torch.stack([judged.losses_G, *judged.metrics.values()]) for judged in passed.judged]
        self._measured = [AsyncCopy(values).begin() for values in measured]
        self._headed = headed
        told = [torch.cat([one.judged.losses_U[:, None], one.judged.measured_UK], dim=1) for one in headed]
        self._told = [AsyncCopy(values).begin() for values in told]
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
        for judgement, judged, values in zip(self._scored_groups, self._judged, self._measured, strict=True):
            for segment in judgement.learners:
                found[segment] = {ACCURACY: found[segment][ACCURACY]}
            for segment in judgement.unlearned:
                found[segment] = {}
            for segment, group in zip(judgement.leaders, values.get().double().t().tolist(), strict=True):
                loss, *others = group
                metrics = {name: MetricSum(value, 1) for name, value in zip(judged.metrics, others, strict=True)}
                known = {name: metric for name, metric in metrics.items() if not math.isnan(metric.total)}
                found[segment] = {**found[segment], LOSS: MetricSum(loss, 1), **known}
        self._add_heads(found)
        self._add_distillation(found)
        return found

    def _add_heads(self, found: list[Score]) -> None:
        """The scores of what heads looked at, unit by unit."""
        for one, values in zip(self._headed, self._told, strict=True):
            labelled = one.labelled
            tallies: dict[int, MetricTotals] = {int(segment): MetricTotals() for segment in labelled.segments}
            units = zip(labelled.unit_segments, labelled.unit_labels, values.get().double().tolist(), strict=True)
            for segment, label, (loss, *measured) in units:
                tallies[int(segment)].add(labelled.objective.score(float(label), loss, measured))
            for segment, tally in tallies.items():
                found[segment] = tally.sums

    def _add_distillation(self, found: list[Score]) -> None:
        """The scores of what learns from teachers, summed over each segment's own rows."""
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
        """Until the device has done it; returns when that was first known, by `time.perf_counter`."""
        return self._arrival.moment.wait()

    def seconds(self, begun: DeviceEvent | None = None) -> float:
        """How long it took, or all since another moment; waits for the device."""
        return self._arrival.moment.seconds_since(begun or self._begun)

    def finite(self, owners: Sequence[int], num_owners: int) -> torch.Tensor:
        """For each owner, on the device: 1 if all losses of its segments are finite, else 0.

        `owners` names each segment's, below 0 where none asks. Known to the device alone: nobody waits.
        """
        places = np.array(owners, dtype=np.int64).clip(min=-1) + 1
        checked = [(np.repeat(places, self._counts), self._results_2N[0])]
        for judgement, judged in zip(self._scored_groups, self._judged, strict=True):
            checked.append((places[list(judgement.leaders)], judged.losses_G))
        for one in self._headed:
            checked.append((places[one.labelled.unit_segments], one.judged.losses_U))
        for taught in self._taught:
            checked.append((places[taught.segments], taught.measured_KN[0]))
        device = self._results_2N.device
        bad_J = torch.zeros(num_owners + 1, device=device)
        for owner, losses in checked:
            bad_J.index_add_(0, sent(torch.from_numpy(owner), device), (~torch.isfinite(losses)).float())
        return (bad_J[1:] == 0).float()
