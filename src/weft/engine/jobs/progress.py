"""Counts how far a job has come, which is what a checkpoint records besides tensors; no other job plays a part."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weft.data.dataset import JobData
from weft.data.global_batch import GlobalBatches
from weft.data.order import BatchSchedule
from weft.engine.jobs.schedules import learning_rate, warmup_steps
from weft.job_state import Reason, ReasonCode
from weft.objectives.metrics import MeanScores, MetricTotals, Score
from weft.plan.program import Turn
from weft.plan.types import Batch, JobQueue, Segment
from weft.spec import JobSpec

if TYPE_CHECKING:
    from weft.kernels.adamw import Updated

PLANNED_BATCHES = 8
"""Global batches a planner sees ahead."""
LARGEST_WEIGHT = 1e6
"""A job with a larger adapter weight is failed: its results are numbers without meaning, even where finite."""
MAX_SKIPPED = 3
"""Steps in a row with a non-finite loss or gradient after which a job is failed."""


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did."""

    means: MeanScores
    grad_norm: float
    learning_rate: float
    tokens: int
    skipped: bool


class JobProgress:
    """Steps, samples and tokens that a job has done, and its best evaluation."""

    def __init__(self, spec: JobSpec, data: JobData) -> None:
        self._spec = spec
        self._fingerprint = data.train.fingerprint
        self.reference: str | None = None
        """What tells the adapter that the job compares with from any other, if there is one."""
        self.order = BatchSchedule.of(spec, *data.train.sizes)
        self.batches = GlobalBatches(data.train, self.order)
        self.step = 0
        """Optimizer steps done."""
        self.index = 0
        """Samples done of the current global batch."""
        self.num_tokens = 0
        """Tokens trained, whole global batches only."""
        self.num_skipped = 0
        self.skipped_in_a_row = 0
        self.best_eval: float | None = None
        self.evals_since_best = 0
        self.stopped_early = False
        self.hold_step = self.num_steps
        """The step it is not to go beyond for now."""
        self.diverged: Reason | None = None
        """Why the job cannot go on, once it cannot."""
        self.num_rewinds = 0
        """Times that what had run of a global batch was forgotten; what still runs of it then counts no more."""
        self._scores = MetricTotals()

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the whole job."""
        return self.order.num_steps

    @property
    def is_complete(self) -> bool:
        """All steps are done."""
        return self.stopped_early or self.step >= self.num_steps

    @property
    def is_held(self) -> bool:
        """It stands at the step it is not to go beyond, and has not ended."""
        return not self.is_complete and self.step >= self.hold_step

    @property
    def epoch(self) -> float:
        """Passes over the data so far."""
        return self.order.epoch_of(self.step)

    @property
    def has_best(self) -> bool:
        """Whether early stopping keeps the weights of the best evaluation."""
        return self._spec.early_stopping_patience is not None and self.best_eval is not None

    @property
    def is_finite(self) -> bool:
        """Whether the loss of what has run of the global batch is finite."""
        return self._scores.is_finite

    def queue(self, priority: int, lane: str = "") -> JobQueue:
        """The job's next global batches, for a planner."""
        return self._queue(self.step, self.index, self.num_tokens, priority, lane)

    def queue_after(self, turns: Sequence[Turn], priority: int, lane: str = "") -> JobQueue | None:
        """The queue once these have run too, if nothing comes in between; None if the job has ended or holds then."""
        name, step, index, num_tokens = self._spec.name, self.step, self.index, self.num_tokens
        for turn in turns:
            index += sum(segment.job == name for segment in turn.microbatch.segments)
            if any(due.job == name for due in turn.steps):
                num_tokens += self.batches[step].num_tokens
                step, index = step + 1, 0
        return self._queue(step, index, num_tokens, priority, lane) if step < self.hold_step else None

    def add_score(self, segment: Segment, score: Score) -> None:
        """Counts one sample, which has run, and its score towards the current global batch."""
        assert (segment.step, segment.index) == (self.step, self.index), "samples run in the job's own order"
        self.index += 1
        self._scores.add(score)

    def rewind(self) -> None:
        """Goes back to the last step boundary: forgets what has run of the current global batch."""
        self._begin_batch()
        self.num_rewinds += 1

    def learning_rate(self, step: int | None = None) -> float:
        """The learning rate of a step; by default of the one that is due."""
        spec, warmup = self._spec, warmup_steps(self._spec.warmup_steps, self.num_steps)
        step = self.step if step is None else step
        return learning_rate(
            spec.lr_scheduler_type, spec.learning_rate, step, self.num_steps, warmup, spec.lr_scheduler_kwargs
        )

    def finish_step(self, rate: float, updated: Updated) -> StepResult:
        """Counts a step that has been taken, or skipped because something was not finite."""
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
        """Whether an evaluation is the best so far."""
        return math.isfinite(eval_loss) and (self.best_eval is None or eval_loss < self.best_eval)

    def record_eval(self, eval_loss: float) -> None:
        """Notes an evaluation. Stops the job when patience runs out."""
        if self.is_best(eval_loss):
            self.best_eval, self.evals_since_best = eval_loss, 0
        else:
            self.evals_since_best += 1
        patience = self._spec.early_stopping_patience
        if patience is not None:
            self.stopped_early = self.evals_since_best >= patience

    def counters(self) -> dict[str, Any]:
        """What a checkpoint records; data order, dropout and learning rate follow from the step."""
        return {
            "num_tokens": self.num_tokens,
            "num_skipped": self.num_skipped,
            "skipped_in_a_row": self.skipped_in_a_row,
            "best_eval": self.best_eval,
            "evals_since_best": self.evals_since_best,
            "stopped_early": self.stopped_early,
            "data": self._fingerprint,
            **({} if self.reference is None else {"reference": self.reference}),
        }

    def restore(self, step: int, counters: Mapping[str, Any]) -> None:
        """Goes back to a step boundary that `counters` described."""
        self.step = step
        self.rewind()
        self.num_tokens = counters["num_tokens"]
        self.num_skipped = counters["num_skipped"]
        self.skipped_in_a_row = counters["skipped_in_a_row"]
        self.best_eval = counters["best_eval"]
        self.evals_since_best = counters["evals_since_best"]
        self.stopped_early = counters["stopped_early"]

    def _begin_batch(self) -> None:
        self.index, self._scores = 0, MetricTotals()

    def _divergence(self, result: StepResult, largest: float) -> Reason | None:
        """Why the job cannot go on after this step, if it cannot."""
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
