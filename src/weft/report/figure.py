"""What every figure of the report starts from: plotly itself, a bare layout, and safe labels.

A figure carries data and shape; the page gives it the colours of its background. Every trace that belongs to one job
says so in `meta.job` (the job's place in the run), so that the page can show and hide a job everywhere at once.
"""

from __future__ import annotations

import html
from typing import Any

from weft.errors import MissingExtraError
from weft.report.run_data import RunData

UNIFIED_HOVER_JOBS = 8
"""Up to here one box can name the values of all jobs."""

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
    """A figure without legend, title or colours of its own; the page adds those."""
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
        yaxis={"zeroline": False, "nticks": 6, "exponentformat": "e"},
    )
    if not unified:
        figure.update_traces(hoverlabel={"namelength": -1})
    return figure


def label(name: str) -> str:
    """A name as plotly must get it, since it reads tags such as <b> in labels."""
    return html.escape(name, quote=False)
