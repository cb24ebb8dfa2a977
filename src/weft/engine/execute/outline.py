"""What forecasts need to know of a run's jobs, read from their data: no weight is read and nothing is trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from weft.data.dataset import JobData
from weft.data.global_batch import GlobalBatches
from weft.data.load import load_job_data
from weft.data.order import BatchSchedule
from weft.methods.registry import cost_ranks, has_kernels
from weft.model.resolve import ResolvedModel
from weft.model.source import load_tokenizer
from weft.plan.cost.job_state import job_state_bytes
from weft.plan.simulate.forecast import JobOutline
from weft.plan.types import Batch, JobQueue
from weft.spec import JobSpec


def outlines(model: ResolvedModel, jobs: Sequence[JobSpec], base_dir: Path, num_planned: int) -> list[JobOutline]:
    """The jobs with their next global batches, at most so many of each."""
    tokenizer = load_tokenizer(model.source)
    vocabulary = model.config.get("vocab_size", 0)
    return [
        replace(
            _outline(job, load_job_data(job, tokenizer, base_dir), num_planned, is_fused=model.is_fused),
            # New tokens have a row on either side, unless these are tied.
            num_trained_rows=job.adapter.own_rows.count(vocabulary) + 2 * len(job.adapter.new_tokens),
        )
        for job in jobs
    ]


def _outline(job: JobSpec, data: JobData, num_planned: int, *, is_fused: bool) -> JobOutline:
    order = BatchSchedule.of(job, *data.train.sizes)
    ahead, planned = GlobalBatches(data.train, order), min(order.num_steps, num_planned)
    batches = tuple(Batch(step, 0, tuple(ahead.lengths(step)), ahead.groups(step)) for step in range(planned))
    # As `Backbone.lane` says it: a method without kernels runs apart from those that have them.
    lane = "reference" if is_fused and not has_kernels(job.adapter) else ""
    queue = JobQueue(job.name, batches, planned == order.num_steps, job.priority, lane=lane)
    return JobOutline(
        queue=queue,
        num_steps=order.num_steps,
        num_tokens=order.num_tokens(data.train.group_tokens),
        cost_rank=cost_ranks(job.adapter).widest,
        rank=job.adapter.rank,
        forward_tokens=data.forward_tokens(order, job.eval_steps),
        state_bytes=job_state_bytes(job),
        is_any_order=job.gradient_sum == "any_order",
    )
