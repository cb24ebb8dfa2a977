"""Counts how far a job has come, which is what a checkpoint records besides tensors; no other job plays a part.

Learning rates are pure functions of the step; their names and formulas are those of transformers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weft.data.dataset import GlobalBatches, JobData
from weft.data.order import BatchSchedule
from weft.errors import ConfigError, counted
from weft.job_state import Reason, ReasonCode
from weft.objectives.objective import MeanScores, MetricTotals, Score
from weft.plan.program import Turn
from weft.plan.types import Batch, JobQueue, Segment
from weft.spec import JobSpec
from weft.spec.choices import ScheduleSettings

if TYPE_CHECKING:
    from weft.kernels.adamw import Updated

PLANNED_BATCHES = 8
"""Number of global batches that a planner sees ahead."""
LARGEST_WEIGHT = 1e6
"""Largest adapter weight; a job with a larger one fails, because its results mean nothing even where they are
finite."""
MAX_SKIPPED = 3
"""Number of steps in a row with a non-finite loss or gradient that fails a job."""


@dataclass(frozen=True)
class StepResult:
    means: MeanScores
    grad_norm: float
    learning_rate: float
    tokens: int
    skipped: bool


class JobProgress:
    def __init__(self, spec: JobSpec, data: JobData) -> None:
        self._spec = spec
        self.inputs: dict[str, Any] = {"data": data.train.fingerprint}
        """Everything that the job reads besides its settings and the backbone, mostly digests, for `check_inputs`."""
        if data.eval is not None:
            self.inputs["eval_data"] = data.eval.fingerprint
        self.order = BatchSchedule.of(spec, *data.train.sizes)
        self.batches = GlobalBatches(data.train, self.order)
        self.step = 0
        self.index = 0
        self.num_tokens = 0
        self.num_skipped = 0
        self.skipped_in_a_row = 0
        self.best_eval: float | None = None
        self.evals_since_best = 0
        self.stopped_early = False
        self.owes_eval = False
        """True if it was restored at a step whose evaluation had not ended."""
        self.hold_step = self.num_steps
        self.diverged: Reason | None = None
        self.num_rewinds = 0
        """Number of rewinds; work started before a rewind is not counted after it."""
        self._scores = MetricTotals()

    @property
    def num_steps(self) -> int:
        return self.order.num_steps

    @property
    def is_complete(self) -> bool:
        return self.stopped_early or self.step >= self.num_steps

    @property
    def is_held(self) -> bool:
        return not self.is_complete and self.step >= self.hold_step

    @property
    def epoch(self) -> float:
        return self.order.epoch_of(self.step)

    @property
    def has_best(self) -> bool:
        """True if early stopping keeps the weights of the best evaluation."""
        return self._spec.early_stopping_patience is not None and self.best_eval is not None

    @property
    def is_finite(self) -> bool:
        return self._scores.is_finite

    def queue(self, priority: int, lane: str = "") -> JobQueue:
        return self._queue(self.step, self.index, self.num_tokens, priority, lane)

    def queue_after(self, turns: Sequence[Turn], priority: int, lane: str = "") -> JobQueue | None:
        """Queue after these turns, if nothing comes in between; None if the job has ended or is held then."""
        name, step, index, num_tokens = self._spec.name, self.step, self.index, self.num_tokens
        for turn in turns:
            index += sum(segment.job == name for segment in turn.microbatch.segments)
            if any(due.job == name for due in turn.steps):
                num_tokens += self.batches[step].num_tokens
                step, index = step + 1, 0
        return self._queue(step, index, num_tokens, priority, lane) if step < self.hold_step else None

    def add_score(self, segment: Segment, score: Score) -> None:
        assert (segment.step, segment.index) == (self.step, self.index), "samples run in the job's own order"
        self.index += 1
        self._scores.add(score)

    def rewind(self) -> None:
        self._begin_batch()
        self.num_rewinds += 1

    def learning_rate(self, step: int | None = None) -> float:
        spec, warmup = self._spec, warmup_steps(self._spec.warmup_steps, self.num_steps)
        step = self.step if step is None else step
        return learning_rate(
            spec.lr_scheduler_type, spec.learning_rate, step, self.num_steps, warmup, spec.lr_scheduler_kwargs
        )

    def finish_step(self, rate: float, updated: Updated) -> StepResult:
        batch = self.batches[self.step]
        assert self.index == len(batch.members), "a step needs its whole global batch"
        means = self._scores.means()
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if updated.skipped else 0
        self.num_skipped += updated.skipped
        self.step += 1
        self._begin_batch()
        self.num_tokens += batch.num_tokens
        result = StepResult(means, updated.grad_norm, rate, batch.num_tokens, updated.skipped)
        self.diverged = (
            self._divergence(result, updated.largest) if updated.error is None else Reason.of_bug(updated.error)
        )
        return result

    def is_best(self, eval_loss: float) -> bool:
        return math.isfinite(eval_loss) and (self.best_eval is None or eval_loss < self.best_eval)

    def record_eval(self, eval_loss: float) -> None:
        if self.is_best(eval_loss):
            self.best_eval, self.evals_since_best = eval_loss, 0
        else:
            self.evals_since_best += 1
        patience = self._spec.early_stopping_patience
        if patience is not None:
            self.stopped_early = self.evals_since_best >= patience

    def counters(self, *, owes_eval: bool = False) -> dict[str, Any]:
        """Values that a checkpoint records; data order, dropout and learning rate follow from the step. `owes_eval`:
        the evaluation after the step has not ended, and is due when the job is restored."""
        return {
            "num_tokens": self.num_tokens,
            "num_skipped": self.num_skipped,
            "skipped_in_a_row": self.skipped_in_a_row,
            "best_eval": self.best_eval,
            "evals_since_best": self.evals_since_best,
            "stopped_early": self.stopped_early,
            **self.inputs,
            **({"owes_eval": True} if owes_eval else {}),
        }

    def restore(self, step: int, counters: Mapping[str, Any]) -> None:
        self.step = step
        self.rewind()
        self.num_tokens = counters["num_tokens"]
        self.num_skipped = counters["num_skipped"]
        self.skipped_in_a_row = counters["skipped_in_a_row"]
        self.best_eval = counters["best_eval"]
        self.evals_since_best = counters["evals_since_best"]
        self.stopped_early = counters["stopped_early"]
        self.owes_eval = counters.get("owes_eval", False)

    def _begin_batch(self) -> None:
        self.index, self._scores = 0, MetricTotals()

    def _divergence(self, result: StepResult, largest: float) -> Reason | None:
        advice = f"(step {self.step}, learning rate {result.learning_rate:g}); try a lower learning_rate."
        if self.skipped_in_a_row >= MAX_SKIPPED:
            found = (
                f"loss {result.means.loss:g} and gradient norm {result.grad_norm:g}, not finite {MAX_SKIPPED} steps in "
                "a row"
            )
        elif largest <= LARGEST_WEIGHT:
            return None
        else:
            found = f"an adapter weight of size {largest:g}"
        return Reason(ReasonCode.DIVERGED, f"diverged: {found} {advice}")

    def _queue(self, first_step: int, first_index: int, num_tokens: int, priority: int, lane: str) -> JobQueue:
        last = min(self.hold_step, first_step + PLANNED_BATCHES)
        batches = []
        for step in range(first_step, last):
            first = first_index if step == first_step else 0
            lengths = tuple(self.batches.lengths(step)[first:])
            batches.append(Batch(step, first, lengths, self.batches.groups(step, first)))
        return JobQueue(self._spec.name, tuple(batches), last == self.hold_step, priority, num_tokens, lane=lane)


_POLYNOMIAL_END = 1e-7


def warmup_steps(setting: float, num_steps: int) -> int:
    """Warm-up in steps, from a count or (below 1) a fraction of all steps."""
    return math.ceil(num_steps * setting) if setting < 1 else int(setting)


def check_steps(job: JobSpec, num_steps: int) -> None:
    """ConfigError if warm-up and decay do not fit a job's steps."""
    if job.lr_scheduler_type != "warmup_stable_decay":
        return
    settings = job.warmup_steps, float(job.lr_scheduler_kwargs["num_decay_steps"])
    # Before rounding: two halves of an odd number of steps are accepted.
    needed = sum(each * num_steps if each < 1 else each for each in settings)
    if needed > num_steps + 1e-6:
        warmup, decay = (warmup_steps(each, num_steps) for each in settings)
        steps = f"{counted(decay, 'step')} of decay" + (f" and {warmup:,} of warm-up" if warmup else "")
        found = f"{steps} are more than the {num_steps:,} of the job"
        raise ConfigError(f"{found}.", where="lr_scheduler_kwargs.num_decay_steps")


