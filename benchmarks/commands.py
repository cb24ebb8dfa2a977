"""The larger benchmarks: their options, and what is measured with them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli.user_path import user_path
from weft.errors import ConfigError, ModelError, WeftError

if TYPE_CHECKING:
    import torch

    Values = dict[str, float]

PATHS = ("auto", "fused", "reference")
PROFILE = Path("benchmarks/h200_profile.json")
JsonFile = Annotated[
    Path | None, typer.Option("--json", parser=user_path, metavar="PATH", help="Add the figures to this JSON file.")
]
PlotFile = Annotated[
    Path | None,
    typer.Option("--plot", parser=user_path, metavar="PATH", help="Draw the figures into this .svg or .png file."),
]
Quick = Annotated[bool, typer.Option("--quick", help="Fewer repeats: for a first look, not for publishing.")]


def step(
    model: Annotated[
        list[str] | None, typer.Option(help="Shape to build with random weights; may be repeated. Default: all tabled.")
    ] = None,
    regime: Annotated[list[str] | None, typer.Option(help="Figure to measure; may be repeated. Default: all.")] = None,
    kernels: Annotated[str, typer.Option(help="Weft's path: auto, fused or reference.")] = "auto",
    json: JsonFile = None,
    plot: PlotFile = None,
    quick: Quick = False,
) -> None:
    """Whole training steps: Weft beside PEFT, PEFT with Liger's kernels and the frozen model."""
    from benchmarks import clock, report
    from benchmarks.output import check_files, conclude, say
    from benchmarks.steps import session
    from benchmarks.steps.peers import need_peft
    from benchmarks.steps.regimes import PEFT_PROGRAMS, choose
    from weft.plan.cost.published_shapes import find_shape

    for name in model or []:
        find_shape(name)
    chosen = choose(model or [], regime or [])
    device = _device(needs_gpu=any(name != "tiny" for name in chosen))
    check_kernels(kernels)
    check_files(json, plot)
    if any(run.program in PEFT_PROGRAMS for regimes in chosen.values() for regime in regimes for run in regime.runs):
        need_peft()

    def keep(found: session.Session) -> None:
        if json is not None:
            report.write_json(json, found.values, device)

    run = session.Session(chosen, device, clock.QUICK if quick else clock.THOROUGH, kernels, say=say, keep=keep)
    run.measure()
    raise typer.Exit(conclude(run.figures, run.failures, device, plot))


def kernels(
    regime: Annotated[list[str] | None, typer.Option(help="Figure to measure; may be repeated. Default: all.")] = None,
    json: JsonFile = None,
    plot: PlotFile = None,
    quick: Quick = False,
) -> None:
    """One linear with adapters against the frozen linear, forward and backward, with the error beside each timing."""
    from benchmarks import clock, report
    from benchmarks.kernels import choose_cases, measure_case
    from benchmarks.output import check_files, conclude, say

    cases = choose_cases(regime or [])
    device = _device(needs_gpu=True)
    check_files(json, plot)
    import torch

    effort = clock.QUICK if quick else clock.THOROUGH
    figures, failures = [], []
    for case in cases:
        try:
            figures.append(measure_case(case, device, torch.bfloat16, effort, say))
        except WeftError as error:
            failures.append(str(error))
            continue
        say(f"  {figures[-1].line}")
        if json is not None:
            report.write_json(json, {found.key: found.value for found in figures}, device)
    raise typer.Exit(conclude(figures, failures, device, plot))


def agreement(
    model: Annotated[str, typer.Option(help="The shape whose widths are used, for two of its layers.")] = "tiny",
    json: JsonFile = None,
) -> None:
    """The fast path's gradients against the reference path's, for every kind of launch."""
    from benchmarks import report
    from benchmarks.output import check_files, conclude, say
    from benchmarks.steps.agreement import measure_agreement
    from weft.plan.cost.published_shapes import find_shape

    shape = find_shape(model)
    check_files(json, None)
    device = _device(needs_gpu=False)
    import torch

    from weft.kernels.device import is_cpu

    dtype = torch.float32 if is_cpu(device) else torch.bfloat16
    found = measure_agreement(shape, dtype, device, say)
    if json is not None:
        report.write_json(json, {found.key: found.value}, device)
    raise typer.Exit(conclude([found], [], device, None))


def serve(json: JsonFile = None) -> None:
    """The service under load: 1,000 jobs in the queue and 200 clients that poll while a worker trains."""
    from benchmarks.output import run_parts
    from benchmarks.service.load import PARTS, TARGETS
    from weft.cli.service.serve import need_serve

    need_serve()
    raise typer.Exit(run_parts(PARTS, TARGETS, json))


