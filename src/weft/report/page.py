"""Writes report.html: one self-contained page about a run that opens offline, in light and dark, on a phone too.

All text of users (names, reasons, settings) goes through the template's autoescape or, inside the data of the charts,
through `json_for_script`; the page's own policy forbids it to load anything from anywhere. The page of a sweep
(`sweep_page`) is made of the same parts.
"""

from __future__ import annotations

import base64
import functools
import gzip
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from weft import __version__
from weft.report import readable
from weft.report.charts import draw_charts, drawn_microbatches, own_metrics
from weft.report.figure import PlotlyFigure, graph_objects, job_colours
from weft.report.read_run import read_run
from weft.report.run_data import JobReport, RunData, made_with
from weft.store.atomic import write_file
from weft.store.wall_clock import Activity, TimeSplit

STATE_ORDER = ("running", "paused", "queued", "succeeded", "failed", "cancelled", "unknown")


@dataclass(frozen=True)
class SkillGain:
    name: str
    before: float
    after: float


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
    """Writes `report.html` into the run directory and returns its path. `time`: called last for the run's times, if
    they are not yet recorded: drawing takes time as well."""
    run = read_run(Path(run_dir))
    page = render(run, extra, time)
    path = run.path / "report.html"
    write_file(path, page)
    return path


def render(run: RunData, extra: ReportExtra | None = None, time: Callable[[], TimeSplit] | None = None) -> str:
    page = Page("page.html", "page.css", "page.js")
    charts = draw_charts(run)
    shown, total = len(drawn_microbatches(run)), len(run.microbatches)
    run = run if time is None else replace(run, time=time())
    recorded = "passes of microbatches" if run.is_staged else "recorded microbatches"
    return page.render(
        charts,
        run.time,
        run=run,
        about=made_with(run.info),
        tiles=_tiles(run),
        jobs=_job_rows(run),
        own_metrics=own_metrics(run),
        replicas=run.replica_means,
        predicted_from=run.predicted_from,
        timeline_note=f"{f'the first {shown:,} of ' if shown < total else ''}{total:,} {recorded}",
        extra=extra,
        skill_colours=dict(zip((job.name for job in run.jobs), job_colours(len(run.jobs)), strict=True)),
    )


def _tiles(run: RunData) -> list[tuple[str, str, str]]:
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
    if run.memory_in_words is not None:
        tiles.append(("memory", *run.memory_in_words))
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
    steps = f"{job.step:,}" if job.num_steps in (None, job.step) else f"{job.step:,} / {job.num_steps:,}"
    return [
        ("steps", steps, job.step),
        ("loss", readable.loss(job.final_loss), job.final_loss),
        ("best eval", readable.loss(job.best_eval_loss), job.best_eval_loss),
        ("lr", readable.learning_rate(job.learning_rate), job.learning_rate),
        ("method", job.method if job.rank is None else f"{job.method} {job.rank}", job.rank),
        ("tokens", readable.count(job.trained_tokens), job.trained_tokens),
        ("tokens/s", readable.rate(job.tokens_per_s), job.tokens_per_s),
    ]


def _measured(job: JobReport) -> list[Cell]:
    return [("measured", readable.measures(job.measured), next(iter(job.measured.values()), None))]


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        elif isinstance(value, list):
            yield f"{prefix}{key}", ", ".join(str(item) for item in value)
        else:
            yield f"{prefix}{key}", readable.NOTHING if value in (None, {}) else str(value)


PagePart = tuple[str, str, str, float]
"""A part of a bar: name, colour, amount in words, share in per cent."""
Cell = tuple[str, str, float | None]
"""Label, text and sort key of one number in a table."""


class Page:
    """A template with its style sheets and scripts; all other values in it are escaped. Made first, to report a missing
    plotly."""

    def __init__(self, template: str, *files: str) -> None:
        graph_objects()
        self._plotly = packed_plotly()
        self._environment = jinja2.Environment(
            loader=jinja2.PackageLoader("weft.report", "template"),
            autoescape=True,
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._template = self._environment.get_template(template)
        self._files = files

    def render(self, charts: Mapping[str, PlotlyFigure], time: TimeSplit | None, **values: Any) -> str:
        return self._template.render(
            values,
            charts=charts,
            figures=json_for_script(charts),
            time_parts=time_parts(time),
            readable=readable,
            plotly=self._plotly,
            style=Markup("").join(self._source(name) for name in self._files if name.endswith(".css")),
            scripts=[self._source(name) for name in (*self._files, "plotly.js") if name.endswith(".js")],
            version=__version__,
        )

    def _source(self, name: str) -> Markup:
        assert self._environment.loader is not None
        return Markup(self._environment.loader.get_source(self._environment, name)[0])


def json_for_script(charts: Mapping[str, PlotlyFigure]) -> Markup:
    """The figures as JSON that no text inside can break out of a script element with."""
    text = "{" + ",".join(f'"{name}":{figure.to_json()}' for name, figure in charts.items()) + "}"
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


@functools.cache
def packed_plotly() -> str:
    """Plotly's script, compressed to two fifths of its size; `plotly.js` of the templates unpacks it in the browser."""
    from plotly.offline import get_plotlyjs

    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode("ascii")


# Greys with a tint: the colours proper belong to the jobs.
COLOURS = {
    Activity.COMPUTING: "#5b6b82",
    Activity.EVALUATING: "#7fa39e",
    Activity.COMPILING: "#a58aa8",
    Activity.LOADING: "#93a8c4",
    Activity.PREPARING: "#c2ab83",
    Activity.WRITING: "#c08f84",
    Activity.IDLE: "color-mix(in srgb, var(--soft) 35%, transparent)",
}


def time_parts(split: TimeSplit | None) -> list[PagePart]:
    """Parts of the time, without empty ones; nothing if no time was recorded."""
    if split is None or not split.wall_s:
        return []
    spent = [(activity, split.seconds(activity)) for activity in Activity]
    return [(a, COLOURS[a], readable.duration(s), 100 * s / split.wall_s) for a, s in spent if s]
