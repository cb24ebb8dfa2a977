"""`python -m benchmarks NAME`: every benchmark is one command here.

A new one is a function, whose options are the command's, and a line in `BENCHMARKS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import typer

from weft.cli.main import Verb, Verbs, main

BENCHMARKS = {
    "step": Verb(
        "steps.session:step", "Whole training steps: Weft beside PEFT, PEFT with Liger's kernels and the frozen model."
    ),
    "kernels": Verb(
        "kernels:kernels",
        "One linear with adapters against the frozen linear, forward and backward, with the error beside each timing.",
    ),
    "agreement": Verb(
        "steps.gradients:agreement", "The fast path's gradients against the reference path's, for every kind of launch."
    ),
    "methods": Verb(
        "methods.parts:methods", "PEFT methods and objectives mixed in one run, beside LoRA alone and beside PEFT."
    ),
    "wall": Verb(
        "wall.session:wall",
        "Whole runs of `weft train` from the command to the last adapter, cold and warm; and preparing many rows.",
    ),
    "serve": Verb(
        "service.load:serve",
        "The service under load: 1,000 jobs in the queue and 200 clients that poll while a worker trains.",
    ),
    "pipeline": Verb(
        "pipeline.parts:pipeline",
        "Stages of one replica: recorded beside simulated, how long they idle, and 70B beside other schedules.",
    ),
    "replicas": Verb(
        "replicas.parts:replicas",
        "Jobs over many replicas: placing and controlling them, speed, recovery, bits, and eight GPUs, simulated.",
    ),
    "deploy": Verb(
        "deploy.parts:deploy",
        "Deployments of unlike replicas: how long planning and dispatch take, and what they save, predicted.",
    ),
    "planning": Verb("planning.parts:planning", "Packing, pipelines, cost models and a cluster's week, replayed."),
    "planners": Verb(
        "planning.planners:planners", "Every `planner` of a run beside the others: microbatches, planning, training."
    ),
    "chunks": Verb("planning.chunks:chunks", "Long samples in chunks with reused keys and values, beside whole ones."),
    "sweeps": Verb("sweeps.parts:sweeps", "Sweeps: plans beside PLoRA's, configurations together, early stopping."),
    "degrees": Verb(
        "sweeps.degrees:degrees", "How many GPUs each pack of a sweep gets, and what that saves, simulated."
    ),
    "curve": Verb("curve:curve", "Loss curves on the embedded model: beside PEFT, FP8 beside unquantised, and bits."),
    "cpu-together": Verb(
        "cpu_together:cpu_together", "Eight jobs on a CPU: together, one by one, and one by one with PEFT."
    ),
    "cpu-blocks": Verb("cpu_blocks:cpu_blocks", "A product on a CPU in blocks of rows, which bit equality needs."),
    "free-sums": Verb("free_sums:free_sums", "Gradient sums on a CPU: any_order compared with in_order."),
    "gpu-tiles": Verb("gpu_tiles:gpu_tiles", "Rows on a GPU by the size of the microbatch and of its tiles."),
    "experts": Verb("experts:experts", "Mixtures of experts on a GPU: four jobs of Weft beside one of PEFT."),
    "hybrids": Verb("hybrids:hybrids", "Layers with states on a GPU: four jobs of Weft beside one of PEFT."),
    "decode": Verb(
        "decode:decode", "Decoding on a GPU: many adapters beside transformers, and beside training to the bit."
    ),
    "method-rates": Verb("method_rates:method_rates", "Which learning rate suits which PEFT method."),
    "reproduce": Verb("reproduce.command:reproduce", "The experiments of five papers, their figures beside ours."),
    "two-versions": Verb("two_versions:two_versions", "`step` with two versions of Weft in turn on one machine."),
}


class Benchmarks(Verbs):
    """The benchmarks."""

    verbs = BENCHMARKS
    package = "benchmarks"
    moved: ClassVar[Mapping[str, str]] = {}


app = typer.Typer(
    cls=Benchmarks,
    help="Measure speed on this machine, beside what people run today.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback()
def options() -> None:
    """Measure speed on this machine, beside what people run today."""


if __name__ == "__main__":
    main(app)
