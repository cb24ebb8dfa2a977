"""Common parts of report pages: templates, their files, and data that no text can break out of."""

from __future__ import annotations

import base64
import gzip
from collections.abc import Mapping

import jinja2
from markupsafe import Markup

from weft.report import readable
from weft.report.figure import PlotlyFigure, graph_objects
from weft.wall_clock import Activity, TimeSplit

PagePart = tuple[str, str, str, float]
"""A part of a bar: name, colour, amount in words, share in per cent."""
Cell = tuple[str, str, float | None]
"""Label, text and sort key of one number in a table."""


def templates() -> jinja2.Environment:
    """The templates of pages; all values in them are escaped."""
    return jinja2.Environment(
        loader=jinja2.PackageLoader("weft.report", "template"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def json_for_script(charts: Mapping[str, PlotlyFigure]) -> Markup:
    """The figures as JSON that no text inside can break out of a script element with."""
    text = "{" + ",".join(f'"{name}":{figure.to_json()}' for name, figure in charts.items()) + "}"
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def template_file(environment: jinja2.Environment, name: str) -> Markup:
    """A style sheet or a script, not escaped."""
    assert environment.loader is not None
    return Markup(environment.loader.get_source(environment, name)[0])


def packed_plotly() -> str:
    """Plotly's script, compressed to two fifths of its size; `plotly.js` of the templates unpacks it in the browser.

    MissingExtraError if plotly is not installed.
    """
    graph_objects()
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