def pipeline(
    regime: Annotated[list[str] | None, typer.Option(help="Figure to measure; may be repeated. Default: all.")] = None,
    profile: Annotated[
        Path | None,
        typer.Option(
            parser=user_path,
            metavar="PATH",
            help=f"Simulate 70B with what `weft profile` measured. Default: {PROFILE} if it is there.",
        ),
    ] = None,
    json: JsonFile = None,
) -> None:
    """Stages of one replica: recorded beside simulated, how long they idle, and 70B beside other schedules."""
    from benchmarks.output import run_parts
    from benchmarks.pipeline.parts import ON_GPU, TARGETS, choose_parts
    from weft.plan.cost.profile import load_profile

    found = profile or (PROFILE if PROFILE.exists() else None)
    parts = choose_parts(regime or [], None if found is None else load_profile(found))
    if not ON_GPU & parts.keys() and not regime:
        typer.echo(f"not measured, since torch sees no GPU: {', '.join(sorted(ON_GPU))}")
    raise typer.Exit(run_parts(parts, TARGETS, json, on_gpu=ON_GPU))


def replicas(
    regime: Annotated[
        list[str] | None, typer.Option(help="Figure to measure; may be repeated. Default: all that can be.")
    ] = None,
    json: JsonFile = None,
) -> None:
    """Jobs over many replicas: placing and controlling them, speed, recovery, bits, and eight GPUs, simulated."""
    from benchmarks.output import run_parts
    from benchmarks.replicas.parts import ON_GPU, TARGETS, choose_parts
    from weft.kernels.device import has_gpu

    parts = choose_parts(regime or [], has_gpu=has_gpu())
    raise typer.Exit(run_parts(parts, TARGETS, json, on_gpu=ON_GPU))


def deploy(json: JsonFile = None) -> None:
    """Deployments of unlike replicas: how long planning and dispatch take, and the GPU-seconds they save, predicted."""
    from benchmarks.deploy.parts import PARTS, TARGETS
    from benchmarks.output import run_parts

    raise typer.Exit(run_parts(PARTS, TARGETS, json))


def methods(
    model: Annotated[str, typer.Option(help="Shape to build with random weights.")] = "llama-3.1-8b",
    regime: Annotated[list[str] | None, typer.Option(help="Figure to measure; may be repeated. Default: all.")] = None,
    json: JsonFile = None,
    quick: Quick = False,
) -> None:
    """PEFT methods and objectives mixed in one run, beside LoRA alone and beside PEFT."""
    from benchmarks import clock
    from benchmarks.methods.parts import TARGETS, MethodBench, choose_parts
    from benchmarks.output import run_parts
    from benchmarks.steps.peers import need_peft
    from weft.plan.cost.published_shapes import find_shape

    shape = find_shape(model)
    device = _device(needs_gpu=shape.name != "tiny")
    need_peft()
    parts = choose_parts(regime or [], MethodBench(shape, device, clock.QUICK if quick else clock.THOROUGH))
    raise typer.Exit(run_parts(parts, TARGETS, json, on_gpu=[] if device.type == "cpu" else list(parts)))


def wall(
    regime: Annotated[list[str] | None, typer.Option(help="tiny, 8b, share, cpu or prepare; may be repeated.")] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            parser=user_path,
            metavar="PATH",
            help="Data file of the jobs. Default: made-up problems as long as GSM8K's.",
        ),
    ] = None,
    rows: Annotated[int, typer.Option(min=1, help="Rows that regime prepare makes and prepares.")] = 1_000_000,
    peers: Annotated[
        bool, typer.Option(help="Also time transformers' Trainer with PEFT, and datasets.map, on the same data.")
    ] = True,
    json: JsonFile = None,
) -> None:
    """Whole runs of `weft train` from the command to the last adapter, cold and warm; and preparing many rows."""
    import torch

    from benchmarks import report
    from benchmarks.output import check_files, conclude, say
    from benchmarks.wall.session import WallSession, choose_cases, needs_gpu
    from weft.kernels.device import default_device, has_gpu

    names = choose_cases(regime or [], has_gpu=has_gpu())
    check_files(json, None)
    if data is not None and not data.is_file():
        raise ConfigError("there is no such file.", where=f"--data {data}")
    device = default_device()
    figures = []
    with WallSession.open(device, data=data, num_rows=rows, peers=peers, say=say) as session:
        for name in names:
            found = session.measure(name)
            figures += found
            for figure in found:
                say(f"  {figure.line}")
            if json is not None:
                values = {figure.key: figure.value for figure in found}
                if needs_gpu(name):
                    report.write_json(json, values, device)
                else:
                    report.write_json(json, values, torch.device("cpu"), key="machine_cpu")
    raise typer.Exit(conclude(figures, [], device, None))


def check_kernels(kernels: str) -> None:
    """ConfigError for a path that Weft does not have."""
    if kernels not in PATHS:
        raise ConfigError(f"got {kernels!r}; accepted are {', '.join(PATHS)}.", where="--kernels")


def _device(*, needs_gpu: bool) -> torch.device:
    """The GPU, or the CPU for what also runs there."""
    from weft.kernels.device import default_device, has_gpu

    if needs_gpu and not has_gpu():
        raise ModelError(
            "these measurements need a CUDA GPU and torch sees none; `step --model tiny` runs anywhere.",
            where="benchmarks",
        )
    return default_device()
