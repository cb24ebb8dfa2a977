"""Distillation: the adapter learns a teacher's distribution of every supervised token.

With z the logits of a token, p the teacher's distribution and s the adapter's, both at temperature T, i.e. of z / T:

    loss         α T² D + (1 - α) · cross entropy of the data's own token
    forward_kl   D = Σ p log(p / s)                        dD/d(z/T) = s - p
    reverse_kl   D = Σ s log(s / p)                        dD/d(z/T) = s (log(s / p) - D)
    jsd          D = ½ Σ p log(p / m) + ½ Σ s log(s / m)   dD/d(z/T) = s (g - Σ s g), g = ½ log(s / m), m = ½ (p + s)

If only the teacher's most likely tokens are known, p has only these, and s all tokens. Shape
suffixes: B rows of a block, V vocabulary, K numbers that are measured of a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from weft.errors import ConfigError, DataError
from weft.objectives.objective import ACCURACY, LOSS, Part, SettingsOfObjective, TeacherTopK
from weft.objectives.supervised import Supervised
from weft.settings import above, at_least, describe, is_usable_number, setting

if TYPE_CHECKING:
    from torch import Tensor

    from weft.spec import JobSpec

MEASURED = (LOSS, ACCURACY, "kl", "cross_entropy", "teacher_agreement")
"""Metrics of a row, in this order. kl is the forward KL at the job's temperature, whatever the divergence;
teacher_agreement is 1 if the adapter's most likely token is the teacher's."""


@dataclass(frozen=True)
class DistillationSettings(SettingsOfObjective):
    teacher: str | None = setting(None, objectives=("distillation",), is_path=True)
    """The teacher: base (the bare backbone) or a PEFT adapter directory. Default: the `teacher_ids` and
    `teacher_logprobs` of the rows."""
    distillation_alpha: float = setting(
        0.5, aliases=("kd_alpha", "kd_ratio"), rule=at_least(0, 1), objectives=("distillation",)
    )
    """Share of the teacher's loss; the rest is the cross entropy of the data's tokens."""
    distillation_temperature: float = setting(
        1.0, aliases=("kd_temperature",), rule=above(0, 1000), objectives=("distillation",)
    )
    """Divisor of both models' logits; the divergence is multiplied by its square, so gradients keep their size."""
    distillation_divergence: str = setting(
        "forward_kl", choices=("forward_kl", "reverse_kl", "jsd"), objectives=("distillation",)
    )
    """How the two distributions are compared; reverse_kl needs all of the teacher's tokens."""
    distillation_top_k: int | None = setting(
        None, aliases=("kd_top_k",), rule=at_least(1, 1000), objectives=("distillation",)
    )
    """Number of the teacher's most likely tokens to learn from; the teacher then reads each sample once. Default: all
    tokens, computed again in every epoch."""

    @classmethod
    def check_objective(cls, job: JobSpec) -> None:
        if job.distillation_top_k is not None and job.distillation_divergence == "reverse_kl":
            found = "reverse_kl needs all tokens of the teacher"
            raise ConfigError(f"{found}; use forward_kl or jsd, or leave it out.", where="distillation_top_k")
        if job.objective == "distillation" and job.adapter.trains_rows:
            found = "rows of tokens are not trained by objective distillation"
            raise ConfigError(f"{found}; leave them out.", where="adapter")
        super().check_objective(job)


@dataclass(frozen=True)
class DistillationBlock:
    measured_KB: tuple[Tensor, ...]
    slopes_BV: Tensor


