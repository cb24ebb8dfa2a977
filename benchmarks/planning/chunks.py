"""Whether cutting long samples into chunks with reused keys and values (MuxTune, section 3.5) would pay, simulated.

    OMP_NUM_THREADS=1 python -m benchmarks chunks [--json FILE]

Jobs of rank 16 have lengths of `benchmarks/pipeline/four_jobs.py` (XSum, CNN/DailyMail and WikiSum mixed, up to 8,192
tokens), and a share of samples of exactly 16,384 or 32,768 tokens, as texts are that `max_length` cuts. The cost and
memory models are the hardware table's; stages are those of `weft train`, full microbatches hold the longest sample. By
setting, `MODEL_STAGES_JOBSxBATCH_SHAREofLENGTH`, for a global batch of every job:

today      the packing that `--schedule auto` takes; a long sample fills its microbatch
pieces     its microbatches divided between samples into smaller ones, where that is faster: no bit changes
smaller    the same from a plan for 8,192 tokens, in which long samples count as so many, for some settings
chunks_N   its microbatches cut into chunks of N tokens, through long samples too
saved      the part of today's time that the best of these chunks saves
replicas   other layouts that exist, on as many devices: a whole backbone on each, for 70B in shards. With fewer jobs
           than devices `gradient_sum: any_order`

`_s` are seconds, `_bubble` is the share of time that stages idle while the pipeline is full, `_gb` the peak of the
fullest stage, with weights and jobs. Each has the fastest of `MODES` that fits; all have the same memory. `chunked.py`
has what a chunk is *assumed* to cost. `memory_…` is of one job with a batch of 8 samples of 16,384 tokens: its time,
and the least peak that costs 2 % of it, if devices had any memory.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import typer

from benchmarks.figures import Kind, Parts, Targets
from benchmarks.pipeline.four_jobs import LONGEST, SEED, LengthMix, programs_of, queues
from benchmarks.planning.chunked import ChunkCost, CutStream, build_cut, cut
from benchmarks.report import JsonFile, run_parts
from weft.errors import PlanError
from weft.plan.admit import MARGIN
from weft.plan.choose_layout import split_model
from weft.plan.cost.analytic import AnalyticCost, BackboneSetup
from weft.plan.cost.divided import ShardCost
from weft.plan.cost.hardware import GB, find_hardware
from weft.plan.cost.learned import AdapterTimes
from weft.plan.cost.shape import ModelShape, choose_capacity, find_shape
from weft.plan.level import choose_homes
from weft.plan.planner import HomeLoad
from weft.plan.simulate.choose import FastestPipeline
from weft.plan.simulate.interpret import simulate
from weft.plan.simulate.timeline import COMPUTE, Timeline
from weft.plan.spread import SpreadPlanner
from weft.plan.types import JobQueue, Limits, Microbatch, Segment, max_lead

RANK, FEWEST_ROUNDS, FEWEST_SAMPLES = 16, 4, 128
CHUNKS = (2048, 4096, 8192)
DEVICE_OF = {"8b": "a100-80", "70b": "h200"}
MODES = ("none", "mlp", "offload", "full")
"""`recompute`, `offload` with `recompute: mlp`."""
ALL = 10**9
"""A limit that limits nothing."""


@dataclass(frozen=True)
class Setting:
    model: str = "70b"
    num_stages: int = 4
    num_jobs: int = 4
    batch: int = 16
    percent: int = 5
    """Long samples of a hundred."""
    longest: int = 16_384

    @property
    def name(self) -> str:
        load = f"{self.num_jobs}x{self.batch}_{self.percent}of{self.longest // 1024}k"
        return f"{self.model}_{self.num_stages}_{load}"

    def jobs(self) -> list[JobQueue]:
        """Some rounds of a global batch of every job; the same share of all samples is long, anywhere."""
        size = self.num_jobs * self.batch
        num = size * max(FEWEST_ROUNDS, FEWEST_SAMPLES // size)
        made = queues(LengthMix("mixed", ((0.0, 0.0),) * self.num_jobs), num, self.batch)
        is_long = np.zeros(num, dtype=np.bool_)
        is_long[np.random.default_rng(SEED).permutation(num)[: round(num * self.percent / 100)]] = True
        long = iter(is_long.tolist())
        return [
            replace(queue, batches=tuple(replace(b, lengths=self._lengths(b.lengths, long)) for b in queue.batches))
            for queue in made
        ]

    def _lengths(self, lengths: Sequence[int], long: Iterator[bool]) -> tuple[int, ...]:
        return tuple(self.longest if next(long) else n for n in lengths)


@dataclass(frozen=True)
class Pipeline:
    """A setting's stages with one kind of recomputation."""

    whole: AnalyticCost
    cost: ChunkCost
    adapters: AdapterTimes
    capacity: int
    num_jobs: int

    @classmethod
    def of(cls, setting: Setting, mode: str, capacity: int, num_stages: int) -> Pipeline:
        shape, device = _shape(setting.model), find_hardware(DEVICE_OF[setting.model])
        is_moved = mode == "offload"
        setup = BackboneSetup(shape, (RANK,) * setting.num_jobs, recompute="mlp" if is_moved else mode)
        split = split_model(shape, num_stages)
        whole = setup.cost(device, num_stages, capacity=capacity, split=split)
        times, adapters = whole.apart()
        return cls(whole, ChunkCost(times, is_moved), adapters, capacity, setting.num_jobs)

    @property
    def stages(self) -> range:
        return range(self.whole.num_stages)

    def fixed_bytes(self, stage: int, num_tokens: int) -> int:
        """All but what microbatches of at most so many tokens keep."""
        rows = self.whole.rows([num_tokens])
        return self.whole.memory.total_bytes(rows, (RANK,) * self.num_jobs, stage, num_held=0)

    def memory_bytes(self, stage: int) -> int:
        """For microbatches in flight."""
        return int(self.whole.hardware.memory_bytes / (1 + MARGIN)) - self.fixed_bytes(stage, self.capacity)

    @property
    def in_flight(self) -> tuple[int, ...]:
        """Full microbatches that a stage has memory for."""
        return tuple(self.memory_bytes(s) // self.cost.held_bytes([self.capacity], s) for s in self.stages)

    @property
    def limits(self) -> Limits:
        lead = Limits(self.capacity, in_flight=self.in_flight).lead(max_lead(len(self.stages)))
        return Limits(self.capacity, row_tile=self.whole.row_tile, in_flight=tuple(lead))

    def planned(self, jobs: Sequence[JobQueue]) -> list[Microbatch]:
        """The microbatches of the programs that `--schedule auto` takes."""
        planner = FastestPipeline(len(self.stages), self.cost, self.adapters, self.whole.row_tile)
        return [m for program in programs_of(planner, jobs, self.limits) for m in program.microbatches]

    def run(self, stream: CutStream, num_rounds: int, room: Sequence[int] | None = None) -> Outcome | None:
        """None if it does not fit. `room`: bytes for microbatches in flight; None: what there is."""
        most = max(m.num_tokens for m in stream.microbatches)
        if room is None:
            held = [self.cost.held_bytes([self.capacity], s) * n for s, n in enumerate(max_lead(len(self.stages)))]
            room = [min(self.memory_bytes(s), n) for s, n in enumerate(held)]
        try:
            program = build_cut(stream, len(self.stages), self.cost, room, self.adapters)
        except PlanError:
            return None
        timeline = simulate(program, self.cost, adapters=self.adapters)
        peak = max(timeline.peak_bytes(s) + self.fixed_bytes(s, most) for s in self.stages)
        bubble, busy_s = steady_bubble(timeline), sum(map(timeline.busy_s, self.stages))
        return Outcome(busy_s / len(self.stages) / (1 - bubble) / num_rounds, bubble, peak / GB)


@dataclass(frozen=True, order=True)
class Outcome:
    seconds: float
    """For a global batch of every job."""
    bubble: float
    peak_gb: float


def steady_bubble(timeline: Timeline) -> float:
    """Idle share from the last stage's first pass to the first stage's last forward: a run fills its stages once, and
    programs follow each other without draining them."""
    passes = [span for span in timeline.spans if span.lane == COMPUTE]
    start_s = min(span.start_s for span in passes if span.stage == timeline.num_stages - 1)
    end_s = max(span.end_s for span in passes if span.stage == 0 and span.name == "forward")
    return timeline.bubble_ratio(start_s, end_s) if end_s > start_s else timeline.bubble_ratio()


@functools.cache
def _shape(model: str) -> ModelShape:
    name = f"llama-3.1-{model}"
    return ModelShape.from_config(find_shape(name).config().to_dict(), name)


def measure(setting: Setting) -> dict[str, float]:
    """The fastest of every kind."""
    jobs = setting.jobs()
    rounds, capacity = len(jobs[0].batches), _capacity(setting, jobs)
    fitting, chosen = _fitting(setting, capacity)
    stream = chosen.planned(jobs)
    streams = {"today": [cut(stream, ALL, in_chunks=False)]}
    streams["pieces"] = streams["today"] + [cut(stream, most, in_chunks=False) for most in CHUNKS]
    streams |= {f"chunks_{most}": [cut(stream, most, in_chunks=True)] for most in CHUNKS}
    best = {
        name: min(outcome for pipeline in fitting for each in own if (outcome := pipeline.run(each, rounds)))
        for name, own in streams.items()
    }
    found = {f"{name}_s": outcome.seconds for name, outcome in best.items()}
    found["replicas_s"] = _replicas_s(setting, jobs, capacity) / rounds
    best["chunks"] = min(best[f"chunks_{most}"] for most in CHUNKS)
    for name in ("today", "chunks"):
        found |= {f"{name}_bubble": best[name].bubble, f"{name}_gb": best[name].peak_gb}
    found["saved"] = 1 - best["chunks"].seconds / best["today"].seconds
    return {f"{setting.name}_{key}": value for key, value in found.items()}


def _fitting(setting: Setting, capacity: int) -> tuple[list[Pipeline], Pipeline]:
    """All that fit, and what a user would choose: the first with which every stage is busy, or the smallest."""
    pipelines = [Pipeline.of(setting, mode, capacity, setting.num_stages) for mode in MODES]
    fitting = [own for own in pipelines if min(own.in_flight) >= 1]
    return fitting, next((own for own in fitting if min(own.in_flight) >= setting.num_stages), fitting[-1])


def measure_smaller(setting: Setting) -> dict[str, float]:
    """The fastest of smaller microbatches that are planned as such, with long samples whole, alone."""
    jobs = setting.jobs()
    fitting, chosen = _fitting(setting, _capacity(setting, jobs))
    capped = [
        replace(
            queue, batches=tuple(replace(b, lengths=tuple(min(n, LONGEST) for n in b.lengths)) for b in queue.batches)
        )
        for queue in jobs
    ]
    samples = {(s.job, s.step, s.index): s for queue in jobs for s in _segments(queue)}
    stream = [
        Microbatch(tuple(samples[s.job, s.step, s.index] for s in m.segments))
        for m in replace(chosen, capacity=LONGEST).planned(capped)
    ]
    streams = [cut(stream, most, in_chunks=False) for most in CHUNKS]
    outcomes = [pipeline.run(each, len(jobs[0].batches)) for pipeline in fitting for each in streams]
    return {f"{setting.name}_smaller_s": min(outcome for outcome in outcomes if outcome is not None).seconds}


def _capacity(setting: Setting, jobs: Sequence[JobQueue]) -> int:
    longest = max(n for queue in jobs for batch in queue.batches for n in batch.lengths)
    return choose_capacity("auto", DEVICE_OF[setting.model], longest)


def _replicas_s(setting: Setting, jobs: Sequence[JobQueue], capacity: int) -> float:
    """Seconds on as many replicas as there are stages, with the first `recompute` that fits."""
    size, is_sharded = setting.num_stages, setting.model == "70b"
    for mode in MODES:
        whole = Pipeline.of(setting, mode, capacity, 1).whole
        memory = replace(whole.memory, shards=size if is_sharded else 1)
        ranks = (RANK,) * -(-setting.num_jobs // size)
        moved = memory.offloaded_bytes(whole.rows([capacity])) if mode == "offload" else 0
        needed = memory.total_bytes(whole.rows([capacity]), ranks) - moved
        if needed <= whole.hardware.memory_bytes / (1 + MARGIN):
            break
    costs = (ShardCost(whole, size) if is_sharded else whole,) * size
    spread = SpreadPlanner((1,) * size, costs, shards=(size,) if is_sharded else ())
    lengths = {queue.job: [n for batch in queue.batches for n in batch.lengths] for queue in jobs}
    loads = {job: HomeLoad(sum(own) / len(jobs[0].batches), max(own)) for job, own in lengths.items()}
    homes = choose_homes(spread.home_seconds(loads, capacity)) if setting.num_jobs >= size else {}
    at_home = [replace(queue, home=homes.get(queue.job)) for queue in jobs]
    program = spread(at_home, Limits(capacity, ALL, whole.row_tile, (1,) * size))
    return simulate(program, costs).makespan_s


def measure_memory(model: str, num_stages: int = 4) -> dict[str, float]:
    """Time and the least peak of the fullest stage, with whole samples and in chunks, if a device had any memory."""
    setting, found = Setting(model, num_stages, 1, 8, 100), dict[str, float]()
    whole = [Microbatch((s,)) for queue in setting.jobs() for s in _segments(queue)][: 4 * setting.batch]
    for mode in MODES:
        pipeline = Pipeline.of(setting, mode, setting.longest, num_stages)
        each = [pipeline.cost.held_bytes([setting.longest], s) for s in pipeline.stages]
        for name, most in (("today", ALL), ("chunks", CHUNKS[0])):
            stream = cut(whole, most, in_chunks=True)
            rooms = [[n * quarters // 4 for n in each] for quarters in range(4, 8 * num_stages + 1)]
            outcomes = [outcome for room in rooms if (outcome := pipeline.run(stream, 4, room)) is not None]
            least_s = min(outcome.seconds for outcome in outcomes)
            peak_gb = min(outcome.peak_gb for outcome in outcomes if outcome.seconds <= 1.02 * least_s)
            found |= {f"memory_{model}_{mode}_{name}_gb": peak_gb, f"memory_{model}_{mode}_{name}_s": least_s}
    return found


def _segments(queue: JobQueue) -> list[Segment]:
    return [Segment(queue.job, b.step, b.first + i, n) for b in queue.batches for i, n in enumerate(b.lengths)]


SETTINGS = (
    *(Setting(m, s, j, b) for m in DEVICE_OF for s in (2, 4, 8) for j, b in ((1, 16), (4, 16), (16, 4))),
    *(
        Setting(num_jobs=jobs, percent=percent, longest=longest)
        for jobs in (1, 4)
        for percent, longest in ((0, 16_384), (1, 16_384), (20, 16_384), (100, 16_384), (5, 32_768))
    ),
    *(Setting(num_jobs=j, batch=b) for j, b in ((1, 4), (1, 64), (4, 4), (16, 16), (2, 16), (8, 4))),
)
SMALLER = [Setting(num_stages=s, num_jobs=j) for s in (4, 8) for j in (1, 4)]
KINDS = {
    "today_s": Kind.SECONDS,
    "pieces_s": Kind.SECONDS,
    **{f"chunks_{most}_s": Kind.SECONDS for most in CHUNKS},
    "replicas_s": Kind.SECONDS,
    "smaller_s": Kind.SECONDS,
    "saved": Kind.SHARE,
}
TARGETS: Targets = {f"{each.name}_{key}": (kind, None) for each in SETTINGS for key, kind in KINDS.items()}
PARTS: Parts = {
    **{each.name: functools.partial(measure, each) for each in SETTINGS},
    **{f"smaller {each.name}": functools.partial(measure_smaller, each) for each in SMALLER},
    **{f"memory {model}": functools.partial(measure_memory, model) for model in DEVICE_OF},
}


def chunks(json: JsonFile = None) -> None:
    """Long samples in chunks beside whole ones, simulated."""
    raise typer.Exit(run_parts(PARTS, TARGETS, json))
