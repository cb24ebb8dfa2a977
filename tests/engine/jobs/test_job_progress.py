"""How far a job has come is plain arithmetic: no tensor, no device, and the learning rates of transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from tiny_models import job_spec, random_data

from weft.engine.jobs.progress import MAX_SKIPPED, JobProgress
from weft.job_state import ReasonCode
from weft.kernels.adamw import Updated
from weft.objectives.objective import ACCURACY, LOSS, MetricSum
from weft.plan.types import Segment


def progress(**settings: Any) -> JobProgress:
    return JobProgress(job_spec("a", global_batch_size=3, **settings), random_data(0, num_samples=7))


def run_batch(job: JobProgress, loss: float = 1.0, **updated: Any) -> Any:
    """One whole global batch, and its step."""
    for index, length in enumerate(job.batches.lengths(job.step)):
        job.add_score(Segment("a", job.step, index, length), {LOSS: MetricSum(loss, 1.0), ACCURACY: MetricSum(1, 1)})
    given = {"grad_norm": 1.0, "largest": 1.0, "skipped": False, **updated}
    return job.finish_step(job.learning_rate(), Updated(**given))


def test_progress_when_imported_then_torch_is_not():
    code = "import sys, weft.engine.jobs.progress; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_counters_when_restored_from_json_then_the_queue_goes_on_where_it_was():
    """What a checkpoint records is enough: order and learning rate follow from the step."""
    settings = {"max_steps": 6, "early_stopping_patience": 2, "eval_data": 2}
    job = progress(**settings)
    for loss in (3.0, 2.0):
        run_batch(job)
        job.record_eval(loss)
    run_batch(job, loss=float("nan"), skipped=True)
    job.record_eval(2.5)
    again = progress(**settings)
    again.restore(job.step, json.loads(json.dumps(job.counters())))
    assert again.counters() == job.counters() and again.step == 3
    assert again.num_skipped == again.skipped_in_a_row == 1
    assert again.queue(0) == job.queue(0) and again.learning_rate() == job.learning_rate()
    assert again.has_best and not again.stopped_early
    again.record_eval(2.6)
    assert again.stopped_early and again.is_complete


def test_rewind_when_part_of_a_global_batch_has_run_then_it_is_queued_whole_again():
    job = progress(max_steps=4)
    before = job.queue(0)
    job.add_score(Segment("a", 0, 0, job.batches.lengths(0)[0]), {LOSS: MetricSum(float("inf"), 1.0)})
    assert job.queue(0) != before and not job.is_finite
    job.rewind()
    assert job.queue(0) == before and job.is_finite and job.num_rewinds == 1


def test_job_when_steps_are_skipped_in_a_row_or_weights_explode_then_has_diverged():
    job = progress(max_steps=9)
    for _ in range(MAX_SKIPPED - 1):
        run_batch(job, skipped=True)
    run_batch(job)
    assert job.diverged is None
    for _ in range(MAX_SKIPPED):
        assert job.diverged is None
        run_batch(job, skipped=True)
    assert job.diverged is not None and job.diverged.code is ReasonCode.DIVERGED
    other = progress(max_steps=9)
    run_batch(other, largest=1e7)
    assert "an adapter weight of size 1e+07 (step 1" in str(other.diverged)
