"""`python -m benchmarks reproduce`: the experiments of a paper, run here, beside what the paper prints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from benchmarks.report import FREE, MET, MISSED, check_files, machine, read_json, show, write_json
from benchmarks.reproduce.experiments import Experiment, Paper, Values, page_of
from benchmarks.reproduce.lobra import LOBRA
from benchmarks.reproduce.lorafusion import LORAFUSION
from benchmarks.reproduce.mlora import MLORA
from benchmarks.reproduce.muxtune import MUXTUNE
from benchmarks.reproduce.plora import PLORA
from weft.cli.options import user_path
from weft.errors import ConfigError
from weft.kernels.device import has_gpu
from weft.report.readable import output_console
from weft.store.atomic import storage_errors, write_file

PAPERS = {paper.name: paper for paper in (LOBRA, MLORA, MUXTUNE, PLORA, LORAFUSION)}
LEAST = 0.1
"""The left end of a picture; figures that are worse, or of another sign, have an arrow there."""
COLOURS = {"reproduced": FREE, "exceeded": MET, "not reproduced": MISSED}
RECORDED = Path(__file__).parent
"""Folder with the recorded JSON files, which the page is made of."""


def reproduce(
    paper: Annotated[str | None, typer.Argument(help=f"One of {', '.join(PAPERS)}.")] = None,
    experiments: Annotated[list[str] | None, typer.Argument(help="Such as figure-4. Default: all.")] = None,
    json: Annotated[
        Path | None,
        typer.Option("--json", parser=user_path, metavar="DIR", help="Keep PAPER.json and PAPER.svg in this folder."),
    ] = None,
    page: Annotated[
        Path | None,
        typer.Option(parser=user_path, metavar="FILE", help="Write the page of what is recorded, and run nothing."),
    ] = None,
) -> None:
    """Run the experiments of a paper, and print the paper's figures beside ours."""
    if page is not None:
        recorded = {name: read_json(RECORDED / f"{name}.json") for name in PAPERS}
        text = page_of(list(PAPERS.values()), {name: values for name, values in recorded.items() if values})
        write_file(page, text.encode())
        return
    if paper not in PAPERS:
        got = "nothing" if paper is None else repr(paper)
        raise ConfigError(f"got {got}; accepted are {', '.join(PAPERS)}.", where="PAPER")
    chosen = _chosen(PAPERS[paper], experiments or [])
    file = None if json is None else json / f"{paper}.json"
    check_files(file, None)
    values = _measured(chosen, file)
    _show(chosen, values)
    if file is not None:
        # All that the file holds, from earlier commands too.
        _draw(PAPERS[paper], read_json(file), file.with_suffix(".svg"))


def _draw(paper: Paper, values: Mapping[str, Any], path: Path) -> None:
    """Draws each figure as a part of the paper's, on a logarithmic axis; the further right, the better."""
    from matplotlib.figure import Figure

    rows = [
        (f"{experiment.name}: {row.what}", row, float(values[row.key]))
        for experiment in paper.experiments
        for row in experiment.rows
        if row.published is not None and row.key in values
    ]
    if not rows:
        return
    picture = Figure(figsize=(10, 1 + 0.3 * len(rows)), layout="constrained")
    axes = picture.subplots()
    for index, (_, row, value) in enumerate(rows):
        published = value if row.published is None else row.published
        worse, better = (value, published) if row.kind.less_is_better else (published, value)
        ratio = 1.0 if value == published else max(LEAST, better / worse if worse else 1 / LEAST)
        axes.plot([1, ratio], [index, index], color=COLOURS[row.result(value)], linewidth=2)
        axes.plot(ratio, index, "<" if ratio == LEAST else "o", color=COLOURS[row.result(value)])
        text = f"{row.kind.shown(value)}, paper {row.kind.shown(published)} ({row.source}: {row.result(value)})"
        axes.annotate(text, (max(1, ratio), index), (8, 0), textcoords="offset points", va="center", fontsize=8)
    axes.axvline(1.0, color="#808890", linewidth=1, linestyle="--")
    axes.set_yticks(range(len(rows)), [label for label, _, _ in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.xaxis.set_minor_formatter("")
    left, right = axes.get_xlim()
    axes.set_xlim(left, right * (right / left) ** 0.6 * 2)
    axes.set_xlabel("the paper's figure is 1; further right is better")
    axes.set_title(paper.title, loc="left", fontsize=10)
    with storage_errors(path):
        picture.savefig(path)


def _chosen(paper: Paper, names: list[str]) -> list[Experiment]:
    try:
        return paper.chosen(names)
    except KeyError as error:
        known = ", ".join(experiment.name for experiment in paper.experiments)
        raise ConfigError(f"got {error.args[0]!r}; {paper.name} has {known}.", where="EXPERIMENT") from None


def _measured(experiments: list[Experiment], file: Path | None) -> Values:
    """Experiment by experiment, each kept as soon as it is there; those that measure the same do it once."""
    values: dict[str, float] = {}
    done = set()
    for experiment in experiments:
        if experiment.needs_gpu and not has_gpu():
            show(f"{experiment.name}: needs a GPU, left out")
            continue
        show(f"{experiment.name}: {experiment.title}")
        if experiment.measure not in done:
            done.add(experiment.measure)
            found = experiment.measure()
            values |= found
            if file is not None:
                write_json(file, found, torch.device("cpu"))
    return values


def _show(experiments: list[Experiment], values: Values) -> None:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("experiment", "figure"):
        table.add_column(heading)
    for heading in ("paper", "Weft"):
        table.add_column(heading, justify="right")
    for heading in ("how", "result"):
        table.add_column(heading)
    for experiment in experiments:
        name = experiment.name
        for row in experiment.rows:
            if row.key not in values:
                continue
            value = values[row.key]
            published = "" if row.published is None else row.kind.shown(row.published)
            table.add_row(name, row.what, published, row.kind.shown(value), row.source, row.result(value))
            name = ""
    console = output_console()
    console.print()
    console.print(table)
    console.print(machine(torch.device("cpu"))["device"], highlight=False, style="dim")
