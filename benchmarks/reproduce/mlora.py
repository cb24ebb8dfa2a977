"""mLoRA: adapters in turn through a pipeline, and many adapters on one GPU."""

from __future__ import annotations

from itertools import product

from benchmarks.cpu_together import measure_together
from benchmarks.figures import Kind
from benchmarks.pipeline.recorded import measure_recorded
from benchmarks.reproduce.experiments import Experiment, Paper, Row, Source, Values
from weft.plan.cost.types import LinearCost
from weft.plan.pipeline.build import Schedule, build
from weft.plan.simulate.interpret import simulate
from weft.plan.types import Microbatch, Segment

NUM_DEVICES = 4
NUM_BATCHES = 40
LENGTH = 128


def formula(num_devices: int, num_jobs: int, num_microbatches: int) -> float:
    """LoRAPP's share of idle time (section 3.2.2): devices D, jobs L, microbatches N of a global batch."""
    idle = num_devices - 1 + num_microbatches - num_jobs * num_microbatches
    return max(0.0, idle / (num_devices + num_microbatches - 1))


def simulated(num_devices: int, num_jobs: int, num_microbatches: int) -> float:
    """The same of a program, between the first and the last global batch, where the pipeline fills and drains."""
    stream = [
        Microbatch((Segment(f"job{job}", step, index, LENGTH),))
        for step in range(NUM_BATCHES)
        for job in range(num_jobs)
        for index in range(num_microbatches)
    ]
    timeline = simulate(build(Schedule.LORAPP, stream, num_devices), LinearCost())
    edge_s = timeline.makespan_s / 10
    return timeline.bubble_ratio(edge_s, timeline.makespan_s - edge_s)


def bubbles() -> Values:
    """How far simulation is from the formula, over numbers of jobs and of microbatches; and some of its points."""
    found = {(jobs, n): simulated(NUM_DEVICES, jobs, n) for jobs, n in product((1, 2, 3, 4, 6), (1, 2, 4))}
    above = [idle - formula(NUM_DEVICES, *key) for key, idle in found.items()]
    return {
        "figure9_one_job": found[1, 4],
        "figure9_two_jobs": found[2, 1],
        "figure9_four_jobs": found[4, 1],
        "figure9_most_above": max(above),
        "figure9_most_below": max(0.0, -min(above)),
    }


MLORA = Paper(
    "mlora",
    "mLoRA",
    (
        Experiment(
            "figure-9",
            "idle time of LoRAPP on four devices, by formula and by program",
            bubbles,
            (
                Row("one job, four microbatches", "figure9_one_job", Kind.WASTE, formula(4, 1, 4)),
                Row("two jobs, one microbatch", "figure9_two_jobs", Kind.WASTE, formula(4, 2, 1)),
                Row("four jobs: none", "figure9_four_jobs", Kind.WASTE, 0.0, tolerance=0.0),
                Row("the most that any of 15 settings idles above the formula", "figure9_most_above", Kind.WASTE),
                Row("and below it", "figure9_most_below", Kind.WASTE),
            ),
        ),
        Experiment(
            "figure-9-executed",
            "recorded programs of 2 and 4 stages against the simulator",
            measure_recorded,
            (
                Row("events in the simulator's order", "order_equal", Kind.SHARE, 1.0, Source.MEASURED, 0.0),
                Row("idle time, worst difference", "bubble_error", Kind.WASTE, None, Source.MEASURED),
            ),
        ),
        Experiment(
            "figure-7i",
            "eight adapters on one device (here a CPU; the paper's is a GPU)",
            measure_together,
            (
                Row(
                    "together over PEFT one by one",
                    "together_over_peft",
                    Kind.SPEEDUP,
                    1.08,
                    Source.MEASURED,
                    note="on a GPU: `python -m benchmarks step`.",
                ),
                Row("together over one by one", "together_over_alone", Kind.SPEEDUP, None, Source.MEASURED),
            ),
        ),
    ),
    "figures 7a to 7h (several GPUs and machines), 8, 10 to 16; convergence beside PEFT is `python -m benchmarks "
    "curve`; the online fit of memory writes its predictions into the timeline of every run.",
)
