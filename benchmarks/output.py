"""How a measurement is told: line by line while it runs, then as a table, and kept in files on the way."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import torch

from benchmarks import report
from benchmarks.figures import Figure, Parts, Targets, measure_parts
from weft.kernels.device import default_device
from weft.report.console import output_console
from weft.report.deploy_picture import check_plot


def say(line: str) -> None:
    """Prints one line at once, so that a run that is cut short still shows what it had."""
    print(line, flush=True)


def check_files(json: Path | None, plot: Path | None) -> None:
    """Refuses files that could not be written, before anything is measured."""
    if json is not None:
        report.read_json(json)
    if plot is not None:
        check_plot(plot)


def run_parts(parts: Parts, targets: Targets, json: Path | None, *, on_gpu: Collection[str] = ()) -> int:
    """Measures part by part and keeps each as soon as it is there; returns the exit code.

    All is measured on the CPU but the parts `on_gpu`, beside which the file names their machine as `machine_gpu`.
    """
    check_files(json, None)
    cpu = torch.device("cpu")
    figures: list[Figure] = []
    for name, values, found in measure_parts(parts, targets):
        say(name)
        for figure in found:
            say(f"  {figure.line}")
        figures += found
        if json is not None:
            is_cpu = name not in on_gpu
            report.write_json(
                json, values, cpu if is_cpu else default_device(), key="machine" if is_cpu else "machine_gpu"
            )
    return conclude(figures, [], default_device() if set(parts) <= set(on_gpu) else cpu, None)


def conclude(figures: Sequence[Figure], failures: Sequence[str], device: torch.device, plot: Path | None) -> int:
    """Prints the table and what failed; returns the exit code."""
    console = output_console()
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
    return 1 if failures else 0