def learning_rate(
    kind: str, peak: float, step: int, num_steps: int, warmup: int, settings: ScheduleSettings | None = None
) -> float:
    """The learning rate of the step-th step (from 0) of num_steps."""
    settings = settings or {}
    if kind == "constant":
        return peak
    if kind == "warmup_stable_decay":
        return peak * _stable_then_decay(step, num_steps, warmup, settings)
    if step < warmup:
        return peak * step / max(1, warmup)
    progress = (step - warmup) / max(1, num_steps - warmup)
    if kind == "constant_with_warmup":
        return peak
    if kind == "linear":
        return peak * max(0.0, 1.0 - progress)
    if kind == "cosine":
        return peak * max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress)))
    if kind == "cosine_with_restarts":
        within = float(settings.get("num_cycles", 1)) * progress % 1.0
        return peak * max(0.0, 0.5 * (1.0 + math.cos(math.pi * within))) if progress < 1 else 0.0
    if kind == "cosine_with_min_lr":
        least = float(settings["min_lr"]) / peak if "min_lr" in settings else float(settings["min_lr_rate"])
        return peak * max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress)) * (1 - least) + least)
    if kind == "polynomial":
        return (peak - _POLYNOMIAL_END) * (1.0 - progress) + _POLYNOMIAL_END if progress < 1 else _POLYNOMIAL_END
    assert kind == "inverse_sqrt", kind
    timescale = warmup or 10_000
    return peak / math.sqrt((step + timescale - warmup) / timescale)


def _stable_then_decay(step: int, num_steps: int, warmup: int, settings: ScheduleSettings) -> float:
    """Share of the peak: rises linearly, stays, decays."""
    least = float(settings.get("min_lr_ratio", 0.0))
    decay = warmup_steps(float(settings["num_decay_steps"]), num_steps)
    stable = num_steps - warmup - decay
    if "num_stable_steps" in settings:
        stable = warmup_steps(float(settings["num_stable_steps"]), num_steps)
    if step < warmup:
        return step / max(1, warmup) * (1 - least) + least
    if step < warmup + stable:
        return 1.0
    if step >= warmup + stable + decay:
        return least
    progress = (step - warmup - stable) / max(1, decay)
    match settings.get("decay_type", "cosine"):
        case "linear":
            left = 1 - progress
        case "1-sqrt":
            left = 1 - math.sqrt(progress)
        case _:
            left = 0.5 * (1 + math.cos(math.pi * progress))
    return max(0.0, left * (1 - least) + least)
