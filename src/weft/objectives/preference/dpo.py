"""Direct preference optimisation: the chosen answer is to gain more on the reference than the rejected one.

With h the difference of what both sides gain, the sum of log π/π_ref over an answer's tokens, and β the strength:

    sigmoid   -(1 - s) log σ(β h) - s log σ(-β h), s the label smoothing
    hinge     max(0, 1 - β h)
    ipo       (h - 1 / 2β)², where a gain is the mean over an answer's tokens

The reference is the same backbone without any adapter or with a frozen one, so there is no second model. Shape suffixes
as in `objective`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from weft.objectives.objective import GroupRows, Judged
from weft.objectives.preference.pair_rows import is_preference
from weft.objectives.preference.pairs import Pairs, lengths, log_sigmoid, opposed, reward_metrics

if TYPE_CHECKING:
    from torch import Tensor

    from weft.spec import JobSpec


@dataclass(frozen=True)
class Dpo(Pairs):
    """Compares with a reference."""

    beta: float = 0.1
    loss_type: str = "sigmoid"
    label_smoothing: float = 0.0
    name: ClassVar[str] = "dpo"
    reads_reference: ClassVar[bool] = True

    def of_job(self, job: JobSpec) -> Dpo:
        """As a job's settings have it."""
        return Dpo(self.beta if job.beta is None else job.beta, job.loss_type, job.label_smoothing)

    def claims(self, values: Mapping[str, Any]) -> bool:
        """A row with a chosen and a rejected answer."""
        return is_preference(values)

    def judge(self, groups: GroupRows) -> Judged:
        """The loss of each pair, and what its two answers' tokens count in it."""
        assert groups.references_N is not None
        gains_G2 = groups.sums(groups.logprobs_N - groups.references_N)
        lengths_G2 = lengths(groups) if self.loss_type == "ipo" else 1.0
        compared_G2 = gains_G2 / lengths_G2
        h_G = compared_G2[:, 0] - compared_G2[:, 1]
        losses_G, slopes_G = pair_loss(h_G, self.loss_type, self.beta, self.label_smoothing)
        weights_G2 = opposed(-slopes_G) / lengths_G2
        return Judged(losses_G, groups.spread(weights_G2), reward_metrics(self.beta * gains_G2))


def pair_loss(h_G: Tensor, loss_type: str, beta: float, smooth: float) -> tuple[Tensor, Tensor]:
    """The loss of each pair, and its slope over h."""
    if loss_type == "ipo":
        off_G = h_G - 1 / (2 * beta)
        return off_G.square(), 2 * off_G
    scaled_G = beta * h_G
    if loss_type == "hinge":
        return (1 - scaled_G).clamp(min=0), -beta * (scaled_G < 1).to(h_G.dtype)
    losses_G = -(1 - smooth) * log_sigmoid(scaled_G) - smooth * log_sigmoid(-scaled_G)
    return losses_G, beta * (scaled_G.sigmoid() - (1 - smooth))
