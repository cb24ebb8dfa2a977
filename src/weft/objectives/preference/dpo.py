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
from typing import TYPE_CHECKING, Any, ClassVar, Self

from weft.errors import ConfigError
from weft.objectives.objective import GroupRows, Judged, SettingsOfObjective
from weft.objectives.preference.pair_rows import is_preference
from weft.objectives.preference.pairs import Pairs, lengths, log_sigmoid, opposed, reward_metrics
from weft.settings.fields import above, between, setting

if TYPE_CHECKING:
    from torch import Tensor

    from weft.spec import JobSpec


@dataclass(frozen=True)
class PreferenceSettings(SettingsOfObjective):
    """Settings that several objectives on preferences have."""

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
    """Compares with a reference."""

    beta: float = 0.1
    loss_type: str = "sigmoid"
    label_smoothing: float = 0.0
    name: ClassVar[str] = "dpo"
    reads_reference: ClassVar[bool] = True

    def of_job(self, job: JobSpec) -> Self:
        """As a job's settings have it."""
        return type(self)(self.beta if job.beta is None else job.beta, job.loss_type, job.label_smoothing)

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
