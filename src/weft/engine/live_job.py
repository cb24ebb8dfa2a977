"""A job while it trains: its adapter, optimizer and place in its own data. Nothing here knows of other jobs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weft.adapters.adapter import Adapter
from weft.backbone.out_of_memory import memory_errors
from weft.backbone.packed import Placed
from weft.data.dataset import JobData
from weft.data.order import BatchSchedule
from weft.data.sample import Sample
from weft.engine.schedule import learning_rate, warmup_steps
from weft.execute.optimizer import Optimizer, step_together
from weft.job_state import JobState, Reason, ReasonCode
from weft.kernels.adamw import Updated
from weft.kernels.dropout import mix
from weft.objectives.metrics import MeanScores, Score, Tally
from weft.plan.program import Turn
from weft.plan.types import Batch, JobQueue, Segment
from weft.spec import JobSpec

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


@dataclass(frozen=True)
class EvalResult:
    """An evaluation that is done and not yet told."""

    step: int
    means: MeanScores
    seconds: float
    """Its share of the time."""


@dataclass(frozen=True)
class GlobalBatch:
    """The samples between two optimizer steps."""

    samples: tuple[Sample, ...]
    divisor: float
    """What its loss is divided by."""
    num_tokens: int


class LiveJob:
    """One job's whole training state."""

    def __init__(self, spec: JobSpec, data: JobData, adapter: Adapter) -> None:
        self.spec = spec
        self.data = data
        self.adapter = adapter
        self.state = JobState.QUEUED
        self.reason: Reason | None = None
        self.slot: int | None = None
        self.has_started = False
        """It has had a slot in this engine, so its state is the one in memory."""
        self.has_heard = False
        """Its owner has been told that it waits."""
        self.order = BatchSchedule.of(spec, data.train.num_groups)
        self.longest = max(s.length for s in [*data.train.samples, *(data.eval.samples if data.eval else ())])
        """Tokens of the longest sample, evaluation included."""
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
        self.best_params: dict[str, torch.Tensor] | None = None
        """The weights of the best evaluation, by group, if early stopping asks for them."""
        self.stopped_early = False
        self.diverged: Reason | None = None
        """Why the job cannot go on, once it cannot."""
        self.settled_step = 0
        """The last step after which everything due is done: metrics, evaluation, checkpoint, adapter."""
        self.evaluated_step = 0
        self.looked: EvalResult | None = None
        """The evaluation after its last step, if it was done together with others."""
        self.saved_step = 0
        self._batches: dict[int, GlobalBatch] = {}
        """Global batches at hand, by step: the current one, and the next if it has been asked for."""
        self._scores = Tally()
        self.num_rewinds = 0
        """Times that what had run of a global batch was forgotten; what still runs of it then counts no more."""
        self.optimizer = Optimizer(adapter, spec)

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the whole job."""
        return self.order.num_steps

    @property
    def is_complete(self) -> bool:
        """All steps are done."""
        return self.stopped_early or self.step >= self.num_steps

    @property
    def epoch(self) -> float:
        """Passes over the data so far."""
        return self.order.epoch_of(self.step)

    def queue(self) -> JobQueue:
        """The job's next global batches, for a planner."""
        return self._queue(self.step, self.index, self.num_tokens)

    def queue_after(self, turns: Sequence[Turn]) -> JobQueue | None:
        """The queue once these have run too, if nothing comes in between; None if the job has ended then."""
        step, index, num_tokens = self.step, self.index, self.num_tokens
        for turn in turns:
            index += sum(segment.job == self.spec.name for segment in turn.microbatch.segments)
            if any(due.job == self.spec.name for due in turn.steps):
                num_tokens += self._batch(step).num_tokens
                step, index = step + 1, 0
        return self._queue(step, index, num_tokens) if step < self.num_steps else None

    def place(self, segment: Segment) -> Placed:
        """The sample of a segment with all the backbone needs to know of it; changes nothing."""
        batch = self._batch(segment.step)
        key = mix(self.spec.seed, segment.step, segment.index)
        return Placed(batch.samples[segment.index], self.slot, 1.0 / batch.divisor, key)

    def add_score(self, segment: Segment, score: Score) -> None:
        """Counts one sample, which has run, and its score towards the current global batch."""
        assert (segment.step, segment.index) == (self.step, self.index), "samples run in the job's own order"
        self.index += 1
        self._scores.add(score)

    def rewind(self) -> None:
        """Goes back to the last step boundary: forgets what has run of the current global batch."""
        self._forget_batch()
        self.adapter.zero_grad()

    def _forget_batch(self) -> None:
        self._begin_batch()
        self.num_rewinds += 1

    def _begin_batch(self) -> None:
        self.index, self._scores = 0, Tally()

    def move_to(self, device: torch.device) -> None:
        """Takes the whole state of the last step boundary to a device, bit by bit; only while no slot is held.

        Without the memory for it the job ends up on the CPU, and torch.OutOfMemoryError says so.
        """
        assert self.slot is None, "a slot reads the weights where they are"
        tensors = self.tensors()
        self._forget_batch()
        try:
            self._settle_on(device, tensors)
        except torch.OutOfMemoryError:
            self._settle_on(torch.device("cpu"), tensors)
            raise

    @memory_errors()
    def _settle_on(self, device: torch.device, tensors: dict[str, torch.Tensor]) -> None:
        self.adapter.move_to(device)
        self.optimizer = Optimizer(self.adapter, self.spec)
        self.optimizer.restore(tensors)
        self._take_best(tensors)

    @property
    def is_finite(self) -> bool:
        """Whether the loss of what has run of the global batch is finite."""
        return self._scores.is_finite

    def begin_step(self) -> float:
        """Sets the learning rate of the step that is due."""
        warmup = warmup_steps(self.spec.warmup_steps, self.num_steps)
        rate = learning_rate(self.spec.lr_scheduler_type, self.spec.learning_rate, self.step, self.num_steps, warmup)
        self.optimizer.set_rate(rate)
        return rate

    def finish_step(self, rate: float, updated: Updated) -> StepResult:
        """Counts a step that has been taken, or skipped because something was not finite."""
        batch = self._batch(self.step)
        assert self.index == len(batch.samples), "a step needs its whole global batch"
        del self._batches[self.step]
        means = self._scores.means()
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if updated.skipped else 0
        self.num_skipped += updated.skipped
        self.step += 1
        self._begin_batch()
        self.num_tokens += batch.num_tokens
        result = StepResult(means, updated.grad_norm, rate, batch.num_tokens, updated.skipped)
        self.diverged = self._divergence(result, updated.largest)
        return result

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

    def is_eval_due(self) -> bool:
        """An evaluation belongs after the last step and is not done yet."""
        if self.data.eval is None or self.evaluated_step == self.step:
            return False
        every = self.spec.eval_steps or self.order.steps_per_epoch
        return self.step % every == 0 or self.step == self.num_steps

    @property
    def is_looked_at(self) -> bool:
        """The evaluation after the last step is done, but not yet told."""
        return self.looked is not None and self.looked.step == self.step

    def is_save_due(self) -> bool:
        """A checkpoint belongs after the last step and is not written yet."""
        return self.saved_step != self.step and (self.step % self.spec.save_steps == 0 or self.is_complete)

    def record_eval(self, eval_loss: float) -> bool:
        """Notes an evaluation; True if it is the best so far. Stops the job when patience runs out."""
        is_best = math.isfinite(eval_loss) and (self.best_eval is None or eval_loss < self.best_eval)
        patience = self.spec.early_stopping_patience
        if is_best and patience is not None:
            # First: without the memory for it nothing has changed, and the evaluation is noted again.
            self.best_params = {name: params.clone() for name, params in self.adapter.flat().items()}
        self.evaluated_step = self.step
        if is_best:
            self.best_eval, self.evals_since_best = eval_loss, 0
        else:
            self.evals_since_best += 1
        if patience is not None:
            self.stopped_early = self.evals_since_best >= patience
        return is_best

    def use_best(self) -> None:
        """Puts the best evaluated weights into the adapter, if early stopping kept any."""
        if self.best_params is not None:
            self.adapter.put(self.best_params)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything of the job that is a tensor."""
        named = {f"params_{group}": params for group, params in self.adapter.flat().items()}
        named |= self.optimizer.tensors()
        named |= {f"best_{group}": params for group, params in (self.best_params or {}).items()}
        return {name: tensor.detach().cpu().clone() for name, tensor in named.items()}

    def counters(self) -> dict[str, Any]:
        """Everything of the job that is not a tensor; data order, dropout and learning rate follow from the step."""
        return {
            "num_tokens": self.num_tokens,
            "num_skipped": self.num_skipped,
            "skipped_in_a_row": self.skipped_in_a_row,
            "best_eval": self.best_eval,
            "evals_since_best": self.evals_since_best,
            "stopped_early": self.stopped_early,
            "data": self.data.train.fingerprint,
        }

    def restore(self, step: int, tensors: dict[str, torch.Tensor], counters: dict[str, Any]) -> None:
        """Goes back to a step boundary described by `tensors` and `counters`."""
        self.step, self._batches = step, {}
        self.evaluated_step = self.saved_step = self.settled_step = step
        self.looked = None
        self.rewind()
        self.adapter.put({group: tensors[f"params_{group}"] for group in self.adapter.groups})
        self.optimizer.restore(tensors)
        self._take_best(tensors)
        self.num_tokens = counters["num_tokens"]
        self.num_skipped = counters["num_skipped"]
        self.skipped_in_a_row = counters["skipped_in_a_row"]
        self.best_eval = counters["best_eval"]
        self.evals_since_best = counters["evals_since_best"]
        self.stopped_early = counters["stopped_early"]

    def _take_best(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Takes the best weights that `tensors` hold, if any, to where the adapter is."""
        found = {group: tensors.get(f"best_{group}") for group in self.adapter.groups}
        best = {group: params.to(self.adapter.device) for group, params in found.items() if params is not None}
        self.best_params = best or self.best_params

    def _queue(self, first_step: int, first_index: int, num_tokens: int) -> JobQueue:
        last = min(self.num_steps, first_step + PLANNED_BATCHES)
        batches = []
        for step in range(first_step, last):
            lengths = [self.data.train.samples[i].length for i in self.order.batch(step)]
            first = first_index if step == first_step else 0
            batches.append(Batch(step, first, tuple(lengths[first:])))
        return JobQueue(self.spec.name, tuple(batches), last == self.num_steps, self.spec.priority, num_tokens)

    def _batch(self, step: int) -> GlobalBatch:
        if step not in self._batches:
            samples = tuple(self.data.train.samples[i] for i in self.order.batch(step))
            tokens = sum(s.length for s in samples)
            divisor = self.data.train.objective.divisor([s.total_weight for s in samples])
            self._batches[step] = GlobalBatch(samples, divisor, tokens)
        return self._batches[step]


def begin_steps(jobs: Sequence[LiveJob], finite_J: torch.Tensor | None = None) -> Callable[[], list[StepResult]]:
    """Starts to clip and apply the gradients of complete global batches, each job's as if alone; what is not finite is
    left out. `finite_J`: whether losses are that nobody has counted yet. What is returned waits and counts the
    steps."""
    rates = [job.begin_step() for job in jobs]
    results = step_together([job.optimizer for job in jobs], [job.is_finite for job in jobs], finite_J)

    def finish() -> list[StepResult]:
        counted = zip(jobs, rates, results(), strict=True)
        return [job.finish_step(rate, updated) for job, rate, updated in counted]

    return finish
