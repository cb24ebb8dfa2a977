"""Common parts of the report's figures: plotly itself, a bare layout, safe labels, series of numbers, colours of jobs.

A figure carries data and shape; the page gives it the colours of its background. Every trace that belongs to one job
has the job's index in the run as `meta.job`, so that the page can show and hide a job everywhere at once. A job keeps
one colour in all charts, readable on white and on near-black. Long series become short ones that draw the same picture.
"""

from __future__ import annotations

import colorsys
import html
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from weft.errors import ConfigError, MissingExtraError, StorageError, install_command
from weft.report.run_data import RunData
from weft.store.atomic import storage_errors

if TYPE_CHECKING:
    from weft.plan.simulate.deploy_forecast import DeployForecast

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
    """The name with HTML escaped, because plotly would interpret tags such as <b>."""
    return html.escape(name, quote=False)


def job_colours(num_jobs: int) -> list[str]:
    return [CALM[i] if i < len(CALM) else _further(i) for i in range(num_jobs)]


def faint(colour: str, alpha: float) -> str:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{alpha:g})"


def _further(index: int) -> str:
    lightness = (0.46, 0.60, 0.53)[index % 3]
    channels = colorsys.hls_to_rgb(index * GOLDEN_ANGLE % 1.0, lightness, 0.42)
    return "#" + "".join(f"{round(255 * channel):02x}" for channel in channels)


Points = list[tuple[float, float | None]]
"""(x, y) in order of x; a y of None is a gap."""


def smooth(points: Points, window: int) -> Points:
    """A mean over about `window` points around each, which does not trail a falling curve; gaps stay gaps."""
    ahead = _exponential_means([y for _, y in points], window / 2)
    back = _exponential_means([y for _, y in reversed(points)], window / 2)[::-1]
    return [
        (x, None if a is None or b is None else (a + b) / 2) for (x, _), a, b in zip(points, ahead, back, strict=True)
    ]


def thin(points: Points, limit: int) -> Points:
    """At most `limit` points that keep the first, the last, and the lowest and highest of every stretch between."""
    if len(points) <= limit:
        return points
    inner = points[1:-1]
    num_stretches = max((limit - 2) // 2, 1)
    kept = [points[0]]
    for i in range(num_stretches):
        stretch = inner[i * len(inner) // num_stretches : (i + 1) * len(inner) // num_stretches]
        known = [p for p in stretch if p[1] is not None]
        if known:
            ends = {min(known, key=_y), max(known, key=_y)}
            kept += sorted(ends, key=lambda p: p[0])
        elif stretch:
            kept.append(stretch[0])
    return [*kept, points[-1]]


def rate_in_bins(marks: Sequence[tuple[float, float]], end: float, num_bins: int) -> list[float]:
    """Amount per unit of time in equal bins over [0, end], from (time, amount so far) in order; between two marks the
    amount grows evenly."""
    times, amounts = zip(*marks, strict=True)
    at_edges = np.interp(np.linspace(0.0, end, num_bins + 1), times, np.maximum.accumulate(amounts))
    return [float(rate) for rate in np.diff(at_edges) * (num_bins / end)]


def in_chunks(num_items: int, num_chunks: int) -> list[slice]:
    """Slices that cut `num_items` into at most `num_chunks` equal runs, none empty."""
    num_chunks = min(num_items, num_chunks)
    return [slice(i * num_items // num_chunks, (i + 1) * num_items // num_chunks) for i in range(num_chunks)]


def rounded(values: Sequence[float | None], digits: int = 4) -> list[float | None]:
    """The values to so many significant digits: enough for a screen, and a fraction of the bytes."""
    return [None if value is None else float(f"{value:.{digits}g}") for value in values]


def _exponential_means(values: list[float | None], window: float) -> list[float | None]:
    """The exponential mean up to each value, unbiased from the first one."""
    decay = 1.0 - 1.0 / max(window, 1.0)
    mean = weight = 0.0
    means: list[float | None] = []
    for value in values:
        if value is None:
            means.append(None)
            continue
        mean = decay * mean + (1.0 - decay) * value
        weight = decay * weight + (1.0 - decay)
        means.append(mean / weight)
    return means


def _y(point: tuple[float, float | None]) -> float:
    return point[1] or 0.0


PICTURES = (".svg", ".png")
IDLE = "#e4e6e9"


def check_plot(path: Path) -> None:
    """Refuses a picture that could not be drawn, before anything is measured."""
    if path.suffix not in PICTURES:
        raise ConfigError(f"got {path.name}; the name must end in {' or '.join(PICTURES)}.", where="--plot")
    if not path.parent.is_dir():
        raise StorageError(f"there is no directory {path.parent}.", where=f"--plot {path}")
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingExtraError(f"matplotlib is not installed; {install_command('bench')}.", where="--plot")


def draw_deployment(path: Path, forecast: DeployForecast, title: str) -> None:
    from matplotlib.figure import Figure

    plan, shared = forecast.deployment, forecast.shared
    kinds = list(dict.fromkeys(plan.replicas))
    picture = Figure(figsize=(8, 4.5), layout="constrained")
    axes = picture.subplots()
    below = 0
    for kind, seconds in zip(plan.replicas, shared.seconds, strict=True):
        colour = CALM[kinds.index(kind) % len(CALM)]
        middle, height = below + kind.num_gpus / 2, kind.num_gpus * 0.94
        axes.barh(middle, shared.step_s, height=height, color=IDLE)
        axes.barh(middle, seconds, height=height, color=colour)
        below += kind.num_gpus
    for index, kind in enumerate(kinds):
        axes.barh([0], [0], color=CALM[index % len(CALM)], label=f"{kind.layout} × {plan.replicas.count(kind)}")
    axes.barh([0], [0], color=IDLE, label="idle")
    axes.set_xlabel("seconds of a step")
    axes.set_ylabel("GPUs")
    axes.set_ylim(0, below)
    axes.set_title(title, loc="left", fontsize=9)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    with storage_errors(path):
        picture.savefig(path, dpi=160)
