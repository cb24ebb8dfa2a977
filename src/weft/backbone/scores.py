"""A microbatch under way."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from weft.kernels.device_event import AsyncCopy, DeviceEvent, sent
from weft.objectives.metrics import ACCURACY, LOSS, MetricSum, Score


class PendingScores:
    """A microbatch that a device works on; to be made when all of its work has been asked for."""

    def __init__(self, results_2N: torch.Tensor, counts: tuple[int, ...], begun: DeviceEvent) -> None:
        """`results_2N`: loss and hit (1 or 0) of every supervised row; `counts`: supervised rows of each segment."""
        self._results_2N = results_2N
        self._counts = counts
        self._begun = begun
        self._arrival = AsyncCopy(results_2N).begin()

    def scores(self) -> list[Score]:
        """Each segment's score, over its own rows only; waits for the device."""
        losses, hits = self._arrival.get().double().numpy()
        found: list[Score] = []
        for end, count in zip(np.cumsum(self._counts).tolist(), self._counts, strict=True):
            own = slice(end - count, end)
            loss, accuracy = (MetricSum(float(rows[own].sum()), count) for rows in (losses, hits))
            found.append({LOSS: loss, ACCURACY: accuracy})
        return found

    def losses(self) -> list[float]:
        """Each segment's summed loss, over its own rows only; waits for the device."""
        return [score[LOSS].total for score in self.scores()]

    def wait(self) -> float:
        """Until the device has done it; returns when that was first known, by `time.perf_counter`."""
        return self._arrival.moment.wait()

    def seconds(self) -> float:
        """How long it took; waits for the device."""
        return self._arrival.moment.seconds_since(self._begun)

    def finite(self, owners: Sequence[int], num_owners: int) -> torch.Tensor:
        """For each owner, on the device: 1 if all losses of its segments are finite, else 0.

        `owners` names each segment's, below 0 where none asks. Known to the device alone: nobody waits.
        """
        places_N = np.repeat(np.array(owners, dtype=np.int64) + 1, self._counts)
        device = self._results_2N.device
        bad_N = (~torch.isfinite(self._results_2N[0])).float()
        bad_J = torch.zeros(num_owners + 1, device=device)
        bad_J.index_add_(0, sent(torch.from_numpy(places_N.clip(min=0)), device), bad_N)
        return (bad_J[1:] == 0).float()
