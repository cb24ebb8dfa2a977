"""A small objective that weighs pairs by their log-probabilities, to show that there is room for such."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch.nn.functional as F

from weft.objectives.objective import GroupRows, Judged, Part


class Pairs:
    """The first of two answers is to gain more on the bare backbone than the second."""

    name: ClassVar[str] = "pairs"
    group_size: ClassVar[int] = 2
    reads_reference: ClassVar[bool] = True
    beta: ClassVar[float] = 0.3

    def of_job(self, job: Any) -> Pairs:
        return self

    def claims(self, values: Mapping[str, Any]) -> bool:
        return "better" in values and "worse" in values

    def parts(self, values: Mapping[str, Any], where: str) -> tuple[Part, ...]:
        return tuple(Part({"prompt": values["prompt"], "completion": values[side]}) for side in ("better", "worse"))

    def divisor(self, sample_weights: Sequence[float]) -> float:
        return len(sample_weights) / self.group_size

    def judge(self, groups: GroupRows) -> Judged:
        assert groups.references_N is not None
        gains_G2 = groups.sums(groups.logprobs_N - groups.references_N)
        margins_G = self.beta * (gains_G2[:, 0] - gains_G2[:, 1])
        slope_G1 = self.beta * (-margins_G).sigmoid()[:, None]
        weights_G2 = slope_G1 * gains_G2.new_tensor([1.0, -1.0])
        return Judged(F.softplus(-margins_G), groups.spread(weights_G2), {"margin": margins_G})


PAIRS = Pairs()
