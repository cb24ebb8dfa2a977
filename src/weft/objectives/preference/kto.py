"""Kahneman-Tversky optimisation: single answers that are good or bad, each compared with a reference.

With r the sum of log π/π_ref over an answer's tokens, z ≥ 0 how far the adapter has moved away from the reference, and
w the weight of good or of bad answers:

    good   w (1 - σ(β (r - z)))
    bad    w (1 - σ(β (z - r)))

z is the same sum over the next row's answer to this row's prompt, or 0 if that is less; nothing is learned through it.
Other trainers take the mean of such sums over whatever shares a microbatch. Here each row has its own, so that no
neighbour and no cut into microbatches plays a part. Shape suffixes as in `objective`; M is 2: the row's own answer and
the next row's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from weft.errors import DataError
from weft.objectives.objective import GroupRows, Judged, LikelihoodObjective, Part, SettingsOfObjective
from weft.objectives.preference.pair_rows import is_preference, read_preference
from weft.settings.fields import above, describe, setting

if TYPE_CHECKING:
    from weft.spec import JobSpec

COLUMNS = ("label", "kto_tag")
"""Where a row says whether its answer is good: TRL's name and LLaMA-Factory's."""
_WORDS = {"true": True, "false": False}


@dataclass(frozen=True)
class KtoSettings(SettingsOfObjective):
    """KTO's settings."""

    desirable_weight: float = setting(1.0, aliases=("kto_chosen_weight",), rule=above(0), objectives=("kto",))
    """Weight of a good answer."""
    undesirable_weight: float = setting(1.0, aliases=("kto_rejected_weight",), rule=above(0), objectives=("kto",))
    """Weight of a bad answer."""


@dataclass(frozen=True)
class Kto(LikelihoodObjective):
    """A group is one answer; the loss of a global batch is the mean of its answers."""

    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    name: ClassVar[str] = "kto"
    example: ClassVar[Mapping[str, Any]] = {"prompt": "a", "completion": "b", "label": False}
    reads_reference: ClassVar[bool] = True
    reads_mismatch: ClassVar[bool] = True
    reads_labels: ClassVar[bool] = True

    def of_job(self, job: JobSpec) -> Self:
        """As a job's settings have it."""
        beta = self.beta if job.beta is None else job.beta
        return type(self)(beta, job.desirable_weight, job.undesirable_weight)

    def claims(self, values: Mapping[str, Any]) -> bool:
        """A row with a true/false label and an answer."""
        answered = any(values.get(name) for name in ("completion", "response", "messages", "conversations", "output"))
        return answered and any(isinstance(values.get(name), bool) for name in COLUMNS)

    def parts(self, values: Mapping[str, Any], where: str) -> tuple[Part, ...]:
        """The row with its label; both answers of a pair, the chosen one as good and the rejected one as bad."""
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
        """The answers of the global batch."""
        return len(sample_weights)

    def judge(self, groups: GroupRows) -> Judged:
        """The loss of each answer, and what its tokens count in it."""
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
        return Judged(weight_G * (1 - value_G), groups.spread(weights_G2), metrics)
