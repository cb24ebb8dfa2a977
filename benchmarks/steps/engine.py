"""The whole engine on a workload: what a user's training reaches of the speed that bare steps have.

Every job has the samples of its share of one microbatch, over and over, so that the engine runs the microbatch that
`step.Jobs` runs, and its planning, packing, metrics on disk and events besides.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.clock import Effort, Measured, peak_gb
from benchmarks.steps.regimes import BenchRun
from benchmarks.steps.samples import packed_samples
from weft.data.dataset import Dataset, JobData
from weft.engine.engine import Engine
from weft.engine.events import MicrobatchDone
from weft.engine.jobs.progress import PLANNED_BATCHES
from weft.model.backbone import Backbone
from weft.spec import AdapterSpec, JobSpec

FOREVER = 10**6
"""Steps of a job, and of the time between two checkpoints: it is cancelled before."""


@dataclass
class _Watch:
    """Counts microbatches from the end of the warm-up on."""

    warmups: int
    repeats: int
    least_s: float
    begun_s: float = 0.0
    seconds: float = 0.0
    seen: list[MicrobatchDone] = field(default_factory=list)

    def note(self, done: MicrobatchDone) -> bool:
        """Whether enough has been seen."""
        now_s = time.perf_counter()
        if self.warmups > 0:
            self.warmups -= 1
            self.begun_s = now_s
            return False
        self.seen.append(done)
        self.seconds = now_s - self.begun_s
        return len(self.seen) >= self.repeats and self.seconds >= self.least_s


def measure_engine(backbone: Backbone, run: BenchRun, effort: Effort) -> Measured:
    """Tokens/s of the engine once it is under way; leaves the backbone without adapters."""
    # Whole programs, whose ends count too: a program is as long as the global batches that a planner sees.
    watch = _Watch(PLANNED_BATCHES, 2 * PLANNED_BATCHES, effort.repeats * effort.in_a_row_s)
    with tempfile.TemporaryDirectory() as place:
        engine = Engine(backbone, capacity=run.workload.capacity)
        engine.keep_in(Path(place) / "run")
        for job, samples in enumerate(packed_samples(run.workload, backbone.vocabulary)):
            spec = JobSpec(
                f"job{job}",
                ("random tokens",),
                max_steps=FOREVER,
                save_steps=FOREVER,
                global_batch_size=len(samples),
                max_length=run.workload.lengths[1],
                adapter=AdapterSpec(r=run.workload.ranks[job], lora_dropout=run.workload.dropout),
            )
            engine.submit(spec, JobData(Dataset.of(samples, "random tokens"), None))
        for event in engine.events():
            if isinstance(event, MicrobatchDone) and watch.note(event):
                break
        for name in engine.jobs:
            engine.cancel(name)
        engine.run()
    number = len(watch.seen)
    tokens, rows = (sum(numbers) // number for numbers in zip(*((m.tokens, m.rows) for m in watch.seen), strict=True))
    seconds = watch.seconds / number
    device_s = sum(done.seconds for done in watch.seen) / number
    detail = f"the whole engine; forward and backward {device_s / seconds:.1%} of the time"
    return Measured(tokens, rows, seconds, peak_gb(backbone.device), detail)