@dataclass(frozen=True)
class Distillation(Supervised):
    """Every row is one sample, and all supervised tokens have the same weight."""

    alpha: float = 0.5
    temperature: float = 1.0
    divergence: str = "forward_kl"
    top_k: int | None = None
    name: ClassVar[str] = "distillation"
    example: ClassVar[Mapping[str, Any]] = {
        **Supervised.example,
        "teacher_ids": [[3, 4]],
        "teacher_logprobs": [[-0.1, -3]],
    }
    reads_reference: ClassVar[bool] = True

    def of_job(self, job: JobSpec) -> Self:
        return type(self)(
            job.distillation_alpha,
            job.distillation_temperature,
            job.distillation_divergence,
            job.distillation_top_k,
        )

    def claims(self, values: Mapping[str, Any]) -> bool:
        return bool(values.get(LOGPROBS))

    def parts(self, values: Mapping[str, Any], where: str) -> tuple[Part, ...]:
        if not (values.get(IDS) or values.get(LOGPROBS)):
            return (Part(values),)
        rest = {name: value for name, value in values.items() if name not in (IDS, LOGPROBS)}
        return (Part(rest, teacher=read_teacher_top_k(values, where)),)

    def distillation_loss(self, logits_BV: Tensor, teacher_BV: Tensor, targets_B: Tensor) -> DistillationBlock:
        """Losses and slopes, on the device; must not wait for it. `teacher_BV` are logits or log-probabilities, -inf
        for tokens that the teacher did not name."""
        logs_BV = (logits_BV / self.temperature).log_softmax(dim=1)
        divergence_B, kl_B, slopes_BV = self._compare(logs_BV, (teacher_BV / self.temperature).log_softmax(dim=1))
        own_B1 = logits_BV.gather(1, targets_B[:, None])
        entropy_B = logits_BV.logsumexp(dim=1) - own_B1[:, 0]
        losses_B = self.alpha * self.temperature**2 * divergence_B + (1 - self.alpha) * entropy_B
        # As often as T², less once for what z is divided by.
        slopes_BV = slopes_BV.mul(self.alpha * self.temperature)
        if self.alpha < 1:
            slopes_BV = slopes_BV.add(logits_BV.softmax(dim=1), alpha=1 - self.alpha)
            slopes_BV.scatter_add_(1, targets_B[:, None], own_B1.new_full(own_B1.shape, self.alpha - 1))
        is_hit_B = (own_B1[:, 0] >= logits_BV.amax(dim=1)) & ~entropy_B.isnan()
        agrees_B = logits_BV.argmax(dim=1) == teacher_BV.argmax(dim=1)
        return DistillationBlock((losses_B, is_hit_B.float(), kl_B, entropy_B, agrees_B.float()), slopes_BV)

    def _compare(self, logs_BV: Tensor, teacher_BV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The divergence of two distributions given by their logarithms, the forward KL, and the slopes."""
        s_BV, p_BV = logs_BV.exp(), teacher_BV.exp()
        kl_B = _expected(p_BV, teacher_BV - logs_BV)
        if self.divergence == "forward_kl":
            return kl_B, kl_B, s_BV - p_BV
        if self.divergence == "reverse_kl":
            ratios_BV = logs_BV - teacher_BV
            divergence_B = _expected(s_BV, ratios_BV)
            return divergence_B, kl_B, _weighted(s_BV, ratios_BV - divergence_B[:, None])
        middle_BV = (s_BV + p_BV).div(2).log()
        ratios_BV = (logs_BV - middle_BV) / 2
        mean_B = _expected(s_BV, ratios_BV)
        divergence_B = mean_B + _expected(p_BV, teacher_BV - middle_BV) / 2
        return divergence_B, kl_B, _weighted(s_BV, ratios_BV - mean_B[:, None])


def _weighted(weights_BV: Tensor, values_BV: Tensor) -> Tensor:
    """The product, 0 where the weight is 0: a probability of 0 has no finite logarithm."""
    return (weights_BV * values_BV).masked_fill(weights_BV == 0, 0.0)


def _expected(weights_BV: Tensor, values_BV: Tensor) -> Tensor:
    return _weighted(weights_BV, values_BV).sum(dim=1)


IDS, LOGPROBS = "teacher_ids", "teacher_logprobs"
MOST_TOKENS = 1000


def read_teacher_top_k(values: Mapping[str, Any], where: str) -> TeacherTopK:
    """The teacher's tokens in a row, the most likely first; DataError for a wrong column."""
    ids, logprobs = (_lists(name, values.get(name), where) for name in (IDS, LOGPROBS))
    if len(ids) != len(logprobs) or len({len(each) for each in (*ids, *logprobs)}) > 1:
        found = f"{IDS} and {LOGPROBS} differ in size"
        raise DataError(f"{found}; expected as many tokens for each supervised token in both.", where=where)
    if ids and len(ids[0]) > MOST_TOKENS:
        raise DataError(f"{IDS} names {len(ids[0]):,} tokens for each; the most is {MOST_TOKENS:,}.", where=where)
    for index, (own, given) in enumerate(zip(ids, logprobs, strict=True)):
        if not all(type(token) is int and token >= 0 for token in own) or len(set(own)) < len(own):
            raise DataError(f"{IDS}[{index}] is {_short(own)}; expected different token ids.", where=where)
        if not all(map(is_usable_number, given)):
            raise DataError(f"{LOGPROBS}[{index}] is {_short(given)}; expected finite numbers.", where=where)
    ordered = [sorted(zip(given, own, strict=True), reverse=True) for own, given in zip(ids, logprobs, strict=True)]
    return TeacherTopK([[token for _, token in each] for each in ordered], [[x for x, _ in each] for each in ordered])


def _lists(name: str, column: Any, where: str) -> list[list[Any]]:
    if not isinstance(column, list):
        found = f"{name} is {describe(column)}"
        raise DataError(f"{found}; expected a list of tokens for each supervised token.", where=where)
    for index, each in enumerate(column):
        if not isinstance(each, list) or not each:
            raise DataError(f"{name}[{index}] is {_short(each)}; expected a list of tokens.", where=where)
    return column


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
