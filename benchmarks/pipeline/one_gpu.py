"""One replica in stages on one device, each a stream of this process, beside the backbone in one piece.

One microbatch goes through the backbone in one piece and through its stages one by one, timed in turn. Every time, the
gradients of all stages together are compared with those of the whole.

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

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from benchmarks.clock import release
from benchmarks.pipeline.in_process import LocalStages
from benchmarks.pipeline.recorded import RecordedRun
from weft.adapters.adapter import Adapter
from weft.data.dataset import Dataset, JobData
from weft.data.samples import Sample
from weft.engine.engine import Engine
from weft.errors import JobError
from weft.job_state import JobState
from weft.kernels.device import synchronise
from weft.kernels.device_event import DeviceEvent
from weft.kernels.dropout import mix
from weft.model.backbone import Backbone
from weft.model.load import build
from weft.model.model_part import ModelPart
from weft.model.packed import PackedBatch, SlotSample, pack_samples
from weft.model.packing import attention
from weft.parallel.stages.load_stages import cut_layers
from weft.parallel.stages.stage_runner import StageRunner, stage_runner
from weft.parallel.stages.staged import StagedExecutor
from weft.plan.cost.shape import ModelShape, Shape
from weft.plan.pipeline.build import PipelinePlanner, Schedule
from weft.plan.program import Program
from weft.plan.simulate.interpret import simulate
from weft.plan.simulate.timeline import COMPUTE
from weft.plan.types import JobQueue, Limits
from weft.spec import AdapterSpec, JobSpec

NUM_JOBS, BATCH = 4, 4
RANK, DROPOUT = 16, 0.1
TOKENIZER: Any = None  # nothing is tokenised here


@dataclass(frozen=True)
class OneDevice:
    """What is measured: a shape on a device, and how much at a time."""

    shape: Shape
    dtype: torch.dtype
    device: torch.device
    capacity: int
    rounds: int = 5

    @property
    def length(self) -> int:
        """Of all samples: a microbatch holds whole ones, so that all take the same time."""
        return self.capacity // BATCH

    def samples(self, job: int) -> list[Sample]:
        """Two global batches of random tokens."""
        rng, number = np.random.default_rng(job), 2 * BATCH
        drawn = rng.integers(0, self.shape.vocabulary, (number, self.length), dtype=np.int32)
        return [Sample(tokens, np.ones(self.length, dtype=np.bool_)) for tokens in drawn]

    def backbone(self, part: ModelPart | None = None) -> Backbone:
        """The shape on the fused path, or a part of it."""
        attention.register()
        model = build(self.shape, self.dtype, self.device, attention.NAME, part)
        backbone = Backbone(model, TOKENIZER, self.shape.name, part)
        backbone.use_kernels("fused")
        return backbone

    def stages(self, number: int) -> list[Backbone]:
        """The same in so many parts."""
        shape = ModelShape.from_config(self.shape.config().to_dict())
        return [self.backbone(part) for part in cut_layers(shape, number)]


@dataclass
class PassTimes:
    """Seconds of a microbatch through the whole and through every stage by itself."""

    whole: list[float] = field(default_factory=list)
    """Forward, loss and backward."""
    passes: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    """By pass and stage; the loss belongs to the last stage's forward."""
    num_differing: int = 0
    """Numbers of the gradients that the stages' have otherwise, over all rounds."""

    @property
    def whole_s(self) -> float:
        """The median."""
        return statistics.median(self.whole)

    def pass_s(self, name: str, stage: int) -> float:
        """The median of a pass through a stage."""
        return statistics.median(self.passes[name, stage])

    @property
    def sum_s(self) -> float:
        """Of all passes through all stages."""
        return sum(map(statistics.median, self.passes.values()))


