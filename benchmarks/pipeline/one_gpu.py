"""One replica in stages on one device, each a stream of this process, beside the backbone in one piece.

bits_stages   numbers that are not to the bit those of the backbone in one piece: in the adapters of jobs that were
              trained in 2 and in 4 stages, clipped and with dropout, and in the gradients of every microbatch that is
              timed
stage_sum     how far the sum of the stages' times of one microbatch, forward and back, each by itself, is from the time
              of the whole: the worse of 2 and 4 stages
stage_sim     programs of 4 stages simulated with those times on one device, which does one thing at a time, against how
              long they took

The backbone has random weights, so speeds are those of its shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benchmarks.clock import release
from benchmarks.pipeline.passes import (
    BATCH,
    DROPOUT,
    NUM_JOBS,
    RANK,
    TOKENIZER,
    OneDevice,
    PassTimes,
    num_unequal,
    time_in_turn,
)
from benchmarks.pipeline.recorded import RecordedRun
from weft.data.dataset import Dataset, JobData
from weft.engine.engine import Engine
from weft.errors import JobError
from weft.job_state import JobState
from weft.parallel.stages.stage_group import LocalStages
from weft.parallel.stages.staged import StagedExecutor
from weft.plan.pipeline.build import Schedule
from weft.plan.pipeline.planner import PipelinePlanner
from weft.plan.program import Program
from weft.plan.simulate.interpret import simulate
from weft.plan.simulate.timeline import COMPUTE
from weft.plan.types import JobQueue, Limits
from weft.spec import AdapterSpec, JobSpec

STAGES = (2, 4)
NUM_STEPS, MAX_GRAD_NORM = 3, 0.05
Weights = dict[str, list[torch.Tensor]]
"""The tensors of every job's adapter."""


def measure_stages(bench: OneDevice) -> dict[str, float]:
    """Keys as in `python -m benchmarks pipeline --json`."""
    whole = bench.backbone()
    expected = _train(Engine(whole, capacity=bench.capacity), bench)
    num_differing, sum_error, sim_error = 0, 0.0, 0.0
    for number in STAGES:
        parts = bench.stages(number)
        times = time_in_turn(bench, whole, parts)
        executor = StagedExecutor(LocalStages(parts), TOKENIZER)
        # Graphs are captured the first time.
        runs = [_recorded(executor, number, bench) for _ in range(2)]
        num_differing += times.num_differing + sum(_num_differing(expected, trained) for _, trained in runs)
        sum_error = max(sum_error, abs(times.sum_s / times.whole_s - 1))
        sim_error = _simulation_error(runs[-1][0], times, bench)
        del parts, executor, runs
        release(bench.device)
    return {"bits_stages": float(num_differing), "stage_sum": sum_error, "stage_sim": sim_error}


def _recorded(executor: StagedExecutor, num_stages: int, bench: OneDevice) -> tuple[RecordedRun, Weights]:
    """Trains the jobs in stages: what ran, and what came of it."""
    run, planner = RecordedRun(), PipelinePlanner(Schedule.ONE_F_ONE_B, num_stages)

    def plan(queues: Sequence[JobQueue], limits: Limits) -> Program:
        run.programs.append(planner(queues, limits))
        return run.programs[-1]

    engine = Engine(executor, capacity=bench.capacity, planner=plan)
    trained = _train(engine, bench)
    spans = [span for span in engine.timeline.measured().spans if span.lane == COMPUTE]
    run.spans = sorted(spans, key=lambda span: (span.stage, span.start_s))
    return run, trained


def _train(engine: Engine, bench: OneDevice) -> Weights:
    """The adapters of the jobs after some steps; the engine then forgets them."""
    for job in range(NUM_JOBS):
        spec = JobSpec(
            f"job{job}",
            ("random tokens",),
            seed=job,
            max_steps=NUM_STEPS,
            save_steps=10**6,
            global_batch_size=BATCH,
            max_length=bench.length,
            learning_rate=1e-3,
            max_grad_norm=MAX_GRAD_NORM,
            adapter=AdapterSpec(r=RANK, lora_dropout=DROPOUT),
        )
        engine.submit(spec, JobData(Dataset.of(bench.samples(job), "random tokens"), None))
    engine.run()
    found: Weights = {}
    for name, status in list(engine.jobs.items()):
        if status.state is not JobState.SUCCEEDED:
            raise JobError(f"ended as {status.state}; all jobs of this measurement succeed.", where=f"job {name}")
        found[name] = [tensor for own in engine.executor.adapter_of(name).values() for tensor in own]
        engine.forget(name)
    return found


def _num_differing(expected: Weights, found: Weights) -> int:
    pairs = ((own, other) for name in expected for own, other in zip(expected[name], found[name], strict=True))
    return sum(num_unequal(own, other) for own, other in pairs)


def _simulation_error(run: RecordedRun, times: PassTimes, bench: OneDevice) -> float:
    """By how much the simulator misses the time of the programs on one device."""
    cost = _MeasuredCost(times, bench.capacity)
    recorded_s = simulated_s = 0.0
    for program, spans in run.by_program():
        recorded_s += max(span.end_s for span in spans) - min(span.start_s for span in spans)
        simulated_s += sum(span.duration_s for span in simulate(program, cost).spans if span.lane == COMPUTE)
    return abs(simulated_s / recorded_s - 1)


@dataclass(frozen=True)
class _MeasuredCost:
    """Full microbatches as they were timed; less full ones in proportion. Steps and transfers cost nothing."""

    times: PassTimes
    capacity: int

    def forward_s(self, lengths: Sequence[int], stage: int) -> float:
        """One microbatch forward through one stage."""
        return self.times.pass_s("forward", stage) * sum(lengths) / self.capacity

    def backward_s(self, lengths: Sequence[int], stage: int) -> float:
        """The same, backward."""
        return self.times.pass_s("backward", stage) * sum(lengths) / self.capacity

    def transfer_s(self, num_tokens: int) -> float:
        """Within one device."""
        return 0.0

    def step_s(self, stage: int) -> float:
        """An adapter's few parameters."""
        return 0.0

    def held_bytes(self, lengths: Sequence[int], stage: int) -> int:
        """Nobody asks."""
        return 0
