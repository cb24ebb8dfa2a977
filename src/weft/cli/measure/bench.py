"""`weft bench`: how fast Weft is on this machine, beside what people run today."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from weft.errors import ConfigError, ModelError, WeftError

if TYPE_CHECKING:
    import torch

    from weft.bench.figures import Figure, Parts, Targets

    Values = dict[str, float]

bench = typer.Typer(
    help="Measure speed on this machine, beside what people run today.", no_args_is_help=True, rich_markup_mode=None
)
PATHS = ("auto", "fused", "reference")
JsonFile = Annotated[Path | None, typer.Option("--json", help="Add the figures to this JSON file.")]
PlotFile = Annotated[Path | None, typer.Option("--plot", help="Draw the figures into this .svg or .png file.")]
Quick = Annotated[bool, typer.Option("--quick", help="Fewer repeats: for a first look, not for publishing.")]


@bench.command("step")
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
    from weft.bench import clock, report, session
    from weft.bench.peers import need_peft
    from weft.bench.regimes import PEFT_PROGRAMS, choose
    from weft.bench.shapes import find_shape

    for name in model or []:
        find_shape(name)
    chosen = choose(model or [], regime or [])
    device = _device(needs_gpu=any(name != "tiny" for name in chosen))
    if kernels not in PATHS:
        raise ConfigError(f"got {kernels!r}; accepted are {', '.join(PATHS)}.", where="--kernels")
    _check_files(json, plot)
    if any(run.program in PEFT_PROGRAMS for regimes in chosen.values() for regime in regimes for run in regime.runs):
        need_peft()

    def keep(found: session.Session) -> None:
        if json is not None:
            report.write_json(json, found.values, device)

    run = session.Session(chosen, device, clock.QUICK if quick else clock.THOROUGH, kernels, say=_say, keep=keep)
    run.measure()
    _conclude(run.figures, run.failures, device, plot)


@bench.command("kernels")
def kernels(
    regime: Annotated[list[str] | None, typer.Option(help="Figure to measure; may be repeated. Default: all.")] = None,
    json: JsonFile = None,
    plot: PlotFile = None,
    quick: Quick = False,
) -> None:
    """One linear with adapters against the frozen linear, forward and backward, with the error beside each timing."""
    from weft.bench import clock, report
    from weft.bench.kernels import choose_cases, measure_case

    cases = choose_cases(regime or [])
    device = _device(needs_gpu=True)
    _check_files(json, plot)
    import torch

    effort = clock.QUICK if quick else clock.THOROUGH
    figures, failures = [], []
    for case in cases:
        try:
            figures.append(measure_case(case, device, torch.bfloat16, effort, _say))
        except WeftError as error:
            failures.append(str(error))
            continue
        _say(f"  {figures[-1].line}")
        if json is not None:
            report.write_json(json, {found.key: found.value for found in figures}, device)
    _conclude(figures, failures, device, plot)


@bench.command("agreement")
def agreement(
    model: Annotated[str, typer.Option(help="The shape whose widths are used, for two of its layers.")] = "tiny",
    json: JsonFile = None,
) -> None:
    """The fast path's gradients against the reference path's, for every kind of launch."""
    from weft.bench import report
    from weft.bench.agreement import measure_agreement
    from weft.bench.shapes import find_shape

    shape = find_shape(model)
    _check_files(json, None)
    device = _device(needs_gpu=False)
    import torch

    from weft.kernels.device import is_cpu

    dtype = torch.float32 if is_cpu(device) else torch.bfloat16
    found = measure_agreement(shape, dtype, device, _say)
    if json is not None:
        report.write_json(json, {found.key: found.value}, device)
    _conclude([found], [], device, None)


@bench.command("curve")
def curve(
    steps: Annotated[int, typer.Option(help="Optimizer steps of each job.", min=1)] = 100,
    kernels: Annotated[str, typer.Option(help="Weft's path: auto, fused or reference.")] = "auto",
    json: JsonFile = None,
) -> None:
    """Loss curves on the embedded model: Weft beside PEFT, FP8 beside unquantised, alone beside others."""
    from weft.bench import report
    from weft.bench.curve import measure_curves
    from weft.bench.peers import need_peft

    _check_files(json, None)
    need_peft()
    device = _device(needs_gpu=False)
    figures = measure_curves(device, steps, kernels, _say)
    if json is not None:
        report.write_json(json, {found.key: found.value for found in figures}, device)
    _conclude(figures, [], device, None)


@bench.command("plan")
def plan(json: JsonFile = None) -> None:
    """Planning: packing, pipelines and their bubbles, fusion, cost models, a cluster's week."""
    from weft.bench.plan import PARTS, TARGETS

    _measure_parts(PARTS, TARGETS, json)


@bench.command("sweep")
def sweep(json: JsonFile = None) -> None:
    """Sweeps: 120 configurations planned on eight GPUs; 16 really trained beside one by one, and stopped early."""
    from weft.bench.sweep import PARTS, TARGETS

    _measure_parts(PARTS, TARGETS, json)


@bench.command("serve")
def serve(json: JsonFile = None) -> None:
    """The service under load: 1,000 jobs in the queue and 200 clients that poll while a worker trains."""
    from weft.bench.serve import PARTS, TARGETS
    from weft.cli.service.serve import need_serve

    need_serve()
    _measure_parts(PARTS, TARGETS, json)


def _measure_parts(parts: Parts, targets: Targets, json: Path | None) -> None:
    """Measures on the CPU part by part, and keeps each as soon as it is there."""
    import torch

    from weft.bench import report
    from weft.bench.figures import measure_parts

    _check_files(json, None)
    device = torch.device("cpu")
    figures: list[Figure] = []
    for name, values, found in measure_parts(parts, targets):
        _say(name)
        for figure in found:
            _say(f"  {figure.line}")
        figures += found
        if json is not None:
            report.write_json(json, values, device)
    _conclude(figures, [], device, None)


def _device(*, needs_gpu: bool) -> torch.device:
    """The GPU, or the CPU for what also runs there."""
    from weft.kernels.device import default_device, has_gpu

    if needs_gpu and not has_gpu():
        raise ModelError(
            "these measurements need a CUDA GPU and torch sees none; `weft bench step --model tiny` runs anywhere.",
            where="weft bench",
        )
    return default_device()


def _check_files(json: Path | None, plot: Path | None) -> None:
    from weft.bench import report

    if json is not None:
        report.read_json(json)
    if plot is not None:
        report.check_plot(plot)


def _say(line: str) -> None:
    """One line at once, so that a run that is cut short still shows what it had."""
    print(line, flush=True)


def _conclude(figures: list[Figure], failures: list[str], device: torch.device, plot: Path | None) -> None:
    from weft.bench import report

    console = Console()
    found = report.machine(device)
    title = f"{found['device']}, torch {found['torch']}, {found['date']}"
    if figures:
        console.print()
        console.print(report.table(figures))
        console.print(title, highlight=False, style="dim")
        if plot is not None:
            report.draw(plot, figures, title)
    for failure in failures:
        console.print(failure, style="yellow", highlight=False, markup=False, soft_wrap=True)
    raise typer.Exit(1 if failures else 0)
