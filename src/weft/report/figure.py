"""Common parts of the report's figures: plotly itself, a bare layout, safe labels, and the colours of jobs.

A figure carries data and shape; the page gives it the colours of its background. Every trace that belongs to one job
has the job's index in the run as `meta.job`, so that the page can show and hide a job everywhere at once. A job keeps
one colour in all charts, readable on white and on near-black.
"""

from __future__ import annotations

import colorsys
import html
from typing import Any

from weft.errors import MissingExtraError
from weft.report.run_data import RunData

UNIFIED_HOVER_JOBS = 8
"""With up to so many jobs one box can name the values of all."""

CALM = (
    "#4a7fb5",  # blue
    "#d98a3d",  # orange
    "#4b9b78",  # green
    "#c65d5d",  # red
    "#8c70b8",  # violet
    "#3a9fae",  # teal
    "#c4a234",  # gold
    "#c272a0",  # pink
    "#84964a",  # olive
    "#97765f",  # brown
)
GOLDEN_ANGLE = 0.618034
"""Turning the hue by this much does not soon come close to an earlier hue."""

PlotlyFigure = Any
"""A plotly.graph_objects.Figure; plotly is imported only when a figure is drawn."""


def graph_objects() -> Any:
    """plotly.graph_objects, or a MissingExtraError."""
    try:
        import plotly.graph_objects as go
    except ImportError:
        raise MissingExtraError("report.html needs plotly; install it with: pip install plotly") from None
    return go


def bare_figure(run: RunData, traces: list[Any], *, x_title: str) -> PlotlyFigure:
    """A figure without legend, title or colours; the page adds those."""
    go = graph_objects()
    unified = len(run.jobs) <= UNIFIED_HOVER_JOBS
    figure = go.Figure(traces)
    figure.update_layout(
        # An empty template: plotly's own would add 7 kB and its colours to every figure.
        template=go.layout.Template(),
        showlegend=False,
        hovermode="x unified" if unified else "closest",
        margin={"l": 50, "r": 14, "t": 10, "b": 42},
        xaxis={
            "title": {"text": x_title, "standoff": 8},
            "zeroline": False,
            "nticks": 8,
            "spikethickness": 1,
            "spikedash": "solid",
        },
        yaxis={"zeroline": False, "nticks": 6, "exponentformat": "e", "automargin": True},
    )
    if not unified:
        figure.update_traces(hoverlabel={"namelength": -1})
    return figure


def label(name: str) -> str:
    """A name with escaped tags such as <b>, which plotly would interpret."""
    return html.escape(name, quote=False)


def job_colours(num_jobs: int) -> list[str]:
    """One `#rrggbb` per job: ten picked ones, then hues far from those before."""
    return [CALM[i] if i < len(CALM) else _further(i) for i in range(num_jobs)]


def faint(colour: str, alpha: float) -> str:
    """The colour as CSS with an alpha."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{alpha:g})"


def _further(index: int) -> str:
    lightness = (0.46, 0.60, 0.53)[index % 3]
    channels = colorsys.hls_to_rgb(index * GOLDEN_ANGLE % 1.0, lightness, 0.42)
    return "#" + "".join(f"{round(255 * channel):02x}" for channel in channels)
