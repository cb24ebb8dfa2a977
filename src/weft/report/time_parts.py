"""Shows wall-clock time by activity: the parts of one bar, as pages draw them."""

from __future__ import annotations

from weft.report import readable
from weft.report.document import PagePart
from weft.wall_clock import Activity, TimeSplit

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
