"""Objectives that learn which of two answers is better."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from weft.errors import ConfigError, DataError
from weft.objectives.objective import GroupRows, LikelihoodLoss, LikelihoodObjective, Part, SettingsOfObjective
from weft.objectives.pairs import Pairs, is_preference, lengths, log_sigmoid, opposed, read_preference, reward_metrics
from weft.other_trainers import LOSS_TYPES_ELSEWHERE
from weft.settings import above, at_least, between, describe, setting

if TYPE_CHECKING:
    from torch import Tensor

    from weft.spec import JobSpec


@dataclass(frozen=True)
class PreferenceSettings(SettingsOfObjective):
    beta: float | None = setting(
        None,
        aliases=("pref_beta", "rl_beta", "dpo_beta", "orpo_alpha"),
        rule=above(0),
        objectives=("dpo", "cpo", "simpo", "orpo", "kto"),
    )
    """Strength of preferences: for dpo and kto the pull towards the reference, for orpo the share of the odds. Default:
    0.1; simpo: 2."""
    loss_type: str = setting(
        "sigmoid",
        aliases=("pref_loss", "dpo_loss_type"),
        choices=("sigmoid", "hinge", "ipo"),
        elsewhere=LOSS_TYPES_ELSEWHERE,
        objectives=("dpo", "cpo", "simpo"),
    )
    """Loss of a pair; ipo is not for simpo."""
    label_smoothing: float = setting(
        0.0, aliases=("dpo_label_smoothing",), rule=between(0, 0.5), objectives=("dpo", "cpo", "simpo")
    )
    """Share of pairs assumed to be the wrong way round; for the sigmoid loss."""
    reference: str = setting("base", aliases=("ref_model_adapters",), objectives=("dpo", "kto"), is_path=True)
    """What answers are compared with: base (the bare backbone) or a PEFT adapter directory, which stays frozen."""

    @classmethod
    def check_objective(cls, job: JobSpec) -> None:
        if job.label_smoothing and job.loss_type != "sigmoid":
            raise ConfigError(f"is for the sigmoid loss; loss_type is {job.loss_type}.", where="label_smoothing")
        super().check_objective(job)


@dataclass(frozen=True)
class Dpo(Pairs):
    """Direct preference optimisation: compares with a reference."""

    beta: float = 0.1
    loss_type: str = "sigmoid"
    label_smoothing: float = 0.0
    name: ClassVar[str] = "dpo"
    reads_reference: ClassVar[bool] = True

    def of_job(self, job: JobSpec) -> Self:
        return type(self)(job.beta or self.beta, job.loss_type, job.label_smoothing)

    def claims(self, values: Mapping[str, Any]) -> bool:
        return is_preference(values)

    def likelihood_loss(self, groups: GroupRows) -> LikelihoodLoss:
        assert groups.references_N is not None
        gains_G2 = groups.sums(groups.logprobs_N - groups.references_N)
        lengths_G2 = lengths(groups) if self.loss_type == "ipo" else 1.0
        compared_G2 = gains_G2 / lengths_G2
        h_G = compared_G2[:, 0] - compared_G2[:, 1]
        losses_G, slopes_G = pair_loss(h_G, self.loss_type, self.beta, self.label_smoothing)
        weights_G2 = opposed(-slopes_G) / lengths_G2
        return LikelihoodLoss(losses_G, groups.spread(weights_G2), reward_metrics(self.beta * gains_G2))


def pair_loss(h_G: Tensor, loss_type: str, beta: float, smooth: float) -> tuple[Tensor, Tensor]:
    if loss_type == "ipo":
        off_G = h_G - 1 / (2 * beta)
        return off_G.square(), 2 * off_G
    scaled_G = beta * h_G
    if loss_type == "hinge":
        return (1 - scaled_G).clamp(min=0), -beta * (scaled_G < 1).to(h_G.dtype)
    losses_G = -(1 - smooth) * log_sigmoid(scaled_G) - smooth * log_sigmoid(-scaled_G)
    return losses_G, beta * (scaled_G.sigmoid() - (1 - smooth))


@dataclass(frozen=True)
class CpoSettings(SettingsOfObjective):
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
    """Contrastive preference optimisation: DPO's losses without a reference, plus the chosen answer's own loss."""

    beta: float = 0.1
    loss_type: str = "sigmoid"
    label_smoothing: float = 0.0
    alpha: float = 1.0
    name: ClassVar[str] = "cpo"

    def of_job(self, job: JobSpec) -> Self:
        return type(self)(job.beta or self.beta, job.loss_type, job.label_smoothing, job.cpo_alpha)

    def likelihood_loss(self, groups: GroupRows) -> LikelihoodLoss:
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
        return LikelihoodLoss(losses_G + self.alpha * own_G, groups.spread(weights_G2), metrics)


@dataclass(frozen=True)
class SimPo(Pairs):
    """Simple preference optimisation: means over tokens, and a margin."""

    beta: float = 2.0
    loss_type: str = "sigmoid"
    label_smoothing: float = 0.0
    gamma: float = 0.5
    name: ClassVar[str] = "simpo"

    def of_job(self, job: JobSpec) -> Self:
        return type(self)(job.beta or self.beta, job.loss_type, job.label_smoothing, job.simpo_gamma)

    def likelihood_loss(self, groups: GroupRows) -> LikelihoodLoss:
        lengths_G2 = lengths(groups)
        means_G2 = groups.sums(groups.logprobs_N) / lengths_G2
        h_G = means_G2[:, 0] - means_G2[:, 1] - self.gamma / self.beta
        losses_G, slopes_G = pair_loss(h_G, self.loss_type, self.beta, self.label_smoothing)
        weights_G2 = opposed(-slopes_G) / lengths_G2
        return LikelihoodLoss(losses_G, groups.spread(weights_G2), reward_metrics(self.beta * means_G2))


@dataclass(frozen=True)
class Orpo(Pairs):
    """Odds-ratio preference optimisation: the chosen answer's own loss, plus the odds ratio of both answers."""

    beta: float = 0.1
    name: ClassVar[str] = "orpo"

    def of_job(self, job: JobSpec) -> Self:
        return type(self)(job.beta or self.beta)

    def likelihood_loss(self, groups: GroupRows) -> LikelihoodLoss:
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
        return LikelihoodLoss(losses_G, groups.spread(weights_G2 / lengths_G2), metrics)


