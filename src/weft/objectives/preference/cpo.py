"""Preferences without a reference: CPO, SimPO and ORPO compare the two answers as the adapter itself predicts them.

With l the sum and m the mean of an answer's log-probabilities, w the chosen and r the rejected answer:

    cpo     loss(l_w - l_r) - α m_w, with the losses of DPO
    simpo   -log σ(β (m_w - m_r) - γ), with label smoothing; hinge: max(0, 1 - (β (m_w - m_r) - γ))
    orpo    -m_w - β log σ(log odds_w - log odds_r), where odds = p / (1 - p) and p = exp m

Shape suffixes as in `objective`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

from weft.errors import ConfigError
from weft.objectives.objective import GroupRows, Judged, SettingsOfObjective
from weft.objectives.preference.dpo import pair_loss
from weft.objectives.preference.pairs import Pairs, lengths, log_sigmoid, opposed, reward_metrics
from weft.settings.fields import at_least, setting

if TYPE_CHECKING:
    from weft.spec import JobSpec


@dataclass(frozen=True)
class CpoSettings(SettingsOfObjective):
    """Settings of CPO and SimPO."""

    cpo_alpha: float = setting(1.0, rule=at_least(0), objectives=("cpo",))
    """Weight of the chosen answer's loss."""
    simpo_gamma: float = setting(0.5, rule=at_least(0), objectives=("simpo",))
    """Margin by which the chosen answer should lead."""

    @classmethod
    def check_objective(cls, job: JobSpec) -> None:
        if job.objective == "simpo" and job.loss_type == "ipo":
            raise ConfigError("got ipo; for simpo accepted are sigmoid and hinge.", where="loss_type")
        super().check_objective(job)


@dataclass(frozen=True)
class Cpo(Pairs):
    """Contrastive preference optimisation: DPO's losses without a reference, beside the chosen answer's own loss."""

    beta: float = 0.1
    loss_type: str = "sigmoid"
    label_smoothing: float = 0.0
    alpha: float = 1.0
    name: ClassVar[str] = "cpo"

    def of_job(self, job: JobSpec) -> Self:
        """As a job's settings have it."""
        return type(self)(
            self.beta if job.beta is None else job.beta, job.loss_type, job.label_smoothing, job.cpo_alpha
        )

    def judge(self, groups: GroupRows) -> Judged:
        """The loss of each pair, and what its two answers' tokens count in it."""
        sums_G2, lengths_G2 = groups.sums(groups.logprobs_N), lengths(groups)
        compared_G2 = sums_G2 / lengths_G2 if self.loss_type == "ipo" else sums_G2
        h_G = compared_G2[:, 0] - compared_G2[:, 1]
        losses_G, slopes_G = pair_loss(h_G, self.loss_type, self.beta, self.label_smoothing)
        weights_G2 = opposed(-slopes_G)
        if self.loss_type == "ipo":
            weights_G2 = weights_G2 / lengths_G2
        own_G = -sums_G2[:, 0] / lengths_G2[:, 0]
        weights_G2[:, 0] += self.alpha / lengths_G2[:, 0]
        metrics = {**reward_metrics(self.beta * sums_G2), "nll_loss": own_G}
        return Judged(losses_G + self.alpha * own_G, groups.spread(weights_G2), metrics)


@dataclass(frozen=True)
class SimPo(Pairs):
    """Simple preference optimisation: means over tokens, and a margin."""

    beta: float = 2.0
    loss_type: str = "sigmoid"
    label_smoothing: float = 0.0
    gamma: float = 0.5
    name: ClassVar[str] = "simpo"

    def of_job(self, job: JobSpec) -> Self:
        """As a job's settings have it."""
        return type(self)(
            self.beta if job.beta is None else job.beta, job.loss_type, job.label_smoothing, job.simpo_gamma
        )

    def judge(self, groups: GroupRows) -> Judged:
        """The loss of each pair, and what its two answers' tokens count in it."""
        lengths_G2 = lengths(groups)
        means_G2 = groups.sums(groups.logprobs_N) / lengths_G2
        h_G = means_G2[:, 0] - means_G2[:, 1] - self.gamma / self.beta
        losses_G, slopes_G = pair_loss(h_G, self.loss_type, self.beta, self.label_smoothing)
        weights_G2 = opposed(-slopes_G) / lengths_G2
        return Judged(losses_G, groups.spread(weights_G2), reward_metrics(self.beta * means_G2))


@dataclass(frozen=True)
class Orpo(Pairs):
    """Odds-ratio preference optimisation: the chosen answer's own loss, beside the ratio of the odds of both."""

    beta: float = 0.1
    name: ClassVar[str] = "orpo"

    def of_job(self, job: JobSpec) -> Self:
        """As a job's settings have it."""
        return type(self)(self.beta if job.beta is None else job.beta)

    def judge(self, groups: GroupRows) -> Judged:
        """The loss of each pair, and what its two answers' tokens count in it."""
        lengths_G2 = lengths(groups)
        means_G2 = groups.sums(groups.logprobs_N) / lengths_G2
        rest_G2 = -means_G2.expm1()
        odds_G2 = means_G2 - rest_G2.log()
        ratio_G = odds_G2[:, 0] - odds_G2[:, 1]
        losses_G = -means_G2[:, 0] - self.beta * log_sigmoid(ratio_G)
        # d log odds / d mean is 1 / (1 - p).
        weights_G2 = opposed(self.beta * (-ratio_G).sigmoid()) / rest_G2
        weights_G2[:, 0] += 1
        metrics = {
            **reward_metrics(self.beta * means_G2),
            "nll_loss": -means_G2[:, 0],
            "log_odds_ratio": log_sigmoid(ratio_G),
        }
        return Judged(losses_G, groups.spread(weights_G2 / lengths_G2), metrics)
