"""A job while it trains: its adapter, optimizer and place in its own data. Nothing here knows of other jobs."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Any

import torch

from weft.adapters.dropout import mix
from weft.adapters.lora import Adapter
from weft.backbone.packed import Placed
from weft.data.dataset import JobData
from weft.data.order import BatchSchedule
from weft.data.sample import Sample
from weft.engine.schedule import learning_rate, warmup_steps
from weft.plan.types import Batch, JobQueue, Segment
from weft.spec import JobSpec

PLANNED_BATCHES = 8
"""Global batches a planner sees ahead."""
LARGEST_WEIGHT = 1e6
"""A job with a larger adapter weight is failed: its results are numbers without meaning, even where finite."""
MAX_SKIPPED = 3
"""Steps in a row with a non-finite loss or gradient after which a job is failed."""


class JobState(enum.StrEnum):
    """Where a job stands."""

    QUEUED = "queued"
    RUNNING = "running"
    PAUSED = "paused"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        """Nothing follows."""
        return self in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did."""

    loss: float
    grad_norm: float
    learning_rate: float
    tokens: int
    skipped: bool


class LiveJob:
    """One job's whole training state."""

    def __init__(self, spec: JobSpec, data: JobData, adapter: Adapter) -> None:
        self.spec = spec
        self.data = data
        self.adapter = adapter
        self.state = JobState.QUEUED
        self.reason: str | None = None
        self.slot: int | None = None
        self.order = BatchSchedule(
            num_samples=len(data.train.samples),
            batch_size=spec.batch_size,
            num_epochs=spec.num_train_epochs,
            max_steps=spec.max_steps,
            seed=spec.seed,
            shuffle=spec.shuffle,
        )
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
        self.best_params: tuple[torch.Tensor, torch.Tensor] | None = None
        self.stopped_early = False
        self.diverged: str | None = None
        """Why the job cannot go on, once it cannot."""
        self.settled_step = 0
        """The last step after which everything due is done: metrics, evaluation, checkpoint, adapter."""
        self.evaluated_step = 0
        self.saved_step = 0
        self._batch: list[Sample] = []
        self._batch_step = -1
        self._loss_sum = 0.0
        self.optimizer = self._make_optimizer()

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
        last = min(self.num_steps, self.step + PLANNED_BATCHES)
        batches = []
        for step in range(self.step, last):
            lengths = [self.data.train.samples[i].length for i in self.order.batch(step)]
            first = self.index if step == self.step else 0
            batches.append(Batch(step, first, tuple(lengths[first:])))
        return JobQueue(self.spec.name, tuple(batches), last == self.num_steps, self.spec.priority, self.num_tokens)

    def place(self, segment: Segment) -> Placed:
        """The sample of a segment with all the backbone needs to know of it."""
        self._load_batch(segment.step)
        assert segment.index == self.index, "samples run in the job's own order"
        self.index += 1
        weight = 1.0 / sum(s.num_supervised for s in self._batch)
        key = mix(self.spec.seed, segment.step, segment.index)
        return Placed(self._batch[segment.index], self.slot, weight, key)

    def add_loss(self, loss_sum: float) -> None:
        """Counts one sample's summed loss towards the current global batch; samples come in the job's order."""
        self._loss_sum += loss_sum

    def rewind(self) -> None:
        """Goes back to the last step boundary: forgets what has run of the current global batch."""
        self.index, self._loss_sum = 0, 0.0
        self.adapter.zero_grad()

    def take_step(self) -> StepResult:
        """Clips and applies the gradients of a complete global batch; skips them if anything is not finite."""
        self._load_batch(self.step)
        assert self.index == len(self._batch), "a step needs its whole global batch"
        loss = self._loss_sum / sum(s.num_supervised for s in self._batch)
        norm = self._grad_norm()
        rate = self._set_learning_rate()
        skipped = not (math.isfinite(loss) and math.isfinite(norm))
        if not skipped:
            self._clip(norm)
            self.optimizer.step()
        self.adapter.zero_grad()
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        self.num_skipped += skipped
        tokens = sum(s.length for s in self._batch)
        self.step, self.index, self._loss_sum = self.step + 1, 0, 0.0
        self.num_tokens += tokens
        return StepResult(loss, norm, rate, tokens, skipped)

    def divergence(self, result: StepResult) -> str | None:
        """Why the job cannot go on after this step, if it cannot."""
        advice = f"(step {self.step}, learning rate {result.learning_rate:g}); try a lower learning_rate."
        if self.skipped_in_a_row >= MAX_SKIPPED:
            return (
                f"diverged: loss {result.loss:g} and gradient norm {result.grad_norm:g}, not finite {MAX_SKIPPED} "
                f"steps in a row {advice}"
            )
        largest = float(torch.stack([p.abs().max() for p in (self.adapter.params_a, self.adapter.params_b)]).max())
        return None if largest <= LARGEST_WEIGHT else f"diverged: an adapter weight of size {largest:g} {advice}"

    def is_eval_due(self) -> bool:
        """An evaluation belongs after the last step and is not done yet."""
        if self.data.eval is None or self.evaluated_step == self.step:
            return False
        every = self.spec.eval_steps or self.order.steps_per_epoch
        return self.step % every == 0 or self.step == self.num_steps

    def is_save_due(self) -> bool:
        """A checkpoint belongs after the last step and is not written yet."""
        return self.saved_step != self.step and (self.step % self.spec.save_steps == 0 or self.is_complete)

    def record_eval(self, eval_loss: float) -> bool:
        """Notes an evaluation; True if it is the best so far. Stops the job when patience runs out."""
        self.evaluated_step = self.step
        is_best = math.isfinite(eval_loss) and (self.best_eval is None or eval_loss < self.best_eval)
        if is_best:
            self.best_eval, self.evals_since_best = eval_loss, 0
        else:
            self.evals_since_best += 1
        patience = self.spec.early_stopping_patience
        if patience is not None:
            if is_best:
                self.best_params = (self.adapter.params_a.clone(), self.adapter.params_b.clone())
            self.stopped_early = self.evals_since_best >= patience
        return is_best

    def use_best(self) -> None:
        """Puts the best evaluated weights into the adapter, if early stopping kept any."""
        if self.best_params is not None:
            self.adapter.params_a.copy_(self.best_params[0])
            self.adapter.params_b.copy_(self.best_params[1])

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything of the job that is a tensor."""
        named = {"params_a": self.adapter.params_a, "params_b": self.adapter.params_b}
        for name, param in zip(("a", "b"), self._params(), strict=True):
            named.update({f"optimizer_{name}.{k}": v for k, v in self.optimizer.state[param].items()})
        if self.best_params is not None:
            named["best_a"], named["best_b"] = self.best_params
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
        self.step, self._batch_step = step, -1
        self.evaluated_step = self.saved_step = self.settled_step = step
        self.rewind()
        self.adapter.params_a.copy_(tensors["params_a"])
        self.adapter.params_b.copy_(tensors["params_b"])
        for name, param in zip(("a", "b"), self._params(), strict=True):
            prefix = f"optimizer_{name}."
            state = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
            if state:
                # AdamW keeps its step count on the CPU; the moments live with the parameters.
                moved = {k: v if k == "step" else v.to(param.device) for k, v in state.items()}
                self.optimizer.state[param] = moved
        if "best_a" in tensors:
            device = self.adapter.params_a.device
            self.best_params = (tensors["best_a"].to(device), tensors["best_b"].to(device))
        self.num_tokens = counters["num_tokens"]
        self.num_skipped = counters["num_skipped"]
        self.skipped_in_a_row = counters["skipped_in_a_row"]
        self.best_eval = counters["best_eval"]
        self.evals_since_best = counters["evals_since_best"]
        self.stopped_early = counters["stopped_early"]

    def _params(self) -> tuple[torch.Tensor, torch.Tensor]:
        group_a, group_b = self.optimizer.param_groups
        return group_a["params"][0], group_b["params"][0]

    def _make_optimizer(self) -> torch.optim.AdamW:
        groups = []
        for params, grad in (
            (self.adapter.params_a, self.adapter.grad_a),
            (self.adapter.params_b, self.adapter.grad_b),
        ):
            # The optimizer's parameter is the flat buffer itself, so its steps show in every module's view.
            parameter = torch.nn.Parameter(params, requires_grad=True)
            parameter.grad = grad
            groups.append({"params": [parameter]})
        return torch.optim.AdamW(
            groups,
            lr=self.spec.learning_rate,
            betas=(self.spec.adam_beta1, self.spec.adam_beta2),
            eps=self.spec.adam_epsilon,
            weight_decay=self.spec.weight_decay,
            foreach=False,
            fused=True,
        )

    def _set_learning_rate(self) -> float:
        warmup = warmup_steps(self.spec.warmup_steps, self.num_steps)
        rate = learning_rate(self.spec.lr_scheduler_type, self.spec.learning_rate, self.step, self.num_steps, warmup)
        group_a, group_b = self.optimizer.param_groups
        group_a["lr"], group_b["lr"] = rate, rate * (self.spec.loraplus_lr_ratio or 1.0)
        return rate

    def _grad_norm(self) -> float:
        norms = torch.stack([self.adapter.grad_a.norm(), self.adapter.grad_b.norm()])
        return float(norms.norm())

    def _clip(self, norm: float) -> None:
        if not self.spec.max_grad_norm:
            return
        factor = self.spec.max_grad_norm / (norm + 1e-6)
        if factor < 1:
            self.adapter.grad_a.mul_(factor)
            self.adapter.grad_b.mul_(factor)

    def _load_batch(self, step: int) -> None:
        if step != self._batch_step:
            assert step == self.step, "global batches run in order"
            self._batch = [self.data.train.samples[i] for i in self.order.batch(step)]
            self._batch_step = step
