"""Direct preference optimisation: the chosen answer is to gain more on the bare backbone than the rejected one.

With h the difference of what both sides gain, the sum of log π/π_ref over an answer's tokens, and β the strength:

    sigmoid   -(1 - s) log σ(β h) - s log σ(-β h), s the label smoothing
    hinge     max(0, 1 - β h)
    ipo       (h - 1 / 2β)², where a gain is the mean over an answer's tokens

The loss of a global batch is the mean over its pairs. The reference is the same backbone without any adapter, in the
same microbatch, so there is no second model. Shape suffixes as in `objective`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from weft.objectives.objective import GroupRows, Judged, Part
from weft.objectives.preference_rows import is_preference, read_preference

if TYPE_CHECKING:
    from torch import Tensor

    from weft.spec import JobSpec


@dataclass(frozen=True)
class Dpo:
    """Learns from pairs of answers."""

    beta: float = 0.1
    loss_type: str = "sigmoid"
    label_smoothing: float = 0.0
    name: ClassVar[str] = "dpo"
    group_size: ClassVar[int] = 2
    reads_reference: ClassVar[bool] = True

    def of_job(self, job: JobSpec) -> Dpo:
        """As a job's settings have it."""
        return Dpo(job.beta, job.loss_type, job.label_smoothing)

    def claims(self, values: Mapping[str, Any]) -> bool:
        """A row with a chosen and a rejected answer."""
        return is_preference(values)

    def parts(self, values: Mapping[str, Any], where: str) -> tuple[Part, ...]:
        """The prompt with the chosen and with the rejected answer."""
        row = read_preference(values, where)
        return tuple(Part({**row.context, "completion": answer}) for answer in (row.chosen, row.rejected))

    def divisor(self, sample_weights: Sequence[float]) -> float:
        """The pairs of the global batch."""
        return len(sample_weights) / self.group_size

    def judge(self, groups: GroupRows) -> Judged:
        """The loss of each pair, and what its two answers' tokens count in it."""
        assert groups.references_N is not None
        gains_N = groups.logprobs_N - groups.references_N
        gains_G2 = groups.sums(gains_N)
        lengths_G2 = groups.sums(gains_N.new_ones(len(gains_N))) if self.loss_type == "ipo" else None
        compared_G2 = gains_G2 if lengths_G2 is None else gains_G2 / lengths_G2
        losses_G, slopes_G = self._loss(compared_G2[:, 0] - compared_G2[:, 1])
        weights_G2 = -slopes_G[:, None] * gains_G2.new_tensor([1.0, -1.0])
        if lengths_G2 is not None:
            weights_G2 = weights_G2 / lengths_G2
        rewards_G2 = self.beta * gains_G2
        chosen_G, rejected_G = rewards_G2[:, 0], rewards_G2[:, 1]
        metrics = {
            "rewards/chosen": chosen_G,
            "rewards/rejected": rejected_G,
            "rewards/accuracies": (chosen_G > rejected_G).float(),
            "rewards/margins": chosen_G - rejected_G,
        }
        return Judged(losses_G, groups.spread(weights_G2), metrics)

    def _loss(self, h_G: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of each pair, and its slope over h."""
        if self.loss_type == "ipo":
            off_G = h_G - 1 / (2 * self.beta)
            return off_G.square(), 2 * off_G
        scaled_G = self.beta * h_G
        if self.loss_type == "hinge":
            return (1 - scaled_G).clamp(min=0), -self.beta * (scaled_G < 1).to(h_G.dtype)
        smooth = self.label_smoothing
        losses_G = -(1 - smooth) * log_sigmoid(scaled_G) - smooth * log_sigmoid(-scaled_G)
        return losses_G, self.beta * (scaled_G.sigmoid() - (1 - smooth))


def log_sigmoid(x: Tensor) -> Tensor:
    """log σ(x) without overflow."""
    return x.clamp(max=0) - (-x.abs()).exp().log1p()
