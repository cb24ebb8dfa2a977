"""Weft's side of the comparison: the jobs of a workload in one microbatch, one step of all, and the whole engine.

A step is what the engine does for one microbatch: forward and backward for all jobs, then every job's optimizer step.
Losses and norms are read back, as the engine does: once the next microbatch has been started.

In the measurement of the whole engine, every job has the samples of its share of one microbatch, over and over, so that
the engine runs the microbatch that `BenchJobs` runs, and its planning, packing, metrics on disk and events besides.
"""

from __future__ import annotations

import math
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.clock import Effort, Measured, in_turn_s, peak_gb, release
from benchmarks.steps.gradients import measure_bits
from benchmarks.steps.regimes import BenchProgram, BenchRun, Workload, packed_samples
from weft.adapters.adapter import Adapter
from weft.data.dataset import Dataset, JobData
from weft.engine.engine import Engine
from weft.engine.events import MicrobatchDone
from weft.engine.execute.optimizers import optimizer_of
from weft.engine.execute.optimizers.optimizer import Results, step_together
from weft.engine.jobs.progress import PLANNED_BATCHES
from weft.errors import JobError
from weft.kernels.device import is_gpu
from weft.kernels.device_event import median_s
from weft.kernels.dropout import mix
from weft.model.backbone import Backbone
from weft.model.packed import PackedBatch, SlotSample, pack_samples
from weft.model.path import PendingScores
from weft.spec import AdapterSpec, JobSpec

TURN_S = 1.0
"""Of frozen steps, or of steps with adapters, before it is the other's turn."""
JOB = JobSpec("bench", ("random tokens",), learning_rate=1e-4)
"""The optimizer settings of every job."""


class BenchJobs:
    """The jobs of a workload, attached to a backbone, with their samples packed."""

    def __init__(self, backbone: Backbone, workload: Workload, *, frozen: bool = False) -> None:
        """Frozen: the same microbatch, but no adapter anywhere."""
        self.backbone = backbone
        self.row_tile = backbone.path.row_tile(workload.capacity)
        self.adapters: list[Adapter] = []
        self.slots: list[int] = []
        if not frozen:
            for seed, rank in enumerate(workload.ranks):
                self.adapters.append(backbone.new_adapter(AdapterSpec(r=rank, lora_dropout=workload.dropout), seed))
                self.slots.append(backbone.attach(self.adapters[-1]))
        self.optimizers = [optimizer_of(adapter, JOB) for adapter in self.adapters]
        self._last: tuple[PendingScores, Results] | None = None
        """The step that has not been looked at yet."""
        self.batch = self._pack(workload)

    def _pack(self, workload: Workload) -> PackedBatch:
        on_slots = []
        for job, samples in enumerate(packed_samples(workload, self.backbone.vocabulary)):
            weight = 1.0 / sum(sample.num_supervised for sample in samples)
            slot = self.slots[job] if self.slots else None
            for index, sample in enumerate(samples):
                on_slots.append(SlotSample(sample, slot, weight, mix(job, 0, index)))
        return pack_samples(on_slots, self.row_tile, self.backbone.device)

    def forward_backward_frozen(self) -> None:
        """The same without adapters, all the way back; what an adapter costs is counted from here."""
        running = self.backbone.path.launch(self.batch, self.row_tile, through=True)
        self.look()
        self._last = (running, list)

    def take_steps(self) -> None:
        """Every job's optimizer step, together; clipped and checked as in training."""
        step_together(self.optimizers, [True] * len(self.optimizers))()

    def step(self) -> None:
        """One whole step of all jobs."""
        running = self.backbone.launch(self.batch, self.row_tile)
        self.look()
        owners = [self.slots.index(slot) for slot in self.batch.segment_slots if slot is not None]
        finite_J = running.finite(owners, len(self.slots))
        self._last = (running, step_together(self.optimizers, [True] * len(self.optimizers), finite_J))

    def look(self) -> None:
        """Reads what came out of the last step; waits for it."""
        if self._last is None:
            return
        (running, results), self._last = self._last, None
        losses = running.losses()
        if any(updated.skipped for updated in results()) or not all(math.isfinite(loss) for loss in losses):
            raise JobError(f"losses or gradients are not finite: {losses}.", where="benchmarks step")

    def detach(self) -> None:
        """Frees the slots."""
        for slot in self.slots:
            self.backbone.detach(slot)


def measure(backbone: Backbone, run: BenchRun, effort: Effort) -> Measured:
    """One run of Weft, with or without adapters."""
    _new_account(backbone)
    if run.program is BenchProgram.WEFT_BITS:
        return measure_bits(backbone, run)
    measures = {BenchProgram.WEFT_FROZEN: _measure_frozen, BenchProgram.WEFT_ENGINE: measure_engine}
    return measures.get(run.program, _measure_jobs)(backbone, run, effort)


def _new_account(backbone: Backbone) -> None:
    """Starts a new account of the peak; a graph captured earlier would hide its memory from it."""
    backbone.path.forget()
    release(backbone.device)


def _measure_jobs(backbone: Backbone, run: BenchRun, effort: Effort) -> Measured:
    jobs = BenchJobs(backbone, run.workload)
    try:
        seconds = median_s(jobs.step, backbone.device, **effort.times)
        jobs.look()
        stepping = median_s(jobs.take_steps, backbone.device, warmups=effort.warmups, repeats=effort.repeats)
        # Once more, now that the optimizers have their moments, which were not there yet when the step was captured.
        _new_account(backbone)
        jobs.step()
        jobs.look()
        peak = peak_gb(backbone.device)
    finally:
        jobs.detach()
    batch = jobs.batch
    return Measured(
        batch.num_tokens,
        batch.num_rows,
        seconds,
        peak,
        f"{len(jobs.slots)} jobs, optimizers {stepping / seconds:.1%} of the step",
        {"optimizer_ms": stepping * 1e3},
    )


def _measure_frozen(backbone: Backbone, run: BenchRun, effort: Effort) -> Measured:
    """Also what adapters cost over it, the two taken in turn."""
    frozen = BenchJobs(backbone, run.workload, frozen=True)
    frozen.forward_backward_frozen()
    peak = peak_gb(backbone.device)
    jobs = BenchJobs(backbone, run.workload)
    works = (jobs.step, frozen.forward_backward_frozen)
    try:
        jobs.step()
        turn_s = TURN_S if is_gpu(backbone.device) else 0.0
        with_jobs, seconds = in_turn_s(works, backbone.device, rounds=effort.rounds, turn_s=turn_s)
    finally:
        jobs.detach()
    batch, overhead = frozen.batch, with_jobs / seconds - 1
    detail = f"no adapters; with them, in turn, {overhead:+.1%}"
    return Measured(batch.num_tokens, batch.num_rows, seconds, peak, detail, {"overhead": overhead})


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
    with tempfile.TemporaryDirectory() as scratch:
        engine = Engine(backbone, capacity=run.workload.capacity)
        engine.keep_in(Path(scratch) / "run")
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