COLUMNS = ("label", "kto_tag")
"""Columns that mark an answer as good or bad: TRL's name and LLaMA-Factory's."""
_WORDS = {"true": True, "false": False}


@dataclass(frozen=True)
class KtoSettings(SettingsOfObjective):
    desirable_weight: float = setting(1.0, aliases=("kto_chosen_weight",), rule=above(0), objectives=("kto",))
    """Weight of a good answer."""
    undesirable_weight: float = setting(1.0, aliases=("kto_rejected_weight",), rule=above(0), objectives=("kto",))
    """Weight of a bad answer."""


@dataclass(frozen=True)
class Kto(LikelihoodObjective):
    """Every answer is a group; the loss of a global batch is the mean over answers."""

    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    name: ClassVar[str] = "kto"
    example: ClassVar[Mapping[str, Any]] = {"prompt": "a", "completion": "b", "label": False}
    reads_reference: ClassVar[bool] = True
    reads_mismatch: ClassVar[bool] = True
    reads_labels: ClassVar[bool] = True

    def of_job(self, job: JobSpec) -> Self:
        beta = job.beta or self.beta
        return type(self)(beta, job.desirable_weight, job.undesirable_weight)

    def claims(self, values: Mapping[str, Any]) -> bool:
        answered = any(values.get(name) for name in ("completion", "response", "messages", "conversations", "output"))
        return answered and any(isinstance(values.get(name), bool) for name in COLUMNS)

    def parts(self, values: Mapping[str, Any], where: str) -> tuple[Part, ...]:
        if is_preference(values):
            row = read_preference(values, where)
            answers = ((row.chosen, 1.0), (row.rejected, 0.0))
            return tuple(Part({**row.context, "completion": answer}, label=label) for answer, label in answers)
        column = next((name for name in COLUMNS if values.get(name) not in (None, "")), None)
        if column is None:
            raise DataError("has no label; objective kto needs true or false for each answer.", where=where)
        given = values[column]
        label = _WORDS.get(given.strip().lower()) if isinstance(given, str) else given
        if not isinstance(label, bool):
            raise DataError(f"{column} is {describe(given)}; expected true or false.", where=where)
        return (Part({name: value for name, value in values.items() if name not in COLUMNS}, label=float(label)),)

    def divisor(self, sample_weights: Sequence[float]) -> float:
        return len(sample_weights)

    def likelihood_loss(self, groups: GroupRows) -> LikelihoodLoss:
        assert groups.references_N is not None and groups.labels_GM is not None
        gains_G2 = groups.sums(groups.logprobs_N - groups.references_N)
        gain_G, distance_G = gains_G2[:, 0], gains_G2[:, 1].detach().clamp(min=0)
        is_good_G = groups.labels_GM[:, 0] > 0.5
        sign_G = is_good_G.to(gain_G.dtype) * 2 - 1
        weight_G = is_good_G * self.desirable_weight + ~is_good_G * self.undesirable_weight
        ahead_G = sign_G * (gain_G - distance_G)
        value_G = (self.beta * ahead_G).sigmoid()
        slope_G = weight_G * sign_G * self.beta * value_G * (1 - value_G)
        weights_G2 = slope_G[:, None] * gains_G2.new_tensor([1.0, 0.0])
        reward_G = self.beta * gain_G
        metrics = {
            "rewards/chosen": reward_G.masked_fill(~is_good_G, float("nan")),
            "rewards/rejected": reward_G.masked_fill(is_good_G, float("nan")),
            "rewards/accuracies": (ahead_G > 0).to(gain_G.dtype),
            "kl": distance_G,
        }
        return LikelihoodLoss(weight_G * (1 - value_G), groups.spread(weights_G2), metrics)