@dataclass(frozen=True)
class _Piece:
    """A backbone, or a part of one, with adapters on it and a microbatch for them."""

    backbone: Backbone
    adapters: list[Adapter]
    slots: list[int]
    batch: PackedBatch

    @classmethod
    def of(cls, bench: OneDevice, backbone: Backbone, row_tile: int) -> _Piece:
        """With a sample of every job; B is random, for zeros would hide differences in the gradient of A."""
        spec = AdapterSpec(r=RANK, lora_dropout=DROPOUT, init_lora_weights=False)
        adapters = [backbone.new_adapter(spec, job) for job in range(NUM_JOBS)]
        slots = [backbone.attach(adapter) for adapter in adapters]
        on_slots = [
            SlotSample(bench.samples(job)[0], slots[job], 1 / bench.length, mix(job, 0), mix(job))
            for job in range(NUM_JOBS)
        ]
        return cls(backbone, adapters, slots, pack_samples(on_slots, row_tile, bench.device))

    def gradients(self) -> list[torch.Tensor]:
        """Of every job and group."""
        return [group.grad for adapter in self.adapters for group in adapter.groups.values()]

    def detach(self) -> None:
        """Frees the slots."""
        for slot in self.slots:
            self.backbone.detach(slot)


def time_in_turn(bench: OneDevice, whole: Backbone, parts: Sequence[Backbone]) -> PassTimes:
    """Whole and stages one after the other, round by round. The first one compiles and captures: only its gradients
    count."""
    times, row_tile = PassTimes(), whole.path.row_tile(bench.capacity)
    one, pieces = _Piece.of(bench, whole, row_tile), [_Piece.of(bench, part, row_tile) for part in parts]
    runners = [stage_runner(part) for part in parts]
    for turn in range(bench.rounds + 1):
        begun = _now(bench.device)
        whole.launch(one.batch, row_tile)
        seconds = _now(bench.device).seconds_since(begun)
        passes = _through_stages(bench.device, pieces, runners, row_tile)
        if turn:
            times.whole.append(seconds)
            for key, taken in passes.items():
                times.passes.setdefault(key, []).append(taken)
        times.num_differing += _gradients_differing(one, pieces)
    for piece in (one, *pieces):
        piece.detach()
    return times


def _now(device: torch.device) -> DeviceEvent:
    """A moment at which the device has nothing to do."""
    synchronise(device)
    return DeviceEvent(device)


def _through_stages(
    device: torch.device, pieces: Sequence[_Piece], runners: Sequence[StageRunner], row_tile: int
) -> dict[tuple[str, int], float]:
    """Seconds of every pass; nothing else runs meanwhile."""
    found: dict[tuple[str, int], float] = {}
    crossing_TD: torch.Tensor | None = None
    for stage, (piece, runner) in enumerate(zip(pieces, runners, strict=True)):
        begun = _now(device)
        crossing_TD = runner.forward(0, piece.batch, row_tile, crossing_TD)
        found["forward", stage] = _now(device).seconds_since(begun)
    crossing_TD = None
    for stage in reversed(range(len(runners))):
        begun = _now(device)
        crossing_TD, _ = runners[stage].backward(0, crossing_TD)
        found["backward", stage] = _now(device).seconds_since(begun)
    return found


def _gradients_differing(one: _Piece, pieces: Sequence[_Piece]) -> int:
    """Numbers of the whole's gradients that the stages have otherwise; all are zero afterwards."""
    of_stages = zip(*(piece.gradients() for piece in pieces), strict=True)
    joined = [torch.cat(parts) for parts in of_stages]
    found = sum(num_unequal(own, other) for own, other in zip(one.gradients(), joined, strict=True))
    assert all(bool(grad.any()) for grad in joined), "nothing was learnt"
    for adapter in (adapter for piece in (one, *pieces) for adapter in piece.adapters):
        adapter.zero_grad()
    return found


def num_unequal(one: torch.Tensor, other: torch.Tensor) -> int:
    """Numbers in fp32 that are not equal to the bit."""
    return int((one.contiguous().view(torch.int32) != other.contiguous().view(torch.int32)).sum())


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
        """Memory plays no part in what is measured here."""
        return 0
