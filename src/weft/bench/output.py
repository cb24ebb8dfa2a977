"""How a measurement is told: line by line while it runs, then as a table, and kept in files on the way."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from weft.bench import report
from weft.bench.figures import Figure, Parts, Targets, measure_parts
from weft.report.console import output_console


def say(line: str) -> None:
    """Prints one line at once, so that a run that is cut short still shows what it had."""
    print(line, flush=True)


def check_files(json: Path | None, plot: Path | None) -> None:
    """Refuses files that could not be written, before anything is measured."""
    if json is not None:
        report.read_json(json)
    if plot is not None:
        report.check_plot(plot)


def run_parts(parts: Parts, targets: Targets, json: Path | None) -> int:
    """Measures on the CPU part by part and keeps each as soon as it is there; returns the exit code."""
    check_files(json, None)
    device = torch.device("cpu")
    figures: list[Figure] = []
    for name, values, found in measure_parts(parts, targets):
        say(name)
        for figure in found:
            say(f"  {figure.line}")
        figures += found
        if json is not None:
            report.write_json(json, values, device)
    return conclude(figures, [], device, None)


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
