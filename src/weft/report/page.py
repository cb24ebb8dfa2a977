"""Writes report.html: one self-contained page about a run that opens offline, in light and dark, on a phone too.

All text of users (names, reasons, settings) goes through the template's autoescape or, inside the data of the charts,
through `json_for_script`; the page's own policy forbids it to load anything from anywhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from weft import __version__
from weft.report import readable
from weft.report.charts import draw_charts, own_metrics
from weft.report.document import Cell, json_for_script, packed_plotly, template_file, templates, time_parts
from weft.report.figure import job_colours
from weft.report.read_run import read_run
from weft.report.run_data import JobReport, RunData, made_with
from weft.report.time_charts import drawn_microbatches
from weft.store.atomic import write_file
from weft.wall_clock import TimeSplit

STATE_ORDER = ("running", "paused", "queued", "succeeded", "failed", "cancelled", "unknown")


@dataclass(frozen=True)
class SkillGain:
    """The score of one adapter on its task before and after its training."""

    name: str
    before: float
    """Exact match of the backbone alone, 0 to 1."""
    after: float
    """Exact match with the adapter, 0 to 1."""


@dataclass(frozen=True)
class ReportExtra:
    """A section above the jobs, for a command with more to show than a run directory holds."""

    title: str
    paragraph: str = ""
    skills: Sequence[SkillGain] = ()
    facts: Sequence[tuple[str, str]] = ()
    """Labels and values, in words, e.g. `("speed-up", "3.1x")`."""
    speeds: Sequence[tuple[str, float]] = ()
    """Labels and numbers, drawn as bars to compare."""
    speeds_unit: str = "tokens/s"


def write_report(
    run_dir: Path, *, extra: ReportExtra | None = None, time: Callable[[], TimeSplit] | None = None
) -> Path:
    """Writes `report.html` into the run directory and returns its path.

    `time`: called last for the run's times, if they are not yet recorded: drawing takes time as well.
    """
    run = read_run(Path(run_dir))
    page = render(run, extra, time)
    path = run.path / "report.html"
    write_file(path, page)
    return path


def render(run: RunData, extra: ReportExtra | None = None, time: Callable[[], TimeSplit] | None = None) -> str:
    plotly = packed_plotly()  # a missing plotly is reported before any work
    environment = templates()
    charts = draw_charts(run)
    shown, total = len(drawn_microbatches(run)), len(run.microbatches)
    run = run if time is None else replace(run, time=time())
    recorded = "passes of microbatches" if run.is_staged else "recorded microbatches"
    return environment.get_template("page.html").render(
        run=run,
        about=made_with(run.info),
        tiles=_tiles(run),
        jobs=_job_rows(run),
        charts=charts,
        own_metrics=own_metrics(run),
        figures=json_for_script(charts),
        time_parts=time_parts(run.time),
        timeline_note=f"{f'the first {shown:,} of ' if shown < total else ''}{total:,} {recorded}",
        extra=extra,
        skill_colours=dict(zip((job.name for job in run.jobs), job_colours(len(run.jobs)), strict=True)),
        readable=readable,
        plotly=plotly,
        style=template_file(environment, "page.css"),
        scripts=[template_file(environment, name) for name in ("page.js", "plotly.js")],
        version=__version__,
    )


def _tiles(run: RunData) -> list[tuple[str, str, str]]:
    """The main numbers: label, value, and a note."""
    states = Counter(job.state for job in run.jobs)
    ordered = sorted(states, key=lambda s: STATE_ORDER.index(s) if s in STATE_ORDER else len(STATE_ORDER))
    rows = sum(span.rows for span in run.microbatches)
    fill = sum(span.tokens for span in run.microbatches) / rows if rows else None
    tiles = [
        ("jobs", str(len(run.jobs)), ", ".join(f"{states[state]} {state}" for state in ordered)),
        ("time", readable.duration(run.seconds), "of training"),
        ("trained", readable.count(run.trained_tokens), "tokens"),
        ("throughput", readable.rate(run.tokens_per_s), "tokens/s over all jobs"),
    ]
    if fill is not None:
        tiles.append(("fill", readable.percent(fill), "of microbatch rows held tokens"))
    return tiles


def _job_rows(run: RunData) -> list[dict[str, Any]]:
    rows, has_measures = [], any(job.measured for job in run.jobs)
    for job, colour in zip(run.jobs, job_colours(len(run.jobs)), strict=True):
        row: dict[str, Any] = {"name": job.name, "colour": colour, "state": job.state, "remarks": job.remarks}
        row |= {
            "cells": [*_cells(job), *(_measured(job) if has_measures else [])],
            "adapter": job.adapter_path,
            "settings": list(_flat(job.method_settings)),
        }
        rows.append(row)
    return rows


def _cells(job: JobReport) -> list[Cell]:
    """Label, text and sort key of one job's numbers."""
    steps = f"{job.step:,}" if job.num_steps in (None, job.step) else f"{job.step:,} / {job.num_steps:,}"
    return [
        ("steps", steps, job.step),
        ("loss", readable.loss(job.final_loss), job.final_loss),
        ("best eval", readable.loss(job.best_eval_loss), job.best_eval_loss),
        ("lr", readable.learning_rate(job.learning_rate), job.learning_rate),
        ("method", _method(job), job.rank),
        ("tokens", readable.count(job.trained_tokens), job.trained_tokens),
        ("tokens/s", readable.rate(job.tokens_per_s), job.tokens_per_s),
    ]


def _measured(job: JobReport) -> list[Cell]:
    """Metrics of its objective, sorted by the first of them."""
    return [("measured", readable.measures(job.measured), next(iter(job.measured.values()), None))]


def _method(job: JobReport) -> str:
    return job.method if job.rank is None else f"{job.method} {job.rank}"


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested settings as dotted names and text."""
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        elif isinstance(value, list):
            yield f"{prefix}{key}", ", ".join(str(item) for item in value)
        else:
            yield f"{prefix}{key}", readable.NOTHING if value in (None, {}) else str(value)
