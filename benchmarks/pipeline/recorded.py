"""Real stages on this machine's processors beside the simulator: the order of what they do, and how long it takes.

order_equal      share of the events (forwards, backwards, steps) of all runs that come in the simulator's place on
                 their stage: 2 and 4 stages, every schedule that stages execute, three jobs of unlike lengths.
makespan_error   programs replayed by the simulator with the recorded durations, against how long they really took: the
                 worst run, as a share of the recorded time. Stages are processes that share the machine's cores, which
                 lengthens the durations and not the difference.
bubble_error     the same for the share of time in which stages compute nothing, in points of one.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.engine.engine import Engine
from weft.model.resolve import resolve
from weft.parallel.stages.load_stages import StageLayout, load_stages
from weft.plan.cost.types import LinearCost
from weft.plan.pipeline.build import PipelinePlanner, Schedule
from weft.plan.program import Program
from weft.plan.simulate.interpret import simulate
from weft.plan.simulate.timeline import COMPUTE, Span, Timeline
from weft.plan.types import JobQueue, Limits
from weft.spec import BackboneSpec, RunSpec, run_from_mapping

SCHEDULES = tuple(Schedule)
STAGES = (2, 4)
CAPACITY = 1024
TEXTS = {"short": (60, 120), "mixed": (60, 400), "long": (250, 500)}
"""Each job's texts, from so many characters to so many; a character is a token."""
NUM_TEXTS, BATCH, NUM_STEPS = 32, 8, 2

Event = tuple[str, Any]
"""What a stage did, and to which microbatch or whose step."""


@dataclass
class RecordedRun:
    """Programs that ran, with what each stage did of them."""

    programs: list[Program] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    """Of all programs, each stage's in its order."""

    def by_program(self) -> list[tuple[Program, list[Span]]]:
        """The programs with their own spans."""
        found, start = [], [0] * self.programs[0].num_stages
        for program in self.programs:
            own = []
            for stage in range(program.num_stages):
                of_stage = [span for span in self.spans if span.stage == stage]
                end = start[stage] + len(simulated_events(program, stage))
                own += of_stage[start[stage] : end]
                start[stage] = end
            found.append((program, own))
        return found


def measure_recorded(stages: Sequence[int] = STAGES, schedules: Sequence[Schedule] = SCHEDULES) -> dict[str, float]:
    """Keys as in `python -m benchmarks pipeline --json`."""
    runs = [record_run(num_stages, schedule) for num_stages in stages for schedule in schedules]
    errors = [replay_errors(run) for run in runs]
    return {
        "order_equal": equal_share(runs),
        "makespan_error": max(makespan for makespan, _ in errors),
        "bubble_error": max(bubble for _, bubble in errors),
    }


def record_run(num_stages: int, schedule: Schedule) -> RecordedRun:
    """Trains the jobs on stages of the embedded backbone, in processes of their own."""
    run, planner = RecordedRun(), PipelinePlanner(schedule, num_stages)

    def plan(queues: Sequence[JobQueue], limits: Limits) -> Program:
        run.programs.append(planner(queues, limits))
        return run.programs[-1]

    with tempfile.TemporaryDirectory(prefix="weft-pipeline-") as name:
        spec = write_jobs(Path(name))
        engine = Engine(
            load_stages(resolve(BackboneSpec("tiny", device="cpu")), StageLayout((num_stages,))),
            capacity=CAPACITY,
            planner=plan,
        )
        try:
            for job in spec.jobs:
                engine.submit(job, base_dir=name)
            engine.run()
        finally:
            engine.close()
    spans = [span for span in engine.timeline.measured().spans if span.lane == COMPUTE]
    run.spans = sorted(spans, key=lambda span: (span.stage, span.start_s))
    return run


def write_jobs(folder: Path) -> RunSpec:
    """Writes the jobs' texts into a folder and returns the run."""
    drawn = random.Random(0)
    for name, (least, most) in TEXTS.items():
        rows = [{"text": "ab" * (drawn.randint(least, most) // 2)} for _ in range(NUM_TEXTS)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    jobs = [{"name": name, "train_data": f"{name}.jsonl"} for name in TEXTS]
    defaults = {"global_batch_size": BATCH, "max_steps": NUM_STEPS, "save_steps": 1000, "max_length": CAPACITY}
    return run_from_mapping({"base_model": "tiny", "device": "cpu", "defaults": defaults, "jobs": jobs})


def simulated_events(program: Program, stage: int) -> list[Event]:
    """What the simulator lets a stage do, in its order; empty microbatches are nothing to do."""
    spans = simulate(program, LinearCost()).spans
    return [event_of(span) for span in spans if span.stage == stage and span.lane == COMPUTE]


def event_of(span: Span) -> Event:
    """The contents of a span, without its time."""
    if span.name != "step":
        return span.name, span.args["microbatch"]
    (job,) = span.args["jobs"]
    return span.name, (job, span.args["step"])


def equal_share(runs: Sequence[RecordedRun]) -> float:
    """Share of the events that come in the simulator's place."""
    num_equal = num_events = 0
    for run in runs:
        for program, spans in run.by_program():
            for stage in range(program.num_stages):
                expected = simulated_events(program, stage)
                found = [event_of(span) for span in spans if span.stage == stage]
                num_equal += sum(a == b for a, b in zip(expected, found, strict=False))
                num_events += max(len(expected), len(found))
    return num_equal / num_events


def replay_errors(run: RecordedRun) -> tuple[float, float]:
    """By how much the simulator misses the time of a run's programs, and the share of it that stages idle."""
    recorded_s = replayed_s = busy_s = 0.0
    for program, spans in run.by_program():
        recorded_s += max(span.end_s for span in spans) - min(span.start_s for span in spans)
        replayed_s += replay(program, spans).makespan_s
        busy_s += sum(span.duration_s for span in spans) / program.num_stages
    return abs(replayed_s / recorded_s - 1), abs(busy_s / recorded_s - busy_s / replayed_s)


def replay(program: Program, spans: Iterable[Span]) -> Timeline:
    """What the simulator makes of a program whose passes and steps took as long as these spans.

    What is left of the difference between both is what the simulator does not know: transfers, which take no time here,
    and what a stage does between two instructions.
    """
    return simulate(program, _Recorded(spans))


class _Recorded:
    """A cost model that gives each stage the durations it had, one after another.

    The simulator requests each pass and step of a stage once, in the stage's order.
    """

    def __init__(self, spans: Iterable[Span]) -> None:
        self._left: dict[tuple[str, int], deque[float]] = defaultdict(deque)
        for span in spans:
            self._left[span.name, span.stage].append(span.duration_s)

    def forward_s(self, lengths: Sequence[int], stage: int) -> float:
        return self._left["forward", stage].popleft()

    def backward_s(self, lengths: Sequence[int], stage: int) -> float:
        return self._left["backward", stage].popleft()

    def step_s(self, stage: int) -> float:
        return self._left["step", stage].popleft()

    def transfer_s(self, num_tokens: int) -> float:
        return 0.0

    def held_bytes(self, lengths: Sequence[int], stage: int) -> int:
        return 0
